# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks have been in uninterruptible sleep for long."""

from collections.abc import Iterator

from msatools.locks.report import LocksReport, Wait
from msatools.records import dataclass
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
    limit_ns: int
    is_fatal: bool
    """Whether the kernel crashed because of them."""


def _when(parts: ReportParts) -> Iterator[_LongWaits]:
    assert parts.locks is not None
    crash = parts.crash
    is_fatal = crash is not None and crash.cause == "hung-task"
    limit_ns = LONG_NS
    if crash is not None and is_fatal:
        # The kernel's limit may be lower (hung_task_timeout_secs).
        ages = [wait.age_ns for wait in parts.locks.waits if wait.pid == crash.pid]
        limit_ns = min([LONG_NS, *ages])
    waits = [
        wait
        for wait in parts.locks.waits
        if wait.state == "D" and wait.age_ns >= limit_ns and wait.age_bound != "upper"
    ]
    if waits:
        waits.sort(key=lambda wait: -wait.age_ns)
        yield _LongWaits(parts.locks, waits, limit_ns, is_fatal)


def _severity(subject: _LongWaits) -> Severity:
    is_hung = subject.waits[0].age_ns >= HUNG_NS
    return "critical" if is_hung or subject.is_fatal else "warning"


def _words(subject: _LongWaits) -> str:
    count, oldest = len(subject.waits), subject.waits[0]
    who = pid_text(oldest.pid, oldest.comm)
    if count == 1:
        return f"{who} in uninterruptible sleep for {duration(oldest.age_ns)}"
    return (
        f"{count_text(count, 'task')} in uninterruptible sleep for "
        f"{duration(subject.limit_ns)} and more, the longest for "
        f"{duration(oldest.age_ns)}: {who}"
    )


def _evidence(subject: _LongWaits) -> Iterator[str]:
    pids = {wait.pid for wait in subject.waits}
    for root in subject.locks.roots:
        behind = len(pids & {*root.behind})
        if behind:
            yield f"{count_text(behind, 'task')} behind: {root_text(root)}"
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
