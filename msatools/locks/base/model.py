# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a task waits on, and crowds that wait on one thing.

Plain data: a renderer prints it, JSON serialises it.
"""

from dataclasses import dataclass, field
from typing import Literal

from msatools.kernel.report import ADDED
from msatools.target.model import UNLISTED, Address

Mode = Literal["read", "write"]
Confidence = Literal["none", "one dump", "confirmed"]
"""That they are woken together: nothing tells so, one dump does, an interval does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitTarget:
    """What a task waits on. A field that is ``None`` does not apply, or is unknown."""

    kind: str
    """``cpu`` (of who runs or could), ``futex``, ``lock`` (of the kernel), ``file``,
    ``disk`` (a file's or device's data), ``page`` (the same, on a page fault or from
    swap), ``device``, ``journal``, ``socket``, ``pipe``, ``eventfd``, ``timerfd``,
    ``inotify`` and the like,
    ``signals``, ``poll``, ``epoll``, ``child``, ``timer``, ``tracer``, ``stop``,
    ``flock``, ``posix_lock``, ``msgqueue``, ``semaphore``, ``mqueue``, ``tty``,
    ``io_uring``, ``aio``, ``userfaultfd`` or ``cgroup``."""

    type: str | None = field(default=None, metadata=ADDED)
    """Of a lock: a lock type of contract ``locks``; of a futex that inherits priority
    ``pi_futex``; of a socket ``tcp``, ``unix stream`` and the like."""

    address: Address | None = field(default=None, metadata=ADDED)
    """Of a futex or a fault in the task's memory; of a lock in the kernel's."""

    addresses: tuple[Address, ...] | None = field(default=None, metadata=ADDED)
    """Of several futexes that are waited for at once."""

    waiters: int | None = field(default=None, metadata=ADDED)
    """How many wait for the same futex or lock, this task included."""

    shared: bool | None = field(default=None, metadata=ADDED)
    """Whether other processes may use the futex."""

    owner: int | None = field(default=None, metadata=ADDED)
    """The thread or process that holds it; only where the kernel knows exactly."""

    mode: Mode | None = field(default=None, metadata=ADDED)
    """How a lock is wanted."""

    name: str | None = field(default=None, metadata=ADDED)
    """Of a lock: the member or variable that it is."""

    path: str | None = field(default=None, metadata=ADDED)
    """Of a file, or of a control group."""

    device: str | None = field(default=None, metadata=ADDED)
    """Name and numbers of the block device, as ``vda 254:0``."""

    fs: str | None = field(default=None, metadata=ADDED)
    """Of a file system without a block device, its type and what else the kernel calls
    it: ``tmpfs``, ``nfs4 0:45``, ``btrfs sda1``."""

    inode: int | None = field(default=None, metadata=ADDED)
    fd: int | None = field(default=None, metadata=ADDED)

    fds: tuple[int, ...] | None = field(default=None, metadata=ADDED)
    """Of a poll, if there are few."""

    count: int | None = field(default=None, metadata=ADDED)
    """How many files are polled."""

    text: bool | None = field(default=None, metadata=ADDED)
    """Of a page: whether it is of code."""

    pid: int | None = field(default=None, metadata=ADDED)
    """A child (none given: any), a tracer, who commits a journal, whose memory."""

    pgid: int | None = field(default=None, metadata=ADDED)
    """A group of children."""

    signals: tuple[int, ...] | None = field(default=None, metadata=ADDED)
    """What ends the wait; of a stop, what began it."""

    cpu: int | None = field(default=None, metadata=ADDED)
    """Of who runs or could: on which, or for which it waits."""

    id: int | None = field(default=None, metadata=ADDED)
    """Of a System V queue or set of semaphores."""

    local: str | None = field(default=None, metadata=ADDED)
    peer: str | None = field(default=None, metadata=ADDED)

    expires_ns: int | None = field(default=None, metadata=ADDED)
    """When the wait ends by itself, in CLOCK_MONOTONIC."""

    left_ns: int | None = field(default=None, metadata=ADDED)
    """How long that is from now; below zero if it is overdue."""


CONDITION = "condition variable"
"""What both futexes of a ``pthread_cond_t`` are called, by the address of its start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFrame:
    """A frame of a thread's stack in user space."""

    function: str | None
    """``None`` if its name is not in the dump."""

    offset: int
    """From the start of the function; where there is none, of the module's file."""

    module: str | None
    """The program or library: its file's name."""

    guess: bool
    """Whether it may be left from a call that has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waker:
    """Who has woken a herd, most likely: it wakes many, and is of its process."""

    pid: int
    """Of the thread."""

    tgid: int
    comm: str
    frames: tuple[UserFrame, ...] | None = field(default=None, metadata=ADDED)
    """The first ones in user space, the innermost first; ``None`` if unknown."""


@dataclass(frozen=True, kw_only=True)
class Herd:
    """Many tasks that wait on one thing and are woken together, mostly in vain."""

    lock: str
    """What they wait on, unique within the report: ``futex 150:0x4c1608``, with the
    process, or ``socket:[1480]``."""

    waiters: int

    owner: int | None
    """Only where the kernel knows it."""

    kind: str
    address: Address | None
    pids: tuple[int, ...]
    """The processes of the waiters, ascending."""

    min_age_ns: int
    max_age_ns: int

    nvcsw_median: int
    """Of how often each waiter has gone to sleep."""

    confidence: Confidence

    woken: int = 0
    """Of the waiters, those that are just being woken: they wait for a CPU by now."""

    waker: Waker | None = None

    name: str | None = field(default=None, metadata=ADDED)
    """What they wait on, if that can be known: :data:`CONDITION`."""

    wakeups: int | None = field(default=None, metadata=ADDED)
    """How often its waiters were woken within an interval, all together."""

    in_vain: float | None = field(default=None, metadata=ADDED)
    """Which share of that was in vain, if each time one of them would have done."""

    members: tuple[int, ...] = field(default=(), metadata=UNLISTED)
    """The threads that wait, or are just being woken."""
