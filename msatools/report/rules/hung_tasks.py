# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks have been in uninterruptible sleep for long.

Tasks that another verdict names with the cause, such as a dead disk, are not repeated:
they count only if the kernel crashed because of them.

A parent in vfork() is in state D until its child calls exec or exits
(wait_for_vfork_done() in kernel/fork.c). It can be killed, khungtaskd does not count it
(kernel/hung_task.c), and the child is what hangs, if anything does.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import Struct

from msatools.locks.report import LocksReport, Wait
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.waits import HUNG_NS, LONG_NS, explained, is_long
from msatools.report.words import (
    count_text,
    is_vfork,
    pid_text,
    root_text,
    waits_for_text,
)
from msatools.reports.units import duration

_ROOTS = 3


class _LongWaits(Struct, frozen=True):
    locks: LocksReport
    waits: list[Wait]
    """The longest first; without those of parents in vfork()."""

    parents: list[Wait]
    """Those of parents in vfork()."""

    limit_ns: int
    is_fatal: bool
    """Whether the kernel crashed because of them."""


def _when(parts: ReportParts) -> Iterator[_LongWaits]:
    assert parts.locks is not None
    crash = parts.crash
    is_fatal = crash is not None and crash.cause == "hung-task"
    limit_ns, named = LONG_NS, explained(parts)
    if crash is not None and is_fatal:
        # The kernel's limit may be lower (hung_task_timeout_secs).
        ages = [wait.age_ns for wait in parts.locks.waits if wait.pid == crash.pid]
        limit_ns, named = min([LONG_NS, *ages]), set()
    found = [
        wait
        for wait in parts.locks.waits
        if wait.state == "D" and is_long(wait, limit_ns) and wait.pid not in named
    ]
    if found:
        found.sort(key=lambda wait: -wait.age_ns)
        waits = [wait for wait in found if not is_vfork(wait)]
        parents = [wait for wait in found if is_vfork(wait)]
        yield _LongWaits(parts.locks, waits, parents, limit_ns, is_fatal)


def _severity(subject: _LongWaits) -> Severity:
    if not subject.waits:
        return "info"
    is_hung = subject.waits[0].age_ns >= HUNG_NS
    return "critical" if is_hung or subject.is_fatal else "warning"


def _words(subject: _LongWaits) -> str:
    if not subject.waits:
        return f"{_parents(subject)}; a parent in vfork() can be killed"
    count, oldest = len(subject.waits), subject.waits[0]
    who = pid_text(oldest.pid, oldest.comm)
    if count == 1:
        return f"{who} has been in state D for {duration(oldest.age_ns)}"
    return (
        f"{count_text(count, 'task')} in state D for {duration(subject.limit_ns)} or "
        f"longer; the longest is {who}, {duration(oldest.age_ns)}"
    )


def _parents(subject: _LongWaits) -> str:
    """Return which parents wait in vfork(), and for which children."""
    oldest = subject.parents[0]
    count = count_text(len(subject.parents), "parent")
    child = f"child pid {oldest.owners[0]}" if oldest.owners else "a child"
    return (
        f"{count} in vfork() for up to {duration(oldest.age_ns)}: "
        f"{pid_text(oldest.pid, oldest.comm)} until {child} calls exec or exits"
    )


def _evidence(subject: _LongWaits) -> list[str]:
    lines = [*_roots(subject)]
    found = lines[:_ROOTS]
    if left := len(lines) - len(found):
        found.append(f"… {left:,} more that tasks wait for")
    if subject.waits and subject.parents:
        found.append(f"not counted: {_parents(subject)}")
    return found


def _roots(subject: _LongWaits) -> Iterator[str]:
    yield from roots_of(subject.locks, subject.waits or subject.parents)


def roots_of(locks: LocksReport, waits: Iterable[Wait]) -> Iterator[str]:
    """Yield what tasks wait for in the end, and how many of them do."""
    pids = {wait.pid for wait in waits}
    waiting: Counter[str] = Counter()
    for root in locks.roots:
        found = pids & {*root.behind}
        if found:
            waiting[root_text(root)] += len(found - {root.pid})
            pids -= found
    for what, count in waiting.items():
        yield waits_for_text(count, what)


RULE = VerdictRule(
    code="hung-tasks",
    needs=("locks",),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("locks", "--chains", "--state", "D"),
)
