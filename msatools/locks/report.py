# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of msa-locks: waits, locks, owners, roots, disks and workqueues.

Also a lock, its waiters and its holders before names and owners are looked up.
"""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, NamedTuple, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from msatools.kernel.reader import PAGE
from msatools.kernel.report import ADDED, Report, ns_between
from msatools.program.model import UNLISTED, Address

# --- Wait targets and herds: plain data for renderers and JSON.


Mode = Literal["read", "write"]
ExternalKind = Literal["device", "swap", "fuse", "frozen", "network"]
"""Kinds of things, other than tasks, that a task waits for: a disk, swap, a FUSE
server, a frozen file system, a server of a network file system."""

Confidence = Literal["none", "one dump", "confirmed"]
"""Evidence that the waiters are woken together: none, from one dump, from an
interval."""


class WaitTarget(Struct, frozen=True, kw_only=True):
    """The thing that a task waits on. ``None`` marks unknown or inapplicable fields."""

    kind: str
    """``cpu`` (for a running or runnable task), ``quota`` (runnable, but its time or
    that of its control group is used up), ``futex``, ``lock`` (of the kernel),
    ``file``, ``disk`` (data of a file or device), ``page`` (the same, on a page fault
    or from swap), ``device``, ``journal``, ``socket``, ``pipe``, ``eventfd``,
    ``timerfd``, ``inotify`` and the like,
    ``signals``, ``poll``, ``epoll``, ``child``, ``timer``, ``tracer``, ``stop``,
    ``flock``, ``posix_lock``, ``msgqueue``, ``semaphore``, ``mqueue``, ``tty``,
    ``io_uring``, ``aio``, ``userfaultfd`` or ``cgroup``."""

    type: Annotated[str | None, ADDED] = None
    """For a kernel lock its type, as msa-locks reports it; for a PI futex ``pi_futex``;
    for a socket ``tcp``, ``unix stream`` and the like."""

    address: Annotated[Address | None, ADDED] = None
    """Address of a futex or page fault in the task's memory, or of a kernel lock."""

    addresses: Annotated[tuple[Address, ...] | None, ADDED] = None
    """Addresses of the futexes of a futex_waitv()."""

    waiters: Annotated[int | None, ADDED] = None
    """Number of waiters for the same futex or lock, this task included."""

    shared: Annotated[bool | None, ADDED] = None
    """Whether other processes may use the futex."""

    owner: Annotated[int | None, ADDED] = None
    """ID of the thread or process that owns the lock, if the kernel records that."""

    mode: Annotated[Mode | None, ADDED] = None
    """Mode in which a lock is requested."""

    name: Annotated[str | None, ADDED] = None
    """Name of the member or variable that is the lock."""

    path: Annotated[str | None, ADDED] = None
    """Path of a file or a control group."""

    device: Annotated[str | None, ADDED] = None
    """Name and numbers of the block device, as ``vda 254:0``."""

    fs: Annotated[str | None, ADDED] = None
    """Type of a file system without a block device, with the kernel's name for it if it
    has another: ``tmpfs``, ``nfs4 0:45``, ``btrfs sda1``."""

    inode: Annotated[int | None, ADDED] = None
    fd: Annotated[int | None, ADDED] = None

    fds: Annotated[tuple[int, ...] | None, ADDED] = None
    """Descriptors that are polled, if there are few."""

    count: Annotated[int | None, ADDED] = None
    """Number of files that are polled."""

    text: Annotated[bool | None, ADDED] = None
    """Whether the page of a page fault is code."""

    pid: Annotated[int | None, ADDED] = None
    """ID of a child (``None``: any), a tracer, the task that commits a journal, or the
    process that owns the memory."""

    pgid: Annotated[int | None, ADDED] = None
    """Process group of the children."""

    signals: Annotated[tuple[int, ...] | None, ADDED] = None
    """Numbers of the signals that end the wait; for a stop, the one that began it."""

    cpu: Annotated[int | None, ADDED] = None
    """CPU that a task runs on or waits for."""

    id: Annotated[int | None, ADDED] = None
    """ID of a System V queue or set of semaphores."""

    local: Annotated[str | None, ADDED] = None
    peer: Annotated[str | None, ADDED] = None

    expires_ns: Annotated[int | None, ADDED] = None
    """Time at which the wait ends by itself, in CLOCK_MONOTONIC."""

    left_ns: Annotated[int | None, ADDED] = None
    """Time until ``expires_ns``; negative if overdue."""


