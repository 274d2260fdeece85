# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of msa-locks: waits, locks, owners, roots, and changes between two reports.

Plain data: a renderer prints it, JSON serialises it.
"""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from msatools.kernel.report import ADDED, Report, ns_between
from msatools.locks.base.lock import LockTypeName, OwnerConfidence
from msatools.locks.base.model import ExternalKind, Herd, Mode, WaitTarget
from msatools.locks.io.model import DiskIo
from msatools.locks.workqueues.model import Workqueues
from msatools.target.model import UNLISTED, Address

RootKind = Literal["task", "external", "cycle"]
DeadlockConfidence = Literal["exact", "possible"]


class Wait(Struct, frozen=True, kw_only=True):
    """A task that is blocked: in uninterruptible sleep, or on a lock."""

    pid: int
    """ID of the thread."""

    tgid: int
    comm: str
    state: str
    """Letter of the task state, as in /proc."""

    age_ns: int
    age_bound: str
    """``exact``, ``upper`` or ``estimate``."""

    mode: Mode | None
    """Mode of the request; ``None`` if the lock has only one."""

    lock: str | None
    """ID of the lock; ``None`` if it waits for no lock, or that was not found."""

    task_class: str = field(name="class")

    caller: str | None
    """The calling function."""

    call: str | None
    """The current system call."""

    start_ns: Annotated[int, UNLISTED] = 0
    """Start time of the thread, in CLOCK_MONOTONIC."""

    switches: Annotated[int, UNLISTED] = 0
    """Number of context switches."""

    owners: Annotated[tuple[int, ...], UNLISTED] = ()
    """IDs of the threads that it waits for."""

    any_of: Annotated[tuple[str, ...] | None, ADDED] = None
    """IDs of several locks, any one of which ends the wait."""

    on: Annotated[WaitTarget | None, ADDED] = None
    """The wait target, if it is no lock."""

    why: Annotated[str | None, ADDED] = None
    """The reason why its lock is unknown."""

    module: Annotated[str | None, ADDED] = None
    """The module that has the calling function; ``None`` if the kernel itself does."""

    stack: Annotated[tuple[str, ...] | None, ADDED] = None
    """Functions, innermost first, if asked for."""


class Owner(Struct, frozen=True, kw_only=True):
    """An owner of a lock, certain or probable."""

    pid: int
    confidence: OwnerConfidence
    comm: str
    seen: bool
    """Whether its stack has the lock's address."""

    evidence: Annotated[tuple[str, ...], ADDED] = ()
    """What contradicts that it has the lock, each in a few words."""


class LockRow(Struct, frozen=True, kw_only=True):
    """A lock that tasks wait for."""

    id: str
    """Type and address, with the process of a private futex; unique within the report:
    ``mutex 0xffff888003b4e0c0``, ``futex 150:0x4c1608``."""

    type: LockTypeName
    address: Address | None
    name: str | None
    """Name of the lock, with the object that contains it: ``i_rwsem of /mnt/d``,
    ``mm_struct(486 mmap-P).mmap_lock``, ``kmalloc-64+0x10``."""

    owners: tuple[Owner, ...]
    waiters: tuple[int, ...]
    """IDs of the waiters, in the order of the queue, if there is one."""

    max_age_ns: int
    """The longest wait."""

    refuted: Annotated[tuple[Owner, ...], ADDED] = ()
    """Whom the lock names, though their ``evidence`` refutes it: who had it has exited,
    or left the kernel without unlocking it."""

    readers: Annotated[int | None, ADDED] = None
    """The number of readers, if it counts them."""

    path: Annotated[str | None, ADDED] = None
    inode: Annotated[int | None, ADDED] = None
    device: Annotated[str | None, ADDED] = None
    pid: Annotated[int | None, ADDED] = None
    """ID of the process whose memory contains the lock, or whose address space it
    protects."""

    cache: Annotated[str | None, ADDED] = None
    """Slab cache of the object that contains the lock."""

    what: Annotated[str | None, ADDED] = None
    """Description of what its waiters wait for, such as a work item, if it is a
    completion or a wait queue; or of what a futex is, if it has no known owner."""

    delta_waiters: Annotated[int | None, ADDED] = None
    """Change of the number of waiters within the interval."""


