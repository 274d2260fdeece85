# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports at intervals, with samples in between, until the user stops them."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from msatools.cli.budget import Pace
from msatools.errors import UNREADABLE
from msatools.kernel.report import Note
from msatools.kernel.session import Progress, R, Session
from msatools.target.kcore import MovedError

T = TypeVar("T")


class Plan(Struct, frozen=True):
    """Interval, number and cost of the reports."""

    interval_s: float
    count: int | None = None
    """Number of reports; ``None`` for no limit."""

    share: float | None = None
    """Maximum share of one CPU, to which reports are delayed; ``None`` for no limit."""


class Call(Protocol):
    """Calls a collecting function, with progress and readable errors."""

    def __call__(self, collect: Callable[[Progress], T], /) -> T: ...


def reports(
    session: Session[R],
    plan: Plan,
    call: Call,
    again: Call,
    quit_before: Callable[[float], bool],
) -> Iterator[R]:
    """Yield the report of each interval.

    :param again: Like *call*, but may repeat the function after an error.
    :param quit_before: Waits until a time of the monotonic clock; returns whether the
        user quit before.
    """
    pace = Pace(plan.share)
    again(session.begin)
    due_s = time.monotonic()
    given, lost = 0, 0
    while given != plan.count:
        # A report that takes longer than the interval delays those after it.
        due_s = max(due_s + plan.interval_s, time.monotonic())
        samples = _Samples(session, call, pace, due_s - time.monotonic())
        try:
            while (at_s := samples.next_s) is not None and at_s < due_s:
                if quit_before(at_s):
                    return
                samples.take()
            if quit_before(max(due_s, pace.earliest_s)):
                return
            pace.start()
            began_ns = time.monotonic_ns()
            report = samples.noted(call(session.advance))
        except MovedError:
            # The data are wrong: start anew.
            again(session.begin)
            lost += 1
            continue
        if lost:
            text = f"{lost} intervals before this are lost: memory came or went"
            report = _noted(report, "interval-lost", text)
        if report.interval_ns == 0:
            text = "the kernel's clock stands still: it is paused, or hangs"
            report = _noted(report, "clock-stands-still", text)
        given, lost = given + 1, 0
        yield replace(report, cost=pace.cost(began_ns))


def _noted(report: R, code: str, text: str) -> R:
    return replace(report, notes=(*report.notes, Note(code, text)))


class _Samples:
    """The samples within one interval: the time of the next, and the lost ones."""

    def __init__(
        self, session: Session[Any], call: Call, pace: Pace, left_s: float
    ) -> None:
        self._session = session
        self._call = call
        self._pace = pace
        # There is at least one sample in each interval with room for it.
        self._longest_s = left_s
        self._period_starts_s = time.monotonic()
        self._lost = 0
        self._why = ""
        self.next_s = self._next_time()

    def take(self) -> None:
        """Take a sample; one that takes longer than the period delays the next."""
        self._call(self._sample)
        elapsed = self._period_starts_s + (self._period_s or 0)
        self._period_starts_s = max(elapsed, time.monotonic())
        self.next_s = self._next_time()

    def noted(self, report: R) -> R:
        """Return the interval's report, with a note if samples were lost."""
        if not self._lost:
            return report
        text = f"{self._lost} samples within the interval are lost: {self._why}"
        return _noted(report, "samples-lost", text)

    def _sample(self, progress: Progress) -> None:
        try:
            self._session.sample()
        except UNREADABLE as error:
            self._lost += 1
            self._why = str(error)

    @property
    def _period_s(self) -> float | None:
        period_s = self._session.period_s
        return None if period_s is None else min(period_s, self._longest_s)

    def _next_time(self) -> float | None:
        """Choose a random time in the period, by the monotonic clock.

        At regular times, periodic work of tasks would be seen always or never.
        """
        period_s = self._period_s
        if period_s is None:
            return None
        at_s = self._period_starts_s + random.random() * period_s
        return max(at_s, self._pace.earliest_s)
