# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules on tasks that wait: deadlocks, hung tasks, stuck I/O, herds, zombies, limits.

Each threshold is a constant beside its rule. Several rules share code in
:mod:`msatools.report.rule`; the findings of msa-cpus are made in
:mod:`msatools.cpus.diagnostics`.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct, field

from msatools.locks.report import (
    Deadlock,
    DeadlockConfidence,
    Herd,
    LocksReport,
    Owner,
    Root,
    Wait,
)
from msatools.prstat.model import TaskRow
from msatools.report.log import Event, faulting
from msatools.report.model import Severity, VerdictConfidence
from msatools.report.rule import (
    DOUBTS,
    HUNG_NS,
    LONG_NS,
    ReportParts,
    VerdictRule,
    ago,
    count_text,
    explained,
    frozen_roots,
    is_long,
    is_vfork,
    pid_text,
    root_text,
    said,
    served_age_ns,
    stopped_age_ns,
    stopped_roots,
    stuck_roots,
    tasks_text,
    uninterruptible,
    waited_text,
    waits_for_text,
)
from msatools.reports.units import duration, duration_range
from msatools.tasks.waits import function_text
from msatools.zombies.model import Limit, ZombieGroup

# --- Tasks wait for each other, and the kernel records all owners.


_DEADLOCK_NAMED = 4


class DeadlockSubject(Struct, frozen=True):
    """A deadlock, and the report that has its tasks and locks."""

    deadlock: Deadlock
    locks: LocksReport

    @property
    def waits(self) -> list[Wait]:
        """The waits of its tasks."""
        pids = {*self.deadlock.pids}
        return [wait for wait in self.locks.waits if wait.pid in pids]


def deadlocks(
    confidence: DeadlockConfidence,
) -> Callable[[ReportParts], Iterator[DeadlockSubject]]:
    """Return the condition of a rule on deadlocks of *confidence*."""

    def when(parts: ReportParts) -> Iterator[DeadlockSubject]:
        assert parts.locks is not None
        for deadlock in parts.locks.deadlocks:
            if deadlock.confidence == confidence:
                yield DeadlockSubject(deadlock, parts.locks)

    return when


def deadlock_text(subject: DeadlockSubject) -> str:
    """Return the number, IDs and names of the tasks of a deadlock."""
    names = {wait.pid: wait.comm for wait in subject.locks.waits}
    pids = subject.deadlock.pids
    named = tasks_text(((pid, names.get(pid)) for pid in pids), _DEADLOCK_NAMED)
    return f"{count_text(len(pids), 'task')} ({named})"


def _deadlock_evidence(subject: DeadlockSubject) -> Iterator[str]:
    """Yield a line for each task: the lock that it waits for, and who owns that."""
    locks = {lock.id: lock for lock in subject.locks.locks}
    for pid, lock_id in zip(
        subject.deadlock.pids, subject.deadlock.locks, strict=False
    ):
        lock = locks.get(lock_id)
        name = "" if lock is None else lock.name or ""
        # Some names repeat the kind in the ID: "threads of 7", "on the stack of 7".
        kind = lock_id.partition(" ")[0]
        name = f" ({name.removeprefix(f'{kind} ')})" if name else ""
        owners = ", ".join(map(_owner, lock.owners)) if lock else ""
        yield f"pid {pid} waits for {lock_id}{name}; owner {owners or '-'}"


def _owner(owner: Owner) -> str:
    return f"pid {owner.pid} ({DOUBTS[owner.confidence] or 'exact'})"


def _deadlock_see(subject: DeadlockSubject) -> tuple[str, ...]:
    """Return the command that shows deadlocks first, with stacks.

    With ``-p`` only the named tasks are read, without the locks that others own.
    """
    return ("locks", "--stacks")


def _deadlock_words(subject: DeadlockSubject) -> str:
    alone = len(subject.deadlock.pids) == 1
    how = "waits for itself" if alone else "wait for each other"
    return f"{deadlock_text(subject)} {how}"


