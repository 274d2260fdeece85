# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sleeping locks of the kernel: which one a task waits for, who else does, who has it.

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


def find(look: LockContext, case: BlockedTask) -> KernelLock | None:
    """
    Find the lock that a task waits for; ``None`` if no such lock is waited for.

    :raises drgn.FaultError: if what tells cannot be read
    :raises LookupError: if nothing tells the types
    """
    return (
        percpurwsems.find(look, case)
        or rtlocks.find(look, case)
        or kernel_locks(look).find(
            case.names, case.stack, look.limit, _record(look, case)
        )
    )


def request(look: LockContext, case: BlockedTask) -> Request | None:
    """
    Tell which lock a task waits for; ``None`` also if it is not to be found.

    :raises drgn.FaultError: if what tells cannot be read
    :raises LookupError: if nothing tells the types
    """
    found = find(look, case)
    return found.request if found else None


def queue(look: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Tell who waits for a lock, in the kernel's order.

    The one who has shut it and waits for readers to leave is the first.

    :return: ``None`` if there are more than may be looked at, or if they are lost.
    :raises drgn.FaultError: if the lock cannot be read
    """
    address = lock.address or 0
    if rtlocks.is_made_of(look, lock.type):
        return rtlocks.queue(look, lock)
    return kernel_locks(look).queue(lock.type, address, look.limit)


def holders(look: LockContext, lock: Lock) -> list[Holder]:
    """
    Tell who has a lock, as it tells itself.

    With CONFIG_PREEMPT_RT that may be the first of a rwsem's queue: it keeps the others
    out, and itself waits for readers.

    :raises drgn.FaultError: if the lock, or who it names, cannot be read
    """
    address = lock.address or 0
    if rtlocks.is_made_of(look, lock.type):
        return holders_at(look, rtlocks.owner(look, lock), "exact")
    known = LIST_LOCKS[lock.type]
    exact = known.owner(look.layout, address)
    if exact is not None:
        return holders_at(look, exact, "exact")
    last = known.last_owner(look.layout, address)
    # Who waits for it now has mostly released it since.
    queue(look, lock)
    if last is None or kernel_locks(look).is_queued(lock.type, address, last):
        return []
    return holders_at(look, last, "likely")


def readers(look: LockContext, lock: Lock) -> int | None:
    """
    Tell how many have a lock for reading; ``None`` if it does not count them.

    :raises drgn.FaultError: if the lock cannot be read
    """
    if rtlocks.is_made_of(look, lock.type):
        return rtlocks.readers(look, lock)
    return LIST_LOCKS[lock.type].readers(look.layout, lock.address or 0)


def _record(look: LockContext, case: BlockedTask) -> Record:
    """Take what a task's own record says that it waits for."""
    said = {
        name: int(look.tasks[name][case.row])
        for name in ("blocker", "blocked_on")
        if look.tasks.has(name)
    }
    return Record(**said)


SLEEPING_LOCK = LockType(
    names=frozenset({"mutex", "ww_mutex", "rwsem", "semaphore", "rt_mutex"}),
    requests=at_most_one(request),
    queue=queue,
    holders=holders,
    readers=readers,
)
