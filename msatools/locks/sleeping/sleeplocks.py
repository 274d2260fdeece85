# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's sleeping locks: requests, waiters, owners and readers.

kernel/locking: mutexes (also those in a ``ww_mutex``), rwsems, semaphores and
rt_mutexes. A request may also be for a percpu_rwsem.
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
    Find the lock that a task waits for; ``None`` if it waits for no such lock.

    :raises drgn.FaultError: if a structure that leads to the lock cannot be read
    :raises MissingError: if the types are unknown
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
    Return the request of a task; ``None`` also if its lock is not found.

    :raises drgn.FaultError: if a structure that leads to the lock cannot be read
    :raises MissingError: if the types are unknown
    """
    found = find(context, case)
    return found.request if found else None


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock, in the kernel's order.

    A writer that owns the lock and waits for its readers to leave comes first.

    :return: ``None`` if there are too many to read, or they cannot be read.
    :raises drgn.FaultError: if the lock cannot be read
    """
    address = lock.address or 0
    if rtlocks.is_made_of(context, lock.type):
        return rtlocks.queue(context, lock)
    return kernel_locks(context).queue(lock.type, address, context.limit)


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return the owners that a lock records.

    With CONFIG_PREEMPT_RT the owner of a rwsem may be the first of its queue: a writer
    that keeps others out while it waits for readers to leave.

    :raises drgn.FaultError: if the lock or its owner cannot be read
    """
    address = lock.address or 0
    if rtlocks.is_made_of(context, lock.type):
        return holders_at(context, rtlocks.owner(context, lock), "exact")
    list_lock = LIST_LOCKS[lock.type]
    owner = list_lock.owner(context.layout, address)
    if owner is not None:
        return holders_at(context, owner, "exact")
    last = list_lock.last_owner(context.layout, address)
    # A last owner that waits for the lock has usually released it. is_queued() needs
    # the queue.
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
    """Return the members of a task that point at the lock it waits for."""
    members = {
        name: int(context.tasks[name][case.row])
        for name in ("blocker", "blocked_on")
        if context.tasks.has(name)
    }
    return Record(**members)


SLEEPING_LOCK = LockType(
    names=frozenset({*LIST_LOCKS, "rt_mutex"}),
    requests=at_most_one(request),
    queue=queue,
    holders=holders,
    readers=readers,
)