DEADLOCK = VerdictRule(
    code="deadlock",
    needs=("locks",),
    when=deadlocks("exact"),
    severity="critical",
    confidence="exact",
    words=_deadlock_words,
    evidence=_deadlock_evidence,
    see=_deadlock_see,
)


# --- Tasks seem to wait for each other: some owner is only likely.


def _possible_deadlock_severity(subject: DeadlockSubject) -> Severity:
    """Return critical if a task has hung so long that the kernel reports it, too."""
    return "critical" if any(map(_is_hung, subject.waits)) else "warning"


def _is_hung(wait: Wait) -> bool:
    return wait.state == "D" and is_long(wait, HUNG_NS)


POSSIBLE_DEADLOCK = VerdictRule(
    code="possible-deadlock",
    needs=("locks",),
    when=deadlocks("possible"),
    severity=_possible_deadlock_severity,
    confidence="likely",
    words=lambda subject: (
        f"{deadlock_text(subject)} seem to wait for each other: the kernel does not "
        "record all owners"
    ),
    evidence=_deadlock_evidence,
    see=_deadlock_see,
)


# --- Tasks have been in uninterruptible sleep for long.
#
# Tasks that another verdict names with the cause, such as a dead disk, are not
# repeated: they count only if the kernel crashed because of them.
#
# A parent in vfork() is in state D until its child calls exec or exits
# (wait_for_vfork_done() in kernel/fork.c). It can be killed, khungtaskd does not count
# it (kernel/hung_task.c), and the child is what hangs, if anything does.


_ROOTS = 3


class _LongWaits(Struct, frozen=True):
    locks: LocksReport
    waits: list[Wait]
    """The longest first; without those of parents in vfork()."""

    parents: list[Wait]
    """Waits of parents in vfork(), the longest first."""

    limit_ns: int
    is_fatal: bool
    """Whether the kernel crashed because of them."""


def _hung_tasks_when(parts: ReportParts) -> Iterator[_LongWaits]:
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


def _hung_tasks_severity(subject: _LongWaits) -> Severity:
    if not subject.waits:
        return "info"
    is_hung = subject.waits[0].age_ns >= HUNG_NS
    return "critical" if is_hung or subject.is_fatal else "warning"


def _hung_tasks_words(subject: _LongWaits) -> str:
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


def _hung_tasks_evidence(subject: _LongWaits) -> list[str]:
    lines = [*_roots(subject)]
    found = lines[:_ROOTS]
    if left := len(lines) - len(found):
        found.append(f"… {count_text(left, 'more root')} of waits")
    if subject.waits and subject.parents:
        found.append(f"not counted: {_parents(subject)}")
    return found


def _roots(subject: _LongWaits) -> Iterator[str]:
    yield from roots_of(subject.locks, subject.waits or subject.parents)


def roots_of(locks: LocksReport, waits: Iterable[Wait]) -> Iterator[str]:
    """Yield a line for each root that tasks wait for in the end, with their number."""
    pids = {wait.pid for wait in waits}
    waiting: Counter[str] = Counter()
    for root in locks.roots:
        found = pids & {*root.behind}
        if found:
            waiting[root_text(root)] += len(found - {root.pid})
            pids -= found
    for what, count in waiting.items():
        yield waits_for_text(count, what)


class _LoggedHung(Struct, frozen=True):
    """Hung tasks of the kernel's log, where tasks cannot be read."""

    parts: ReportParts
    events: list[Event]
    """The last report on each task, the oldest first."""

    count: int
    """Number of reports."""


def _logged_hung_when(parts: ReportParts) -> Iterator[_LoggedHung]:
    found = [
        event
        for event in parts.events
        if event.cause == "hung-task" and not event.is_panic
    ]
    if found and parts.locks is None:
        last = {(event.pid, event.comm): event for event in found}
        yield _LoggedHung(parts, [*last.values()], len(found))


