# SPDX-License-Identifier: LGPL-2.1-or-later

"""A lock, its waiters and its holders, before names and owners are looked up."""

from typing import Literal

from msgspec import Struct

from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.model import Mode

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


class Lock(Struct, frozen=True):
    """A lock that tasks wait for; two are equal if they are the same lock."""

    type: LockTypeName

    address: int | None
    """Address of the kernel's structure: for a folio wait the ``struct folio``, for a
    bit wait the word with the bit, for a lock on a file the conflicting
    ``struct file_lock``, for a wait for threads or processes the ``signal_struct`` of
    the one that waits, for a per-VMA lock the mapping, for a wait for readers
    of SRCU the ``srcu_struct``, for a CPU that goes offline its
    ``rq.hotplug_wait``. For a futex the user address; ``None`` if it is in a file."""

    key: FutexKey | int | None = None
    """Second part of the identity: the key of a futex, the number of a bit, or of
    the CPU that goes offline."""


class Request(Struct, frozen=True):
    """A lock that a task waits for, and the mode."""

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
    """Address of its ``struct task_struct``; checked when the lock was read."""

    confidence: OwnerConfidence