CONDITION = "condition variable"
"""Name of a ``pthread_cond_t``: both of its futexes are reported as one lock, at the
address of its start."""


class UserFrame(Struct, frozen=True, kw_only=True):
    """A frame of a thread's stack in user space."""

    function: str | None
    """Name of the function; ``None`` if its symbol is not in the dump."""

    offset: int
    """Bytes from the start of the function; if that is unknown, from the start of the
    module's file."""

    module: str | None
    """File name of the program or library."""

    guess: bool
    """Whether the return address may be left over from a call that has ended."""


class Waker(Struct, frozen=True, kw_only=True):
    """The thread that most likely woke a herd: one of its process that wakes many."""

    pid: int
    """ID of the thread."""

    tgid: int
    comm: str
    frames: Annotated[tuple[UserFrame, ...] | None, ADDED] = None
    """First frames of the user stack, the innermost first; ``None`` if unknown."""


class Herd(Struct, frozen=True, kw_only=True):
    """Many tasks that wait on one thing and are woken together, mostly needlessly."""

    lock: str
    """ID of the thing they wait on, unique within the report: ``futex 150:0x4c1608``
    (with the process) or ``socket:[1480]``."""

    waiters: int

    owner: int | None
    """ID of the owner, only if the kernel records it."""

    kind: str
    address: Address | None
    pids: tuple[int, ...]
    """IDs of the waiters' processes, ascending."""

    min_age_ns: int
    max_age_ns: int

    nvcsw_median: int
    """Median of the waiters' voluntary context switches."""

    confidence: Confidence

    woken: int = 0
    """Number of waiters that are just being woken: they already wait for a CPU."""

    waker: Waker | None = None

    name: Annotated[str | None, ADDED] = None
    """Name of the thing they wait on, if known: :data:`CONDITION`, or what a socket is
    bound to, as ``tcp 0.0.0.0:80``."""

    wakeups: Annotated[int | None, ADDED] = None
    """Number of wake-ups of the herd's waiters within an interval."""

    in_vain: Annotated[float | None, ADDED] = None
    """Share of ``wakeups`` that were needless, if a single one would have been enough
    each time that the herd was woken."""

    members: Annotated[tuple[int, ...], UNLISTED] = ()
    """IDs of the threads that wait, or are just being woken."""


# --- Keys of futexes: union futex_key (include/linux/futex.h).


_INODE, _MM_SHARED = 1, 2
"""Flags in the offset of a key (``FUT_OFF_INODE``, ``FUT_OFF_MMSHARED``)."""


class FutexKey(NamedTuple):
    """The key of a futex: equal for all waiters of one futex."""

    object: int
    """For a private futex the address of its ``struct mm_struct``; for a shared one the
    same, or on newer kernels its ``mm_seq``; in a file ``inode.i_sequence``."""

    word: int
    """Address of the page, or its index in the file."""

    offset: int
    """Offset in the page, and flags that mark a shared futex."""

    page_size: int = PAGE
    """Size of the kernel's pages in bytes."""

    @property
    def of_inode(self) -> bool:
        """Whether the futex is in a file, not at an address."""
        return bool(self.offset & _INODE)

    @property
    def shared(self) -> bool:
        """Whether other processes may use the futex."""
        return bool(self.offset & (_INODE | _MM_SHARED))

    @property
    def address(self) -> int | None:
        """User address of the futex; ``None`` if it is in a file."""
        return None if self.of_inode else self.word + (self.offset & ~_MM_SHARED)

    @property
    def file_offset(self) -> int | None:
        """Offset of the futex in the file; ``None`` if it is in none."""
        if not self.of_inode:
            return None
        return self.word * self.page_size + (self.offset & ~_INODE)

    def moved(self, by: int) -> "FutexKey":
        """Return the key of another futex in the same memory.

        :param by: Bytes from this futex to that one, a multiple of 4.
        """
        flags = self.offset & (_INODE | _MM_SHARED)
        size = self.page_size
        step, unit = (1, size) if self.of_inode else (size, 1)
        pages, offset = divmod(self.word * unit + (self.offset & ~flags) + by, size)
        return self._replace(word=pages * step, offset=offset | flags)

    def pair(self) -> tuple["FutexKey", "FutexKey"]:
        """Return the keys of both futexes in the same aligned 8 bytes, in order."""
        first = self.moved(-(self.offset & 4))
        return first, first.moved(4)