def _logged_hung_words(subject: _LoggedHung) -> str:
    tasks = ((event.pid, event.comm) for event in subject.events)
    return (
        f"the kernel reported {count_text(len(subject.events), 'hung task')}, "
        f"{count_text(subject.count, 'time')}: {tasks_text(tasks, 3)}; last "
        f"{ago(subject.parts, subject.events[-1].time_ns)}"
    )


def _logged_hung_evidence(subject: _LoggedHung) -> Iterator[str]:
    for event in subject.events[:_HUNG_SHOWN]:
        frames = event.backtrace.frames if event.backtrace else []
        stuck = faulting(frames, event.cause) or frames
        stack = " < ".join(frame.text for frame in stuck[:_HUNG_FRAMES])
        yield f"{said(event)}{f': {stack}' if stack else ''}"
    if left := len(subject.events[_HUNG_SHOWN:]):
        yield f"… {count_text(left, 'more hung task')}"


_HUNG_SHOWN, _HUNG_FRAMES = 3, 4

LOGGED_HUNG = VerdictRule(
    code="hung-tasks",
    needs=(),
    when=_logged_hung_when,
    severity="critical",
    confidence="exact",
    words=_logged_hung_words,
    evidence=_logged_hung_evidence,
    see=lambda subject: ("report", "-v"),
)

HUNG_TASKS = VerdictRule(
    code="hung-tasks",
    needs=("locks",),
    when=_hung_tasks_when,
    severity=_hung_tasks_severity,
    confidence="exact",
    words=_hung_tasks_words,
    evidence=_hung_tasks_evidence,
    see=lambda subject: ("locks", "--chains", "--state", "D"),
)


# --- Tasks have waited long for a device, or for a server of a file system.


_GROUPS, _IO_STUCK_NAMED = 3, 3

_SUSPENDED = "(suspended)"
"""Mark in the reason of a device-mapper disk (:mod:`msatools.locks.externals`)."""


class _StuckDevice(Struct):
    """A device or server that tasks have long waited for."""

    reason: str
    locks: LocksReport
    roots: list[Root] = field(default_factory=list)

    @property
    def tasks(self) -> set[int]:
        """IDs of the tasks in state D that wait for it."""
        behind = {pid for root in self.roots for pid in root.behind}
        return behind & uninterruptible(self.locks)

    @property
    def max_age_ns(self) -> int:
        return max(served_age_ns(self.locks, root) for root in self.roots)


def _io_stuck_when(parts: ReportParts) -> Iterator[_StuckDevice]:
    assert parts.locks is not None
    by_reason: dict[str, _StuckDevice] = {}
    for root in stuck_roots(parts.locks):
        subject = _StuckDevice(root.reason, parts.locks)
        by_reason.setdefault(root.reason, subject).roots.append(root)
    yield from sorted(by_reason.values(), key=lambda each: -len(each.tasks))


def _io_stuck_severity(subject: _StuckDevice) -> Severity:
    return "critical" if subject.max_age_ns >= HUNG_NS else "warning"


def _io_stuck_words(subject: _StuckDevice) -> str:
    waited = waited_text(len(subject.tasks), subject.max_age_ns)
    return f"{subject.reason}: {waited}"


def _io_stuck_evidence(subject: _StuckDevice) -> Iterator[str]:
    waits, tasks = defaultdict(list), subject.tasks
    for wait in subject.locks.waits:
        if wait.pid in tasks:
            where = function_text(wait.caller, wait.module)
            waits[where or wait.task_class].append(wait)
    groups = sorted(waits.items(), key=lambda item: -len(item[1]))
    for caller, alike in groups[:_GROUPS]:
        named = tasks_text(((wait.pid, wait.comm) for wait in alike), _IO_STUCK_NAMED)
        yield f"{count_text(len(alike), 'task')} in {caller}: {named}"
    if _SUSPENDED in subject.reason:
        yield "a suspended disk holds its I/O until it is resumed: dmsetup resume NAME"
    if left := sum(len(alike) for _, alike in groups[_GROUPS:]):
        yield f"… {count_text(left, 'more task')}"