class Root(Struct, frozen=True, kw_only=True):
    """A root: the end of a chain of waits."""

    kind: RootKind
    """A task that owns locks of others; something outside of all tasks (a device, a
    server, a frozen file system, a lock with no known owner); or a cycle."""

    pid: int | None
    """ID of the task; for an external root, of its server, if known."""

    reason: str
    """Description of what it is doing instead of releasing locks."""

    blocked_d: int
    """Number of tasks in uninterruptible sleep that wait for it, directly or
    indirectly."""

    blocked_s: int

    comm: str | None
    state: str | None
    age_ns: int | None
    """Time since the task entered its state."""

    waiters: tuple[int, ...]
    """IDs of the tasks that wait for it directly; for a cycle, of its tasks."""

    chain: tuple[int, ...]
    """The longest chain of waits, the root's own task last."""

    max_age_ns: int
    """The longest wait for it, direct or indirect."""

    behind: Annotated[tuple[int, ...], UNLISTED] = ()
    """IDs of all tasks that wait for it, directly or indirectly, and its own."""

    lock: Annotated[str | None, ADDED] = None
    """ID of a lock with no known owner."""

    disks: Annotated[tuple[str, ...] | None, ADDED] = None
    """For a wait for I/O: names of the disks from the one that is waited for down to
    the one that holds the I/O; ``io`` has each of them."""

    pool: Annotated[int | None, ADDED] = None
    """Number of a pool of workers that does not begin its work."""

    stack: Annotated[tuple[str, ...] | None, ADDED] = None
    """Functions on the task's stack, innermost first, if asked for."""

    confidence: Annotated[OwnerConfidence | None, ADDED] = None
    """How well the task is known to have what others wait for, by the surest of them;
    ``None`` if it is no task, or nobody waits for it directly."""

    external: Annotated[ExternalKind | None, ADDED] = None
    """What is waited for outside of all tasks, by the only task that waits for it or by
    several: a disk, swap, a FUSE or network server, a frozen file system."""


class Deadlock(Struct, frozen=True, kw_only=True):
    """Tasks that wait for each other."""

    confidence: DeadlockConfidence
    """``exact`` only if the owners of all locks are."""

    pids: tuple[int, ...]
    """IDs of the tasks: each waits for the next, the last for the first."""

    locks: tuple[str, ...]
    """IDs of the locks that these tasks wait for, in the same order."""


class Inversion(Struct, frozen=True, kw_only=True):
    """A runnable owner off the CPU that a more urgent task waits for.

    A task is more urgent if it is of a higher scheduling class, or has a higher
    real-time priority, or if only the owner is of SCHED_IDLE. Nice values alone are no
    inversion: every task of the fair class gets its share of the CPU.
    """

    lock: str
    owner: int
    waiter: int
    owner_pri: int
    """As in /proc and ps: 0 to 39 for ordinary tasks, below 0 for real time."""

    waiter_pri: int
    owner_policy: Annotated[str | None, ADDED] = None
    """``IDLE`` if the owner is less urgent only because it is of SCHED_IDLE."""

    owner_ready_ns: Annotated[int | None, ADDED] = None
    """Time that the owner has waited for a CPU since its last turn, or its wake-up."""


class LockChanges(Struct, frozen=True, kw_only=True):
    """Changes within an interval, as IDs of threads."""

    begun: tuple[int, ...]
    """Threads that are blocked at its end, but were not at its start."""

    ended: tuple[int, ...]
    moved: tuple[int, ...]
    """Threads that are blocked at both ends, but were awake in between."""

    stuck: tuple[int, ...]
    """Threads that were in the same wait all the time."""


class OwnerSeen(Struct, frozen=True, kw_only=True):
    """A task that owned a lock in samples within an interval."""

    pid: int
    comm: str
    looks: int
    """Number of such samples."""

    where: str
    """Class of the task and the function that it slept in."""


class Contended(Struct, frozen=True, kw_only=True):
    """A lock for which tasks waited within an interval, by samples."""

    lock: str
    """ID of the lock."""

    type: LockTypeName
    name: str | None
    looks: int
    """Number of samples."""

    share: float
    """Share of samples with waiters."""

    mean_queue: float
    max_queue: int
    wait_ns: int
    """Total time that tasks waited: the mean number of waiters times the interval."""

    error_ns: int
    """Standard error of that."""

    owners: tuple[OwnerSeen, ...]
    """The owners, the most frequent first."""


class LocksReport(Report, frozen=True, kw_only=True):
    """The waits, locks, roots, deadlocks and herds of a kernel."""

    schema: ClassVar[str] = "msatools.locks/1"

    waits: tuple[Wait, ...]
    """The waits, the longest first."""

    locks: tuple[LockRow, ...]
    """The locks, those with the most waiters first."""

    roots: tuple[Root, ...]
    """The roots, those that block most tasks first."""

    deadlocks: tuple[Deadlock, ...]
    herds: tuple[Herd, ...]
    inversions: tuple[Inversion, ...]
    changes: Annotated[LockChanges | None, ADDED] = None
    contention: Annotated[tuple[Contended, ...] | None, ADDED] = None
    """Contention of locks in an interval, those with the longest waits first."""

    workqueues: Annotated[Workqueues | None, ADDED] = None
    """Pools of workers and workqueues, if asked for."""

    io: Annotated[tuple[DiskIo, ...] | None, ADDED] = None
    """I/O in flight, the oldest first: of the disks of roots, or of all if asked for.
    ``None`` if neither."""

    has_all_io: Annotated[bool | None, ADDED] = None
    """Whether ``io`` has all disks; ``None`` if that was not asked for."""

    pids: Annotated[tuple[int, ...], UNLISTED] = ()
    """IDs of all threads that were read."""


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
    """Return a unique key of a thread, as IDs are reused."""
    return wait.pid, wait.start_ns


def _sleeps_on(then: Wait, now: Wait) -> bool:
    """Return whether a task slept on the same lock all the time."""
    return (then.lock, then.switches) == (now.lock, now.switches)


def _pids(waits: Iterable[Wait]) -> tuple[int, ...]:
    return tuple(sorted(wait.pid for wait in waits))