# --- A lock, its waiters and its holders, before names and owners are looked up.


LockTypeName = Literal[
    "mutex",
    "ww_mutex",
    "rwsem",
    "semaphore",
    "rt_mutex",
    "percpu_rwsem",
    "spinlock",
    "futex",
    "pi_futex",
    "completion",
    "folio",
    "bit_wait",
    "wait_queue",
    "posix_lock",
    "flock",
    "threads",
    "child",
    "io_uring",
    "vma",
    "srcu",
    "rcuwait",
]
"""Names of lock types in reports. :data:`msatools.locks.lock_types.LOCK_TYPES` has the
functions that read them."""

OwnerConfidence = Literal["exact", "likely", "evidence"]
"""``exact``: recorded by the lock, in a field that is right whenever it is set;
``likely``: recorded in a field that may be old (last reader, owner in user memory);
``evidence``: the lock's address is on the stack of a task that does not wait for it."""

SUREST_FIRST: tuple[OwnerConfidence, ...] = get_args(OwnerConfidence)


class Lock(Struct, frozen=True):
    """A lock that tasks wait for; two are equal if they are the same lock."""

    type: LockTypeName

    address: int | None
    """Address of the kernel's structure: for a folio wait the ``struct folio``, for a
    bit wait the word with the bit, for a lock on a file the conflicting
    ``struct file_lock``, for a wait for threads or processes the ``signal_struct`` of
    the waiter, for a per-VMA lock the mapping, for a wait for readers
    of SRCU the ``srcu_struct``, for a CPU that goes offline its
    ``rq.hotplug_wait``. For a futex the user address; ``None`` if it is in a file. Also
    ``None`` if unknown."""

    key: FutexKey | int | None = None
    """Second part of the identity: the key of a futex, or its process ID (see
    :func:`.futex_at`); the number of a bit, or of the CPU that goes offline; 1 for a
    thread that waits for its process's core dump."""


class Request(Struct, frozen=True):
    """A lock that a task waits for, and the mode; ``None`` if the lock has only one."""

    lock: Lock
    mode: Mode | None = None


class QueuedWaiter(Struct, frozen=True):
    """A task in the queue of a lock."""

    task: int
    """Address of its ``struct task_struct``."""

    mode: Mode | None = None


class Holder(Struct, frozen=True):
    """A task that holds a lock, or probably holds it."""

    task: int
    """Address of its ``struct task_struct``, as checked when the lock was read."""

    confidence: OwnerConfidence


# --- Rows of msa-locks --io: disks with their I/O in flight.


Stage = Literal[
    "plugged",
    "queued",
    "scheduler",
    "dispatch",
    "requeued",
    "driver",
    "completed",
    "deferred",
    "delayed",
]
"""Where a request is. ``plugged``: in the plug of a task that is not done submitting;
``queued``: in a software queue of the block layer, or on its way there; ``scheduler``:
in the I/O scheduler; ``dispatch``: on the list of a hardware queue, as the driver did
not take it; ``requeued``: given back by the driver; ``driver``: with the driver and the
hardware; ``completed``: done by the hardware, but not yet reported. Of a device-mapper
disk: ``deferred``: held back while it is suspended; ``delayed``: held by dm-delay."""


class InFlight(Struct, frozen=True, kw_only=True):
    """A request, or a bio that a stacked disk holds."""

    address: Address
    """Address of the ``struct request`` or ``struct bio``."""

    operation: str
    """``read``, ``write``, ``flush``, ``discard``, … as the kernel's ``enum req_op``
    names it."""

    sector: int | None
    """First sector, in units of 512 bytes; ``None`` if it has no data."""

    bytes: int
    stage: Stage
    """Where it is: ``plugged``, ``queued``, ``scheduler``, ``dispatch``, ``requeued``,
    ``driver``, ``completed``, ``deferred`` or ``delayed``."""

    age_ns: int | None
    """Time since it was allocated; ``None`` if the kernel does not record that."""

    driver_age_ns: int | None
    """Time since the driver got it; ``None`` if it has not, or that is not recorded."""

    tag: int | None
    """Tag of the request at the driver; ``None`` if it has none."""

    pid: int | None
    """ID of the thread in whose plug it is; ``None`` in other stages."""