def _io_stuck_see(subject: _StuckDevice) -> tuple[str, ...]:
    if subject.roots[0].external in ("device", "swap"):
        return ("locks", "--io")
    return ("locks", "--chains", "--state", "D")


IO_STUCK = VerdictRule(
    code="io-stuck",
    needs=("locks",),
    when=_io_stuck_when,
    severity=_io_stuck_severity,
    confidence="evidence",
    words=_io_stuck_words,
    evidence=_io_stuck_evidence,
    see=_io_stuck_see,
)


# --- Tasks wait for a file system that was frozen.


_REASON = "frozen file system "
"""Start of the reasons of such roots (:mod:`msatools.locks.wait_snapshot`)."""

_FROZEN_FILESYSTEM_NAMED = 8


class _FrozenRoot(Struct, frozen=True):
    root: Root
    locks: LocksReport
    is_live: bool


def _frozen_filesystem_when(parts: ReportParts) -> Iterator[_FrozenRoot]:
    assert parts.locks is not None
    for root in frozen_roots(parts.locks):
        yield _FrozenRoot(root, parts.locks, parts.target.live)


def _age_ns(root: Root) -> int:
    # The root may be a task that waits itself, and the only one.
    return max(root.max_age_ns, root.age_ns or 0)


def _frozen_filesystem_severity(subject: _FrozenRoot) -> Severity:
    is_hung = subject.root.blocked_d and _age_ns(subject.root) >= HUNG_NS
    return "critical" if is_hung else "warning"


def _frozen_filesystem_words(subject: _FrozenRoot) -> str:
    root = subject.root
    count = root.blocked_d + root.blocked_s + (root.kind == "task")
    place = root.reason.removeprefix("a ").removeprefix(_REASON.strip()).strip()
    waited = waited_text(count, _age_ns(root))
    return f"{place or 'a file system'} is frozen: {waited}"


def _frozen_filesystem_evidence(subject: _FrozenRoot) -> Iterator[str]:
    behind = {*subject.root.behind}
    waits = [wait for wait in subject.locks.waits if wait.pid in behind]
    named = tasks_text(
        ((wait.pid, wait.comm) for wait in waits), _FROZEN_FILESYSTEM_NAMED
    )
    yield f"waiting: {named}"
    yield "by fsfreeze, a snapshot or a backup: the kernel does not record by whom"
    place = subject.root.reason.removeprefix(_REASON)
    if subject.is_live and place.startswith("/"):
        yield f"if that has ended, thaw it with: fsfreeze -u {shlex.quote(place)}"


FROZEN_FILESYSTEM = VerdictRule(
    code="frozen-filesystem",
    needs=("locks",),
    when=_frozen_filesystem_when,
    severity=_frozen_filesystem_severity,
    confidence="exact",
    words=_frozen_filesystem_words,
    evidence=_frozen_filesystem_evidence,
    see=lambda subject: ("locks", "--chains", "--state", "D"),
)


# --- Tasks wait for others that are stopped, traced or frozen.


_STOPPED_OWNER_NAMED = 3
_SHOWN = 6


class _StoppedRoots(Struct, frozen=True):
    roots: list[Root]
    locks: LocksReport
    is_live: bool

    @property
    def behind(self) -> set[int]:
        """IDs of the tasks that wait for the roots."""
        own = {root.pid for root in self.roots}
        return {pid for root in self.roots for pid in root.behind if pid not in own}


def _stopped_owner_when(parts: ReportParts) -> Iterator[_StoppedRoots]:
    assert parts.locks is not None
    roots = [*stopped_roots(parts.locks)]
    if roots:
        yield _StoppedRoots(roots, parts.locks, parts.target.live)


