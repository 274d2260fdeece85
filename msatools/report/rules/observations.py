# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules on oddities that need not be faults.

Without them, a report whose summaries are odd would read as an all-clear if it has no
other verdict.

Each threshold is a constant beside its rule. Several rules share code in
:mod:`msatools.report.rule`; the findings of msa-cpus are made in
:mod:`msatools.cpus.diagnostics`.
"""

from collections.abc import Container, Iterable, Iterator
from typing import Any

from msgspec import Struct

from msatools.locks.report import LocksReport, Root, Wait
from msatools.memory.model import Check
from msatools.report.rule import (
    LONG_NS,
    SHOWN,
    Kind,
    ReportParts,
    VerdictRule,
    count_text,
    explained,
    is_long,
    is_vfork,
    pid_text,
    root_text,
    unreclaimable,
    waits_for_text,
)
from msatools.report.rules.memory import MEMORY_UNRECLAIMABLE
from msatools.report.rules.waits import roots_of
from msatools.reports.units import duration, size

_MUCH_KERNEL = 0.15
"""Minimum share of managed memory that is the kernel's own and unreclaimable."""

_MUCH_UNATTRIBUTED = 0.02
"""Minimum share of managed memory that no owner explains: it is below 0.01 on kernels
without a leak."""

_UNATTRIBUTED_PAGES = 4096
"""Minimum number of such pages: drivers have up to so many on any small machine."""

_SHOWN = 3

_A_WHILE_NS = 2_000_000_000
"""Shortest time in state D to report: most I/O takes milliseconds."""


# --- Hung tasks, and the roots that they wait for.


class _HeldUp(Struct, frozen=True):
    locks: LocksReport
    roots: list[Root]
    pids: set[int]


def _held_up(parts: ReportParts) -> Iterator[_HeldUp]:
    """Yield the tasks that have long waited for others, and that no verdict names."""
    locks = parts.locks
    assert locks is not None
    named = explained(parts)
    waits = {
        wait.pid
        for wait in locks.waits
        # The verdict hung-tasks has those in state D.
        if is_long(wait) and wait.state != "D" and wait.pid not in named
    }
    # hung-tasks names the roots that its tasks wait for.
    hung = {wait.pid for wait in locks.waits if _is_hung(wait, named)}
    roots = [
        root
        for root in locks.roots
        if root.kind == "task" and root.external is None and waits & _held_up_by(root)
        if not hung & {*root.behind}
    ]
    pids = {pid for root in roots for pid in _held_up_by(root) & waits}
    if pids:
        yield _HeldUp(locks, roots, pids)


def _is_hung(wait: Wait, named: Container[int]) -> bool:
    """Return whether the verdict hung-tasks counts a wait.

    :param named: The tasks whose waits other verdicts explain.
    """
    return is_long(wait) and wait.state == "D" and wait.pid not in named


def _behind(locks: LocksReport, root: Root) -> Iterator[Wait]:
    behind = {*root.behind}
    yield from (wait for wait in locks.waits if wait.pid in behind)


def _held_up_by(root: Root) -> set[int]:
    """Return the IDs of the tasks that wait for a task, directly or not."""
    return {*root.behind} - {root.pid}


def _held_up_text(subject: _HeldUp) -> str:
    ages = [wait.age_ns for wait in subject.locks.waits if wait.pid in subject.pids]
    count = len(subject.pids)
    have = "has" if count == 1 else "have"
    return (
        f"{count_text(count, 'task')} {have} waited for "
        f"{count_text(len(subject.roots), 'other task')} for {duration(LONG_NS)} or "
        f"longer; the longest for {duration(max(ages))}"
    )


def _held_up_evidence(subject: _HeldUp) -> Iterator[str]:
    for root in subject.roots[:_SHOWN]:
        count = len(subject.pids & _held_up_by(root))
        yield waits_for_text(count, root_text(root))
    left = len(subject.roots) - _SHOWN
    if left > 0:
        yield f"… {count_text(left, 'more task')} that others wait for"


class _Uninterruptible(Struct, frozen=True):
    locks: LocksReport
    waits: list[Wait]
    """The longest first."""


def _uninterruptible(parts: ReportParts) -> Iterator[_Uninterruptible]:
    """Yield the tasks in state D for a while, which are no hung tasks yet."""
    assert parts.locks is not None
    named = explained(parts)
    for root in parts.locks.roots:
        # hung-tasks names the roots that its tasks wait for.
        if any(_is_hung(wait, named) for wait in _behind(parts.locks, root)):
            named |= {*root.behind}
    waits = [
        wait
        for wait in parts.locks.waits
        if wait.state == "D"
        and is_long(wait, _A_WHILE_NS)
        and wait.age_ns < LONG_NS
        and wait.pid not in named
        and not is_vfork(wait)
    ]
    if waits:
        waits.sort(key=lambda wait: -wait.age_ns)
        yield _Uninterruptible(parts.locks, waits)


def _uninterruptible_text(subject: _Uninterruptible) -> str:
    count, oldest = len(subject.waits), subject.waits[0]
    if count == 1:
        who = pid_text(oldest.pid, oldest.comm)
        return f"{who} has been in state D for {duration(oldest.age_ns)}"
    return (
        f"{count_text(count, 'task')} have been in state D for "
        f"{duration(_A_WHILE_NS)} or longer; the longest is "
        f"{pid_text(oldest.pid, oldest.comm)}, {duration(oldest.age_ns)}"
    )