class DiskIo(Struct, frozen=True, kw_only=True):
    """A disk and its I/O in flight."""

    name: str
    """Name, as in /sys/block."""

    device: str
    """Major and minor number, as ``254:0``."""

    reads: int | None
    """Number of reads in flight, as in /sys/block/NAME/inflight: for a disk with
    requests, those that its driver has; for another, such as one of the device mapper,
    all that it has accepted. ``None`` if unknown."""

    writes: int | None
    """Number of other operations in flight, as in /sys/block/NAME/inflight."""

    scheduler: str | None
    """Name of the I/O scheduler; ``None`` if it has none, or that is unknown."""

    depth: int | None
    """Number of requests that the driver takes at a time; ``None`` for a disk without
    requests."""

    is_suspended: bool
    """Whether it is a suspended disk of the device mapper."""

    is_frozen: bool
    """Whether its queue is frozen (``mq_freeze_depth``): new I/O has to wait."""

    is_quiesced: bool
    """Whether its queue is stopped (``quiesce_depth``): nothing goes to the driver."""

    no_completion_ns: int | None
    """Minimum time since its last completion; ``None`` if unknown. The kernel records
    no time of completions, but stamps a disk when it begins or completes I/O, or when
    its statistics are read (``bd_stamp``)."""

    below: tuple[str, ...]
    """Names of the disks below a stacked disk; empty for hardware."""

    requests: tuple[InFlight, ...]
    """Its requests, or the bios that it holds: the oldest first."""


# --- Rows of msa-locks --workqueues: pools of workers, workqueues, delayed work.


class BusyWorker(Struct, frozen=True, kw_only=True):
    """A worker that executes a work item."""

    pid: int
    """ID of the thread."""

    comm: str
    function: str | None
    """Name of the work item's function; ``None`` if unknown."""

    workqueue: str | None
    """Name of the workqueue that the work item is of."""

    state: str | None
    """Letter of the task state, as in /proc; ``None`` if the task was not read."""

    age_ns: int | None
    """Time since the task entered its state; ``None`` if unknown."""

    work_age_ns: int | None
    """Time since it began the work item; ``None`` if the kernel does not record that,
    as before v7.1."""

    intensive: bool
    """Whether the work item does not count as running (``WORKER_CPU_INTENSIVE``), so
    that the pool starts others beside it."""

    rescuer: bool
    """Whether it is the rescuer of a workqueue, not a worker of the pool."""


class QueuedWork(Struct, frozen=True, kw_only=True):
    """A work item that no worker has begun."""

    function: str | None
    """Name of its function; ``None`` if unknown."""

    workqueue: str | None
    """Name of its workqueue."""

    waiter: int | None
    """For a barrier: ID of the thread that waits until the work before it is done."""


class WorkPool(Struct, frozen=True, kw_only=True):
    """A pool of workers (``struct worker_pool``)."""

    id: int
    """Number of the pool, as in the kernel's own messages."""

    address: Address
    """Address of the ``struct worker_pool``."""

    cpu: int | None
    """CPU that its workers are bound to; ``None`` for an unbound pool."""

    cpus: tuple[int, ...] | None
    """CPUs that the workers of an unbound pool may use; ``None`` for a bound pool, or
    if unknown."""

    node: int | None
    """NUMA node of an unbound pool; ``None`` if it is of none."""

    nice: int | None
    """Nice value of its workers; ``None`` if unknown."""

    flags: tuple[str, ...]
    """``bh`` (work is done in softirq context), ``manager-active`` (a worker is being
    made), ``disassociated`` (unbound, or its CPU is offline)."""

    pending: int
    """Number of work items that no worker has begun, barriers included."""

    progress_age_ns: int | None
    """Time since a worker last took a work item, if any are pending
    (``last_progress_ts``, ``watchdog_ts``).
    The kernel does not record when a work item was queued: the oldest has waited for at
    least this time. ``None`` if none are pending, or unknown."""

    is_stalled: bool
    """Whether ``progress_age_ns`` has reached the kernel's own limit
    (``wq_watchdog_thresh``)."""

    workers: int
    """Number of its workers."""

    idle: int
    """Number of its workers that are idle."""

    running: int
    """Number of workers that count as running (``nr_running``): while it is not 0, the
    pool wakes no other worker."""

    busy: tuple[BusyWorker, ...]
    """The workers that execute a work item."""

    works: tuple[QueuedWork, ...]
    """The first work items that no worker has begun, in order."""

    manager: int | None
    """ID of the worker that creates other workers; ``None`` if none does."""

    culprits: tuple[int, ...]
    """IDs of the threads that keep pending work waiting; empty if nothing is pending,
    or no such thread is known."""

    why: str | None
    """Why pending work has not begun; ``None`` if nothing is pending."""


