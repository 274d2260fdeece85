# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of msa-locks: waits, locks, owners, roots, and changes between two reports.

Plain data: a renderer prints it, JSON serialises it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from msatools.kernel.report import ADDED, Report, ns_between
from msatools.locks.base.lock import LockTypeName, OwnerConfidence
from msatools.locks.base.model import Herd, Mode, WaitTarget
from msatools.target.model import UNLISTED, Address

RootKind = Literal["task", "external", "cycle"]
DeadlockConfidence = Literal["exact", "possible"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A task that is blocked: in uninterruptible sleep, or on a lock."""

    pid: int
    """Of the thread."""

    tgid: int
    comm: str
    state: str
    """As in /proc."""

    age_ns: int
    age_bound: str
    """``exact``, ``upper`` or ``estimate``."""

    mode: Mode | None
    """How it wants the lock; ``None`` if there is only one way."""

    lock: str | None
    """The ID of the lock; ``None`` if it waits for none, or the lock was not found."""

    task_class: str = field(metadata={"key": "class"})

    caller: str | None
    """The calling function."""

    call: str | None
    """The system call that it is in."""

    start_ns: int = field(default=0, metadata=UNLISTED)
    """When the thread was started, in CLOCK_MONOTONIC."""

    switches: int = field(default=0, metadata=UNLISTED)
    """How often it has been switched."""

    owners: tuple[int, ...] = field(default=(), metadata=UNLISTED)
    """The threads that it waits for."""

    any_of: tuple[str, ...] | None = field(default=None, metadata=ADDED)
    """The IDs of locks of which any one will do."""

    on: WaitTarget | None = field(default=None, metadata=ADDED)
    """What it waits on where that is no lock."""

    why: str | None = field(default=None, metadata=ADDED)
    """Why the lock is unknown, if there is one."""

    stack: tuple[str, ...] | None = field(default=None, metadata=ADDED)
    """Functions, innermost first, if asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """An owner of a lock, certain or probable."""

    pid: int
    confidence: OwnerConfidence
    comm: str
    seen: bool
    """Whether its stack has the lock's address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LockRow:
    """A lock that tasks wait for."""

    id: str
    """Unique within the report: its type and where it is, with the process of a private
    futex: ``mutex 0xffff888003b4e0c0``, ``futex 150:0x4c1608``."""

    type: LockTypeName
    address: Address | None
    name: str | None
    """Its name, and what it lies in: ``i_rwsem of /mnt/d``,
    ``mm_struct(486 mmap-P).mmap_lock``, ``kmalloc-64+0x10``."""

    owners: tuple[Owner, ...]
    waiters: tuple[int, ...]
    """In the order of its queue, where it has one."""

    max_age_ns: int
    """The longest wait."""

    readers: int | None = field(default=None, metadata=ADDED)
    """The number of readers, if it counts them."""

    path: str | None = field(default=None, metadata=ADDED)
    inode: int | None = field(default=None, metadata=ADDED)
    device: str | None = field(default=None, metadata=ADDED)
    pid: int | None = field(default=None, metadata=ADDED)
    """The process whose memory it is in, or whose address space it guards."""

    cache: str | None = field(default=None, metadata=ADDED)
    """The slab cache that it lies in."""

    delta_waiters: int | None = field(default=None, metadata=ADDED)
    """More waiters than when the interval began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """A root: the end of a chain of waits."""

    kind: RootKind
    """A task that owns what others wait for; something outside of all tasks (a device,
    a server, a frozen file system, a lock with no known owner); or a cycle."""

    pid: int | None
    """The task; of something external the task that serves it, if one is known."""

    reason: str
    """What it is doing instead of releasing what others wait for."""

    blocked_d: int
    """How many wait behind it, directly or not, in uninterruptible sleep."""

    blocked_s: int

    comm: str | None
    state: str | None
    age_ns: int | None
    """How long the task has been as it is."""

    waiters: tuple[int, ...]
    """Those that wait for it directly; the tasks of a cycle."""

    chain: tuple[int, ...]
    """The longest way to it: the task at its end first, the root's own task last."""

    max_age_ns: int
    """The longest wait behind it."""

    behind: tuple[int, ...] = field(default=(), metadata=UNLISTED)
    """All tasks that wait behind it, and itself."""

    lock: str | None = field(default=None, metadata=ADDED)
    """The ID of a lock with no known owner."""

    stack: tuple[str, ...] | None = field(default=None, metadata=ADDED)
    """The task's functions, innermost first, if asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlock:
    """Tasks that wait for each other."""

    confidence: DeadlockConfidence
    """``exact`` only if every lock's owner is."""

    pids: tuple[int, ...]
    """In the order of the waits: each waits for the next, the last for the first."""

    locks: tuple[str, ...]
    """The IDs: what the first waits for, what the second waits for, and so on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inversion:
    """A runnable owner off the CPU that a more urgent task waits for."""

    lock: str
    owner: int
    waiter: int
    owner_pri: int
    """As in /proc and ps: 0 to 39 for ordinary tasks, below 0 for real time."""

    waiter_pri: int


@dataclass(frozen=True, kw_only=True)
class LockChanges:
    """What has changed within an interval, by thread ID."""

    begun: tuple[int, ...]
    """Blocked now, and not when it began."""

    ended: tuple[int, ...]
    moved: tuple[int, ...]
    """Blocked at both ends, but has been awake in between."""

    stuck: tuple[int, ...]
    """In the same wait all the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerSeen:
    """A task that samples within an interval saw as a lock's owner."""

    pid: int
    comm: str
    looks: int
    """How many."""

    where: str
    """What it was doing then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contended:
    """A lock for which tasks waited within an interval, by samples."""

    lock: str
    """Its ID."""

    type: LockTypeName
    name: str | None
    looks: int
    """The number of samples."""

    share: float
    """The share of samples with waiters."""

    mean_queue: float
    max_queue: int
    wait_ns: int
    """For how long tasks waited, all together: the mean number times the interval."""

    error_ns: int
    """The standard error of that."""

    owners: tuple[OwnerSeen, ...]
    """The owner that was seen most often first."""


@dataclass(frozen=True, kw_only=True)
class LocksReport(Report):
    """The waits, locks, roots, deadlocks and herds of a kernel."""

    schema: ClassVar[str] = "msatools.locks/1"

    waits: tuple[Wait, ...]
    """The longest first."""

    locks: tuple[LockRow, ...]
    """The one with the most waiters first."""

    roots: tuple[Root, ...]
    """What blocks most first."""

    deadlocks: tuple[Deadlock, ...]
    herds: tuple[Herd, ...]
    inversions: tuple[Inversion, ...]
    changes: LockChanges | None = field(default=None, metadata=ADDED)
    contention: tuple[Contended, ...] | None = field(default=None, metadata=ADDED)
    """Of an interval: the locks for which tasks waited longest, first."""

    pids: tuple[int, ...] = field(default=(), metadata=UNLISTED)
    """All threads that were read."""


_Thread = tuple[int, int]


def changes(before: LocksReport, after: LocksReport) -> LocksReport:
    """Return the later report with the changes since the earlier one."""
    then = {_thread(wait): wait for wait in before.waits}
    now = {_thread(wait): wait for wait in after.waits}
    both = [wait for thread, wait in now.items() if thread in then]
    stuck = {wait.pid for wait in both if _sleeps_on(then[_thread(wait)], wait)}
    crowds = {lock.id: len(lock.waiters) for lock in before.locks}
    return replace(
        after,
        interval_ns=ns_between(before, after),
        locks=tuple(
            replace(lock, delta_waiters=len(lock.waiters) - crowds.get(lock.id, 0))
            for lock in after.locks
        ),
        changes=LockChanges(
            begun=_pids(now[thread] for thread in now.keys() - then.keys()),
            ended=_pids(then[thread] for thread in then.keys() - now.keys()),
            moved=_pids(wait for wait in both if wait.pid not in stuck),
            stuck=tuple(sorted(stuck)),
        ),
    )


def _thread(wait: Wait) -> _Thread:
    """Return a key of a thread, as IDs are used again."""
    return wait.pid, wait.start_ns


def _sleeps_on(then: Wait, now: Wait) -> bool:
    """Return whether a task slept on the same lock all the time."""
    return (then.lock, then.switches) == (now.lock, now.switches)


def _pids(waits: Iterable[Wait]) -> tuple[int, ...]:
    return tuple(sorted(wait.pid for wait in waits))
