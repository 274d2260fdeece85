# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks that lend the priority of who waits: ``rt_mutex``, and those made of one.

kernel/locking/rtmutex.c, rwbase_rt.c. A task's record names its waiter, and that the
lock. With CONFIG_PREEMPT_RT mutexes, rwsems and spinlocks are made of such locks.
"""

from itertools import islice, pairwise

import drgn

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock, LockTypeName, QueuedWaiter
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import Mode
from msatools.locks.sleeping.kernellocks import (
    MAX_WORDS,
    KernelLock,
    kernel_locks,
    known_to,
)

_PI_FUTEX = ("futex_lock_pi", "futex_wait_requeue_pi")
"""They wait for an rt_mutex as well, which stands for a futex."""

# By what is on the stack, with CONFIG_PREEMPT_RT.
_BY_FUNCTION: tuple[tuple[str, LockTypeName, Mode | None], ...] = (
    ("rt_spin_", "rt_mutex", None),
    ("rt_read_", "rt_mutex", None),
    ("rt_write_", "rt_mutex", None),
    ("down_read", "rwsem", "read"),
    ("__down_read", "rwsem", "read"),
    ("down_write", "rwsem", "write"),
    ("__down_write", "rwsem", "write"),
    ("_down_write_nest_lock", "rwsem", "write"),
    ("rwbase_read_", "rwsem", "read"),
    ("__rwbase_read_", "rwsem", "read"),
    ("rwbase_write_", "rwsem", "write"),
    ("__ww_rt_mutex_lock", "ww_mutex", None),
    ("ww_mutex_lock", "ww_mutex", None),
    ("__ww_mutex_lock", "ww_mutex", None),
    ("mutex_lock", "mutex", None),
    ("__mutex_lock", "mutex", None),
    ("_mutex_lock", "mutex", None),
)
# Where those have theirs: "locking/rwsem: Add rtmutex based R/W semaphore
# implementation" and the like (in v5.15)
_WITHIN: dict[LockTypeName, tuple[str, str]] = {
    "rwsem": ("rw_semaphore", "rwbase.rtmutex"),
    "mutex": ("mutex", "rtmutex"),
    "ww_mutex": ("ww_mutex", "base.rtmutex"),
}
_WRITER_BIAS = 1 << 30
"""Of ``rwbase_rt.readers``: a writer is inside; it is negative if readers may come."""

_READERS = _WRITER_BIAS - 1


def find(context: LockContext, case: BlockedTask) -> KernelLock | None:
    """
    Find such a lock that a task waits for; ``None`` if it waits for none.

    A futex that lends priority is none.

    :raises drgn.FaultError: if a structure on the way cannot be read
    :raises LookupError: if the types are unknown
    """
    if case.is_in(*_PI_FUTEX) or not context.tasks.has("pi_blocked_on"):
        return None
    waiter = int(context.tasks["pi_blocked_on"][case.row])
    if not waiter:
        return _of_writer(context, case)
    task, inner = context.layout.members(waiter, "rt_mutex_waiter", "task", "lock")
    if task != case.address:
        return None
    type_, mode = _kind(context, case)
    address = inner - _offset(context, type_)
    lock = Lock(type_, address)
    waiters = queue(context, lock)
    if not kernel_locks(context).is_queued(type_, address, task):
        return None
    count = None if waiters is None else len(waiters)
    return KernelLock(type_, address, mode, count, owner(context, lock))


def is_made_of(context: LockContext, type_: LockTypeName) -> bool:
    """Return whether locks of a type are made of an ``rt_mutex``."""
    return type_ == "rt_mutex" or (
        type_ in _WITHIN and context.layout.has(*_WITHIN[type_])
    )


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock, the most urgent first; ``None`` if that is lost.

    How they want a rwsem is not told, but for the writer that waits for readers: it
    comes first.

    :raises drgn.FaultError: if the lock cannot be read
    """
    queues, key = kernel_locks(context).queues, (lock.type, lock.address or 0)
    if key not in queues:
        queues[key] = _read_queue(context, lock)
    return queues[key]


def _read_queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    found = kernel_locks(context).rt_mutex(_inner(context, lock))
    if found.waiters is None:
        return None
    waiters = [QueuedWaiter(task) for task in found.waiters]
    if lock.type == "rwsem" and found.owner and _is_shut(context, lock):
        waiters.insert(0, QueuedWaiter(found.owner, "write"))
    return waiters


def owner(context: LockContext, lock: Lock) -> int | None:
    """
    Return the owners of a lock; of a rwsem a writer, also one that waits for readers.

    :raises drgn.FaultError: if the lock cannot be read
    """
    return kernel_locks(context).rt_mutex(_inner(context, lock)).owner or None


def readers(context: LockContext, lock: Lock) -> int | None:
    """
    Return the number of readers of a rwsem.

    :raises drgn.FaultError: if the lock cannot be read
    """
    if lock.type != "rwsem":
        return None
    return _count(context, lock) & _READERS


def _count(context: LockContext, lock: Lock) -> int:
    address = lock.address or 0
    return context.layout.member(address, "rw_semaphore", "rwbase.readers")


def _is_shut(context: LockContext, lock: Lock) -> bool:
    """Return whether the owner waits for readers to leave: no others may come."""
    return 0 < _count(context, lock) < _WRITER_BIAS


def _of_writer(context: LockContext, case: BlockedTask) -> KernelLock | None:
    """Find the rwsem that a writer has shut, and now waits for readers to leave."""
    if not is_made_of(context, "rwsem") or _kind(context, case) != ("rwsem", "write"):
        return None
    for word in islice(known_to(case.stack), MAX_WORDS):
        lock = Lock("rwsem", word)
        try:
            task = context.layout.member(word, "rw_semaphore", "rwbase.rtmutex.owner")
            if task & ~1 == case.address and _is_shut(context, lock):
                waiters = queue(context, lock)
                count = None if waiters is None else len(waiters)
                return KernelLock("rwsem", word, "write", count, None)
        except drgn.FaultError:
            continue
    return None


def _kind(context: LockContext, case: BlockedTask) -> tuple[LockTypeName, Mode | None]:
    """Return what a task waits for, by the innermost function that tells it."""
    for name, caller in pairwise([*case.names, ""]):
        # An rwlock is made as a rwsem is, by functions of the same names.
        if "rwbase_" in name and caller.startswith(("rt_read_", "rt_write_")):
            continue
        for prefix, type_, mode in _BY_FUNCTION:
            if name.startswith(prefix):
                return (
                    (type_, mode) if is_made_of(context, type_) else ("rt_mutex", None)
                )
    return "rt_mutex", None


def _offset(context: LockContext, type_: LockTypeName) -> int:
    return context.layout.offset(*_WITHIN[type_]) if type_ in _WITHIN else 0


def _inner(context: LockContext, lock: Lock) -> int:
    return (lock.address or 0) + _offset(context, lock.type)