class Workqueue(Struct, frozen=True, kw_only=True):
    """A workqueue that holds back work, or asks for its rescuer."""

    name: str
    address: Address
    """Address of the ``struct workqueue_struct``."""

    flags: tuple[str, ...]
    """Its kind: ``unbound``, ``highpri``, ``mem-reclaim``, ``freezable``, ``ordered``
    and others, as ``enum wq_flags`` names them."""

    max_active: int | None
    """How many of its work items may be on a pool at a time."""

    active: int
    """Number of its work items that are on a pool, pending or executed."""

    inactive: int
    """Number of its work items that wait until ``max_active`` allows them."""

    works: tuple[QueuedWork, ...]
    """The first of the inactive work items, in order."""

    rescuer: int | None
    """ID of its rescuer thread; ``None`` if it has none."""

    maydays: int
    """Number of pools on which its work items wait for the rescuer."""


class OfflineWork(Struct, frozen=True, kw_only=True):
    """A delayed work item whose timer is on an offline CPU, where it never fires."""

    cpu: int
    """Number of the offline CPU."""

    function: str | None
    """Name of the work item's function; ``None`` if unknown."""

    workqueue: str | None
    """Name of its workqueue; ``None`` if unknown."""

    expires_ns: int | None
    """Time at which the timer should fire, in CLOCK_MONOTONIC; ``None`` if unknown."""


class Workqueues(Struct, frozen=True, kw_only=True):
    """The pools and workqueues of a kernel."""

    pools: tuple[WorkPool, ...]
    """All pools: first those with the longest pending work."""

    queues: tuple[Workqueue, ...]
    """The workqueues with inactive work items, or that wait for their rescuer."""

    offline: tuple[OfflineWork, ...]
    """Delayed work on offline CPUs."""

    stalled_after_ns: Annotated[int, ADDED] = 0
    """The kernel's own limit, after which a pool is stalled."""


# --- The report of msa-locks: waits, locks, roots, deadlocks and changes.


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
    """How ``age_ns`` is known: ``exact``, ``upper`` (bound) or ``estimate``."""

    mode: Mode | None
    """Mode of the request; ``None`` if the lock has only one."""

    lock: str | None
    """ID of the lock; ``None`` if it waits for no lock or any of several, or the lock
    was not found."""

    task_class: str = field(name="class")

    caller: str | None
    """The function that called the one that waits."""

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
    """Facts that contradict that it has the lock, a few words each."""


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
    """Tasks that the lock names as owners, but whose ``evidence`` refutes it: the real
    owner has exited, or left the kernel, without unlocking it."""

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
    """Description of the event that its waiters wait for, such as a work item, if it is
    a completion, a wait queue or the like; of a futex, if it has no known owner."""

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
    """IDs of the tasks on the longest chain of waits, the root's own task last."""

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
    """How certain it is that the task owns a lock that others wait for: the highest
    confidence of any of these locks; ``None`` if it is no task, or has no direct
    waiter."""

    external: Annotated[ExternalKind | None, ADDED] = None
    """The thing, other than a task, that the root's task or several tasks wait for: a
    disk, swap, a FUSE or network server, a frozen file system."""


class Deadlock(Struct, frozen=True, kw_only=True):
    """Tasks that wait for each other."""

    confidence: DeadlockConfidence
    """``exact`` only if the owners of all locks are ``exact``."""

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
    """Number of samples in which it owned the lock."""

    where: str
    """Class of the task and the function that it slept in."""


class Contended(Struct, frozen=True, kw_only=True):
    """A lock for which tasks waited within an interval, by samples."""

    lock: str
    """ID of the lock."""

    type: LockTypeName
    name: str | None
    looks: int
    """Number of samples, with or without waiters."""

    share: float
    """Share of samples with waiters."""

    mean_queue: float
    max_queue: int
    wait_ns: int
    """Total time that tasks waited: the mean number of waiters times the interval."""

    error_ns: int
    """Standard error of ``wait_ns``."""

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
    """Disks with their I/O in flight, the oldest I/O first: those that roots wait for,
    or all if asked for; ``None`` if neither."""

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
