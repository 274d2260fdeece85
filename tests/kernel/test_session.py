# SPDX-License-Identifier: LGPL-2.1-or-later

"""The default methods of a session that implements only its reports."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
from msgspec.structs import replace

from msatools.kernel.report import Progress, Report, Session, quietly
from tests.support.calls import MADE


class TimeReport(Report, frozen=True, kw_only=True):
    schema: ClassVar[str] = "msatools.time/1"

    grown_ns: int = 0


class Times(Session[TimeReport]):
    """A session that reports the given times of the kernel in turn."""

    def __init__(self, times: Sequence[int | None]) -> None:
        self._times = iter(times)

    def report(self, progress: Progress) -> TimeReport:
        return TimeReport(
            target=MADE,
            taken_at_ns=next(self._times),
            interval_ns=None,
            coverage={},
            notes=(),
        )


class Grown(Times):
    def delta(self, previous: TimeReport, current: TimeReport) -> TimeReport:
        assert previous.taken_at_ns is not None
        assert current.taken_at_ns is not None
        return replace(current, grown_ns=current.taken_at_ns - previous.taken_at_ns)


def test_intervals_without_a_delta() -> None:
    """An interval has a length if the kernel's time is known at both ends."""
    session = Times([5, 7, 10, None, 11])
    session.begin(quietly)
    assert session.period_s is None
    session.sample()
    reports = [session.advance(quietly) for _ in range(4)]
    assert [report.taken_at_ns for report in reports] == [7, 10, None, 11]
    assert [report.interval_ns for report in reports] == [2, 3, None, None]


def test_without_an_interval() -> None:
    assert Times([5]).report(quietly).interval_ns is None


def test_delta_gets_the_reports_at_both_ends() -> None:
    session = Grown([5, 7, 10, 20, 50])
    session.begin(quietly)
    assert [session.advance(quietly).grown_ns for _ in range(2)] == [2, 3]
    session.begin(quietly)
    assert session.advance(quietly).grown_ns == 30


def test_no_report() -> None:
    with pytest.raises(NotImplementedError):
        Session[TimeReport]().report(quietly)