def _stopped_owner_severity(subject: _StoppedRoots) -> Severity:
    is_hung = any(
        wait.state == "D" and is_long(wait, HUNG_NS) and not is_vfork(wait)
        for wait in subject.locks.waits
        if wait.pid in subject.behind
    )
    return "critical" if is_hung else "warning"


def _stopped_owner_confidence(subject: _StoppedRoots) -> VerdictConfidence:
    """Return the lowest confidence of the roots."""
    known = {root.confidence or "likely" for root in subject.roots}
    order: tuple[VerdictConfidence, ...] = ("exact", "likely", "evidence")
    return max(known, key=order.index)


def _stopped_owner_words(subject: _StoppedRoots) -> str:
    first, *others = subject.roots
    count, age_ns = len(subject.behind), max(map(stopped_age_ns, subject.roots))
    if not others:
        return f"{root_text(first)}: {waited_text(count, age_ns)}"
    named = tasks_text(
        ((root.pid, root.comm) for root in subject.roots), _STOPPED_OWNER_NAMED
    )
    return (
        f"{len(others) + 1} stopped or frozen tasks ({named}) keep "
        f"{count_text(count, 'other')} waiting, the longest for {duration(age_ns)}"
    )


def _stopped_owner_evidence(subject: _StoppedRoots) -> Iterator[str]:
    for root in subject.roots[:_SHOWN]:
        since = f" for {duration(root.age_ns)}" if root.age_ns is not None else ""
        count = root.blocked_d + root.blocked_s
        waited = waited_text(count, stopped_age_ns(root))
        yield f"{root_text(root)}{since}; {waited}"
    can_go_on = any(root.reason.startswith("stopped") for root in subject.roots)
    if subject.is_live and can_go_on:
        yield "to let a stopped task go on: kill -CONT PID"


STOPPED_OWNER = VerdictRule(
    code="stopped-owner",
    needs=("locks",),
    when=_stopped_owner_when,
    severity=_stopped_owner_severity,
    confidence=_stopped_owner_confidence,
    words=_stopped_owner_words,
    evidence=_stopped_owner_evidence,
    see=lambda subject: ("locks", "--chains"),
)


# --- Many tasks are woken together for one thing, mostly needlessly.


def _of_locks(parts: ReportParts) -> Iterator[Herd]:
    assert parts.locks is not None
    for herd in parts.locks.herds:
        if herd.confidence != "none":
            yield herd


def _lock_herd_confidence(herd: Herd) -> VerdictConfidence:
    return "likely" if herd.confidence == "confirmed" else "evidence"


def _lock_herd_evidence(herd: Herd) -> Iterator[str]:
    ages = duration_range(herd.min_age_ns, herd.max_age_ns)
    yield f"asleep for {ages}, after {herd.nvcsw_median:,} sleeps each (median)"
    if herd.waker is not None:
        yield f"most likely woken by {pid_text(herd.waker.pid, herd.waker.comm)}"


def _of_files(parts: ReportParts) -> Iterator[Herd]:
    """Yield herds that wait for no lock: those of sockets, pipes and the like."""
    assert parts.prstat is not None
    for herd in parts.prstat.herds:
        if herd.kind not in _LOCKS and herd.confidence != "none":
            yield herd


_LOCKS = ("futex", "lock")
"""Kinds of herds that msa-locks reports."""


def _lock_herd_words(herd: Herd) -> str:
    name = f" ({herd.name})" if herd.name else ""
    return f"{count_text(herd.waiters, 'thread')} woken together for {herd.lock}{name}"


def _rule(
    part: str, when: Callable[[ReportParts], Iterator[Herd]], *see: str
) -> VerdictRule[Herd]:
    return VerdictRule(
        code="lock-herd",
        needs=(part,),
        when=when,
        severity="info",
        confidence=_lock_herd_confidence,
        words=_lock_herd_words,
        evidence=_lock_herd_evidence,
        see=lambda herd: (part, *see),
    )


