# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait targets and herds: plain data for renderers and JSON."""

from typing import Annotated, Literal

from msgspec import Struct

from msatools.kernel.report import ADDED
from msatools.target.model import UNLISTED, Address

Mode = Literal["read", "write"]
ExternalKind = Literal["device", "swap", "fuse", "frozen", "network"]
"""What a task waits for outside of all tasks: a disk, swap, a server of FUSE or of a
network file system, a frozen file system."""

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
    """For a lock: a lock type of contract ``locks``; for a PI futex ``pi_futex``; for a
    socket ``tcp``, ``unix stream`` and the like."""

    address: Annotated[Address | None, ADDED] = None
    """Address of a futex or a fault in the task's memory, of a lock in the kernel's."""

    addresses: Annotated[tuple[Address, ...] | None, ADDED] = None
    """Addresses of the futexes of a futex_waitv()."""

    waiters: Annotated[int | None, ADDED] = None
    """Number of waiters for the same futex or lock, this task included."""

    shared: Annotated[bool | None, ADDED] = None
    """Whether other processes may use the futex."""

    owner: Annotated[int | None, ADDED] = None
    """ID of the thread or process that holds it, only if the kernel records it."""

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
    """Whether a page is of code."""

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
    """Time until then; negative if overdue."""


CONDITION = "condition variable"
"""Name of both futexes of a ``pthread_cond_t``, which has the address of its start."""


class UserFrame(Struct, frozen=True, kw_only=True):
    """A frame of a thread's stack in user space."""

    function: str | None
    """Name of the function; ``None`` if not in the dump."""

    offset: int
    """Offset in the function; in the file of the module if the function is unknown."""

    module: str | None
    """File name of the program or library."""

    guess: bool
    """Whether the return address may be left over from a call that has ended."""


class Waker(Struct, frozen=True, kw_only=True):
    """The thread that most likely woke a herd: of the same process, and waking many."""

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
    """Number of wake-ups of its waiters within an interval."""

    in_vain: Annotated[float | None, ADDED] = None
    """Share of needless wake-ups, if each time a single one would have been enough."""

    members: Annotated[tuple[int, ...], UNLISTED] = ()
    """IDs of the threads that wait, or are just being woken."""