def _uninterruptible_evidence(subject: _Uninterruptible) -> Iterator[str]:
    lines = [*roots_of(subject.locks, subject.waits)]
    yield from lines[:_SHOWN]
    if left := len(lines[_SHOWN:]):
        yield f"… {count_text(left, 'more root')} of waits"


# --- memory


class _KernelMemory(Struct, frozen=True):
    parts: ReportParts
    largest: Kind
    pages: int
    managed: int


def _kernel_memory(parts: ReportParts) -> Iterator[_KernelMemory]:
    assert parts.memory is not None
    managed = sum(zone.managed for zone in parts.memory.zones)
    kinds = [kind for kind in unreclaimable(parts) if kind.is_kernel]
    pages = sum(kind.pages for kind in kinds)
    # The verdict memory-unreclaimable reports worse cases.
    if managed and pages >= _MUCH_KERNEL * managed and not any(_worse(parts)):
        yield _KernelMemory(parts, kinds[0], pages, managed)


def _worse(parts: ReportParts) -> Iterable[object]:
    return MEMORY_UNRECLAIMABLE.when(parts)


def _kernel_text(subject: _KernelMemory) -> str:
    page = subject.parts.target.page_size
    return (
        f"the kernel itself holds {size(subject.pages * page)} "
        f"({100 * subject.pages / subject.managed:.0f} % of memory), which cannot be "
        f"reclaimed; the largest part is {subject.largest.name}, "
        f"{size(subject.largest.pages * page)}"
    )


def _kernel_evidence(subject: _KernelMemory) -> Iterator[str]:
    """Yield a line on the kernel's own kinds: mlocked and anonymous ones are not."""
    page = subject.parts.target.page_size
    kinds = [kind for kind in unreclaimable(subject.parts) if kind.is_kernel]
    yield "; ".join(f"{size(k.pages * page)} {k.name}" for k in kinds[:SHOWN])


def _kernel_see(subject: _KernelMemory) -> tuple[str, ...]:
    return ("memstat", *subject.largest.view)


class _Unattributed(Struct, frozen=True):
    pages: int
    managed: int
    page_size: int


def _unattributed(parts: ReportParts) -> Iterator[_Unattributed]:
    assert parts.memstat is not None
    pages = {each.name: each.pages for each in parts.memstat.classes}
    managed, found = parts.memstat.managed_pages, pages["kernel.unattributed"]
    limit = max(_MUCH_UNATTRIBUTED * (managed or 0), _UNATTRIBUTED_PAGES)
    if managed and found >= limit:
        yield _Unattributed(found, managed, parts.target.page_size)


def _unattributed_text(subject: _Unattributed) -> str:
    share = 100 * subject.pages / subject.managed
    return (
        f"{size(subject.pages * subject.page_size)} of kernel memory ({share:.1f} % of "
        "memory) have no known owner"
    )


def _unexplained(parts: ReportParts) -> Iterator[tuple[Check, bool]]:
    assert parts.memstat is not None
    for check in parts.memstat.checks:
        if check.difference and check.explained_by is None:
            yield check, bool(parts.target.torn)


def _unexplained_text(found: tuple[Check, bool]) -> str:
    check, is_torn = found
    text = (
        f"{check.name}: the scan found {check.walk_pages:,} pages, the kernel's "
        f"counter {check.counter} says {check.kernel_pages or 0:,} "
        f"({check.difference or 0:+,})"
    )
    return text if is_torn else f"{text}, and no known reason explains it"


OBSERVATIONS: tuple[VerdictRule[Any], ...] = (
    VerdictRule(
        code="blocked-tasks",
        needs=("locks",),
        when=_held_up,
        severity="info",
        confidence="likely",
        words=_held_up_text,
        evidence=_held_up_evidence,
        see=lambda subject: ("locks", "--chains"),
    ),
    VerdictRule(
        code="blocked-tasks",
        needs=("locks",),
        when=_uninterruptible,
        severity="info",
        confidence="exact",
        words=_uninterruptible_text,
        evidence=_uninterruptible_evidence,
        see=lambda subject: ("locks", "--chains", "--state", "D"),
    ),
    VerdictRule(
        code="kernel-memory",
        needs=("memory", "memstat"),
        when=_kernel_memory,
        severity="info",
        confidence="exact",
        words=_kernel_text,
        evidence=_kernel_evidence,
        see=_kernel_see,
    ),
    VerdictRule(
        code="memory-unattributed",
        needs=("memstat",),
        when=_unattributed,
        severity="info",
        confidence="exact",
        words=_unattributed_text,
        evidence=lambda subject: (
            "a driver's own pages, or pages that a module leaked",
        ),
        see=lambda subject: ("memstat", "--unattributed"),
    ),
    VerdictRule(
        code="counter-unexplained",
        needs=("memstat",),
        when=_unexplained,
        severity="info",
        confidence="exact",
        words=_unexplained_text,
        evidence=lambda found: (
            "the memory is torn: pages and counters are of different moments"
            if found[1]
            else "damage, a race with a running kernel, or a fault of msatools",
        ),
        see=lambda found: ("memstat", "-v"),
    ),
)
