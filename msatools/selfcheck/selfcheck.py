# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runs the checks of one command: the session of ``--self-check``."""

from collections.abc import Callable, Iterator, Sequence

import drgn

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.reader import is_left_out
from msatools.kernel.report import noting_refusals
from msatools.kernel.session import Progress, Session
from msatools.selfcheck import addresses, cpus, locks, memory, reading, tasks
from msatools.selfcheck.comparison import Comparison, judge
from msatools.selfcheck.facts import kernel_facts, software
from msatools.selfcheck.model import SelfCheckReport
from msatools.selfcheck.report_set import ReportLost, ReportSet
from msatools.target.model import Target

Check = Callable[[ReportSet], Iterator[Comparison]]
"""Compares numbers; raises MissingError if the kernel does not have what is compared,
FaultError if that cannot be read."""

CHECKS: dict[str, Sequence[Check]] = {
    "memstat": (*memory.CHECKS, *reading.CHECKS),
    "prstat": (
        *tasks.ALL,
        *tasks.DEAD,
        *tasks.LIVES,
        *tasks.QUEUED,
        memory.resident,
        *reading.STACKS,
        *reading.CHECKS,
    ),
    "locks": (*tasks.ALL, *locks.CHECKS, *reading.STACKS, *reading.CHECKS),
    "zombies": (*tasks.ALL, *tasks.DEAD, *reading.CHECKS),
    "report": (
        *memory.CHECKS,
        *tasks.ALL,
        *tasks.DEAD,
        *tasks.LIVES,
        *tasks.QUEUED,
        *locks.CHECKS,
        *cpus.CHECKS,
        *reading.STACKS,
        *reading.CHECKS,
    ),
    "cpus": (*cpus.CHECKS, *tasks.QUEUED, *reading.CHECKS),
    "whatis": (*addresses.CHECKS, *memory.CHECKS, *reading.CHECKS),
}
"""The checks of each command, those that concern others as well included."""

_MAX_READINGS = 3
"""How often a running kernel is read if numbers differ."""


class SelfChecks(Session[SelfCheckReport]):
    """A run of the checks of one command on one kernel."""

    def __init__(self, command: str, prog: drgn.Program, target: Target) -> None:
        """
        :param command: A key of :data:`CHECKS`.
        """
        self._command = command
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
        checks = CHECKS[self._command]
        for done, check in enumerate(checks):
            progress(done, len(checks))
            yield from _made(check, reports)
        progress(len(checks), len(checks))


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