LOCK_HERD = (
    _rule("locks", _of_locks, "--by", "lock", "-v"),
    _rule("prstat", _of_files),
)


# --- A parent does not reap its children, and many are dead.


MANY = 50
"""Minimum number of zombies of one parent; a few are common and harmless."""

_OLD_NS = 10_000_000_000
"""Minimum age of the oldest: a busy parent may reap only every few seconds."""


def _zombies_when(parts: ReportParts) -> Iterator[ZombieGroup]:
    assert parts.zombies is not None
    for group in parts.zombies.groups:
        if group.count >= MANY and group.max_age_ns >= _OLD_NS:
            yield group


def _zombies_words(group: ZombieGroup) -> str:
    parent = pid_text(group.ppid, group.parent_comm)
    return (
        f"{parent} has not reaped {count_text(group.count, 'zombie')}, the oldest for "
        f"{duration(group.max_age_ns)} ({group.verdict})"
    )


ZOMBIES = VerdictRule(
    code="zombies",
    needs=("zombies",),
    when=_zombies_when,
    severity="warning",
    confidence="likely",
    words=_zombies_words,
    evidence=lambda group: (group.evidence.text,),
    see=lambda group: ("zombies", "--parent", str(group.ppid), "-v"),
)


# --- A limit of tasks is reached, or nearly: soon nothing can be started any more.


_NEAR = 0.9
_SYSTEM = "system"
_PIDS_LIMIT_NAMED = 3


class _NearLimit(Struct, frozen=True):
    limit: Limit
    zombies: int
    parts: ReportParts


def _pids_limit_when(parts: ReportParts) -> Iterator[_NearLimit]:
    known = parts.zombies.limits if parts.zombies is not None else None
    zombies = {(each.name, each.scope): each.zombies for each in known or ()}
    for limit in parts.limits or ():
        if limit.used and limit.max and limit.used >= _NEAR * limit.max:
            count = zombies.get((limit.name, limit.scope), 0)
            yield _NearLimit(limit, count, parts)


def _pids_limit_severity(subject: _NearLimit) -> Severity:
    limit = subject.limit
    return "critical" if limit.scope == _SYSTEM and not limit.left else "warning"


def _pids_limit_words(subject: _NearLimit) -> str:
    limit = subject.limit
    left = "none is left" if not limit.left else f"{limit.left:,} left"
    return (
        f"{limit.name} of {limit.scope}: {limit.used:,} of {limit.max:,} used, {left}"
    )


def _pids_limit_evidence(subject: _NearLimit) -> Iterator[str]:
    yield f"{subject.zombies:,} of them are zombies"
    threads: Counter[str] = Counter()
    for task in subject.parts.prstat.tasks if subject.parts.prstat else ():
        if _counts(task, subject.limit):
            threads[task.comm] += task.threads or 1
    largest = threads.most_common(_PIDS_LIMIT_NAMED)
    if text := ", ".join(f"{count:,} {comm}" for comm, count in largest if count > 1):
        yield f"most threads: {text}"


def _counts(task: TaskRow, limit: Limit) -> bool:
    """Return whether a process counts against a limit, as far as is known."""
    if limit.name == "pids.max":
        path = task.cgroup or ""
        return path == limit.scope or path.startswith(f"{limit.scope}/")
    if limit.name == "RLIMIT_NPROC":
        return limit.scope == f"uid {task.uid}"
    return True


def _pids_limit_see(subject: _NearLimit) -> tuple[str, ...]:
    if subject.zombies:
        return ("zombies", "-v")
    return ("prstat", "-Z") if subject.limit.name == "pids.max" else ("prstat", "-a")


PIDS_LIMIT = VerdictRule(
    code="pids-limit",
    needs=("limits",),
    when=_pids_limit_when,
    severity=_pids_limit_severity,
    confidence="exact",
    words=_pids_limit_words,
    evidence=_pids_limit_evidence,
    see=_pids_limit_see,
)
