# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runs the checks of one command: the session of ``--self-check``."""

from collections.abc import Callable, Iterator, Sequence

import drgn

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.reader import is_left_out
from msatools.kernel.report import noting_refusals
from msatools.kernel.session import Progress, Session
from msatools.selfcheck.comparison import Comparison, judge
from msatools.selfcheck.facts import kernel_facts, software
from msatools.selfcheck.model import SelfCheckReport
from msatools.selfcheck.report_set import ReportLost, ReportSet
from msatools.target.model import Target

Check = Callable[[ReportSet], Iterator[Comparison]]
"""Compares numbers; raises MissingError if the kernel does not have what is compared,
FaultError if that cannot be read."""

_MAX_READINGS = 3
"""How often a running kernel is read if numbers differ."""


class SelfChecks(Session[SelfCheckReport]):
    """A run of the checks of one command on one kernel."""

    def __init__(
        self,
        command: str,
        checks: Sequence[Check],
        prog: drgn.Program,
        target: Target,
    ) -> None:
        """
        :param command: Name of the command, for the report.
        :param checks: Its checks, at least one.
        """
        self._command = command
        self._checks = checks
        self._prog = prog
        self._target = target

    def report(self, progress: Progress) -> SelfCheckReport:
        """Check the numbers; read a running kernel again if some differ."""
        most = _MAX_READINGS if self._target.live else 1
        readings: dict[str, list[Comparison]] = {}
        for _ in range(most):
            reports = ReportSet(self._prog, self._target)
            with noting_refusals(self._prog, reports.losses):
                for comparison in self._compare(reports, progress):
                    readings.setdefault(comparison.name, []).append(comparison)
            checks = tuple(map(judge, readings.values()))
            if all(check.verdict in ("ok", "not-applicable") for check in checks):
                break
        return SelfCheckReport(
            target=self._target,
            taken_at_ns=reports.taken_at_ns,
            interval_ns=None,
            kernel=kernel_facts(reports),
            coverage=reports.coverage,
            notes=tuple(reports.losses.notes.values()),
            command=self._command,
            checks=checks,
            readings=max(map(len, readings.values())),
            software=software(),
        )

    def _compare(self, reports: ReportSet, progress: Progress) -> Iterator[Comparison]:
        for done, check in enumerate(self._checks):
            progress(done, len(self._checks))
            yield from _made(check, reports)
        progress(len(self._checks), len(self._checks))


def _made(check: Check, reports: ReportSet) -> Iterator[Comparison]:
    """Make a check, or a comparison that says why it could not be made."""
    name = f"{check.__module__.rpartition('.')[2]}.{check.__name__}".replace("_", "-")
    what = (check.__doc__ or "").split("\n")[0].rstrip(".")
    try:
        yield from check(reports)
    except ReportLost as error:
        yield Comparison(name=name, left=what, right="", lost=str(error))
    except UNREADABLE as error:
        left_out = "the dump leaves it out" if is_left_out(error) else None
        yield Comparison(
            name=name, left=what, right="", lost=str(error), absent=left_out
        )
    except MissingError as error:
        yield Comparison(name=name, left=what, right="", absent=str(error))
