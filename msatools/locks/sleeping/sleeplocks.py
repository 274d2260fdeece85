# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sleeping locks of the kernel: the one a task waits for, its waiters and owners.

kernel/locking: mutexes (also those of ``ww_mutex``), rwsems, semaphores, rt_mutexes and
percpu_rwsems.
"""

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import (
    Holder,
    Lock,
    QueuedWaiter,
    Request,
)
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.sleeping import percpurwsems, rtlocks
from msatools.locks.sleeping.kernellocks import KernelLock, holders_at, kernel_locks
from msatools.locks.sleeping.list_locks import LIST_LOCKS, Record


def find(context: LockContext, case: BlockedTask) -> KernelLock | None:
    """
    Find the lock that a task waits for; ``None`` if no such lock is waited for.

    :raises drgn.FaultError: if a structure on the way cannot be read
    :raises LookupError: if the types are unknown
    """
    return (
        percpurwsems.find(context, case)
        or rtlocks.find(context, case)
        or kernel_locks(context).find(
            case.names, case.stack, context.limit, _record(context, case)
        )
    )


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return which lock a task waits for; ``None`` also if it is not found.

    :raises drgn.FaultError: if a structure on the way cannot be read
    :raises LookupError: if the types are unknown
    """
    found = find(context, case)
    return found.request if found else None


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock, in the kernel's order.

    The one who has shut it and waits for readers to leave is the first.

    :return: ``None`` if there are more than may be read, or if they are lost.
    :raises drgn.FaultError: if the lock cannot be read
    """
    address = lock.address or 0
    if rtlocks.is_made_of(context, lock.type):
        return rtlocks.queue(context, lock)
    return kernel_locks(context).queue(lock.type, address, context.limit)


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return the owners of a lock, as it tells itself.

    With CONFIG_PREEMPT_RT that may be the first of a rwsem's queue: it keeps the others
    out, and itself waits for readers.

    :raises drgn.FaultError: if the lock, or who it names, cannot be read
    """
    address = lock.address or 0
    if rtlocks.is_made_of(context, lock.type):
        return holders_at(context, rtlocks.owner(context, lock), "exact")
    known = LIST_LOCKS[lock.type]
    exact = known.owner(context.layout, address)
    if exact is not None:
        return holders_at(context, exact, "exact")
    last = known.last_owner(context.layout, address)
    # Who waits for it now has mostly released it since.
    queue(context, lock)
    if last is None or kernel_locks(context).is_queued(lock.type, address, last):
        return []
    return holders_at(context, last, "likely")


def readers(context: LockContext, lock: Lock) -> int | None:
    """
    Return the number of readers of a lock; ``None`` if it does not count them.

    :raises drgn.FaultError: if the lock cannot be read
    """
    if rtlocks.is_made_of(context, lock.type):
        return rtlocks.readers(context, lock)
    return LIST_LOCKS[lock.type].readers(context.layout, lock.address or 0)


def _record(context: LockContext, case: BlockedTask) -> Record:
    """Take what a task's own record says that it waits for."""
    said = {
        name: int(context.tasks[name][case.row])
        for name in ("blocker", "blocked_on")
        if context.tasks.has(name)
    }
    return Record(**said)


SLEEPING_LOCK = LockType(
    names=frozenset({"mutex", "ww_mutex", "rwsem", "semaphore", "rt_mutex"}),
    requests=at_most_one(request),
    queue=queue,
    holders=holders,
    readers=readers,
)
