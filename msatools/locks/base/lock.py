# SPDX-License-Identifier: LGPL-2.1-or-later

"""A lock, its waiters and its holders, before names and owners are looked up."""

from dataclasses import dataclass
from typing import Literal

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
]
"""The names of types in reports. :data:`msatools.locks.lock_types.LOCK_TYPES` has their
readers."""

OwnerConfidence = Literal["exact", "likely", "evidence"]
"""``exact``: recorded by the lock, in a field that is right whenever it is set;
``likely``: recorded in a field that may be old (the last reader, the C library's word);
``evidence``: the task's stack has the lock's address, and it does not wait for it."""


@dataclass(frozen=True)
class Lock:
    """A lock that tasks wait for; two are equal if they are the same lock."""

    type: LockTypeName

    address: int | None
    """Of the kernel's structure; of a folio wait the ``struct folio``, of a bit wait
    the word that has the bit, of a lock on a file the ``struct file_lock`` that is in
    the way. Of a futex where it is in the address space; ``None`` for one in a file."""

    key: FutexKey | int | None = None
    """What else identifies it: a futex's key, a bit's number."""


@dataclass(frozen=True)
class Request:
    """A lock that a task waits for, and how it wants it."""

    lock: Lock
    mode: Mode | None = None


@dataclass(frozen=True)
class QueuedWaiter:
    """A task in a lock's queue."""

    task: int
    """The address of its ``struct task_struct``."""

    mode: Mode | None = None


@dataclass(frozen=True)
class Holder:
    """A task that has a lock, or probably has it."""

    task: int
    """The address of its ``struct task_struct``, which was that of a task when read."""

    confidence: OwnerConfidence
