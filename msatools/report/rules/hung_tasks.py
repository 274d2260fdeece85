# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks have been in uninterruptible sleep for long."""

from collections.abc import Iterator
from dataclasses import dataclass

from msatools.locks.report import LocksReport, Wait
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text, pid_text, root_text
from msatools.reports.units import duration

LONG_NS = 20_000_000_000
"""Disks and servers answer within seconds."""

HUNG_NS = 120_000_000_000
"""The kernel's own measure (CONFIG_DEFAULT_HUNG_TASK_TIMEOUT)."""

_ROOTS = 3


@dataclass(frozen=True)
class _LongWaits:
    locks: LocksReport
    waits: list[Wait]


def _when(parts: ReportParts) -> Iterator[_LongWaits]:
    assert parts.locks is not None
    waits = [
        wait
        for wait in parts.locks.waits
        if wait.state == "D" and wait.age_ns >= LONG_NS and wait.age_bound != "upper"
    ]
    if waits:
        yield _LongWaits(parts.locks, sorted(waits, key=lambda wait: -wait.age_ns))


def _severity(subject: _LongWaits) -> Severity:
    return "critical" if subject.waits[0].age_ns >= HUNG_NS else "warning"


def _words(subject: _LongWaits) -> str:
    tasks, oldest = count_text(len(subject.waits), "task"), subject.waits[0]
    return (
        f"{tasks} in uninterruptible sleep for {duration(LONG_NS)} and more, the "
        f"longest for {duration(oldest.age_ns)}: {pid_text(oldest.pid, oldest.comm)}"
    )


def _evidence(subject: _LongWaits) -> Iterator[str]:
    pids = {wait.pid for wait in subject.waits}
    for root in subject.locks.roots:
        behind = len(pids & {*root.behind})
        if behind:
            yield f"{count_text(behind, 'task')} behind {root_text(root)}"
            pids -= {*root.behind}


RULE = VerdictRule(
    code="hung-tasks",
    needs=("locks",),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=lambda subject: [*_evidence(subject)][:_ROOTS],
    see=lambda subject: ("locks", "--chains", "--state", "D"),
)
