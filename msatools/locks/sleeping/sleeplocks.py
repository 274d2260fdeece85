# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sleeping locks of the kernel: which one a task waits for, who else does, who has it.

kernel/locking: mutexes (also those of ``ww_mutex``), rwsems, semaphores, rt_mutexes and
percpu_rwsems.
"""

from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import (
    Holder,
    Lock,
    OwnerConfidence,
    QueuedWaiter,
    Request,
)
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.rings import may_be_task
from msatools.locks.sleeping import lockwords, percpurwsems, rtlocks
from msatools.locks.sleeping.kernellocks import KernelLock, kernel_locks
from msatools.locks.sleeping.locksorts import Record

TYPES = frozenset(
    {"mutex", "ww_mutex", "rwsem", "semaphore", "rt_mutex", "percpu_rwsem"}
)
"""Of the locks that are told here."""


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
    if found is None or found.address is None:
        return None
    return Request(Lock(found.type, found.address), found.mode)


def queue(look: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Tell who waits for a lock, in the kernel's order.

    The one who has shut it and waits for readers to leave is the first.

    :return: ``None`` if there are more than may be looked at, or if they are lost.
    :raises drgn.FaultError: if the lock cannot be read
    """
    address = lock.address or 0
    if lock.type == "percpu_rwsem":
        return percpurwsems.queue(look, address)
    if rtlocks.is_made_of(look, lock.type):
        return rtlocks.queue(look, lock)
    return kernel_locks(look).queue(lock.type, address, look.limit)


def holders(look: LockContext, lock: Lock) -> list[Holder]:
    """
    Tell who has a lock, as it tells itself.

    Of a percpu_rwsem (and with CONFIG_PREEMPT_RT of a rwsem) that may be the first of
    its queue: it keeps the others out, and itself waits for readers.

    :raises drgn.FaultError: if the lock, or who it names, cannot be read
    """
    address = lock.address or 0
    if lock.type == "percpu_rwsem":
        return _holder(look, percpurwsems.writer(look, address), "exact")
    if rtlocks.is_made_of(look, lock.type):
        return _holder(look, rtlocks.owner(look, lock), "exact")
    exact = lockwords.owner(look.layout, lock.type, address)
    if exact is not None:
        return _holder(look, exact, "exact")
    last = lockwords.last_owner(look.layout, lock.type, address)
    # Who waits for it now has mostly released it since.
    queue(look, lock)
    if last is None or kernel_locks(look).is_queued(lock.type, address, last):
        return []
    return _holder(look, last, "likely")


def readers(look: LockContext, lock: Lock) -> int | None:
    """
    Tell how many have a lock for reading; ``None`` if it does not count them.

    :raises drgn.FaultError: if the lock cannot be read
    """
    if lock.type == "percpu_rwsem":
        return percpurwsems.readers(look, lock.address or 0)
    if lock.type != "rwsem":
        return None
    if rtlocks.is_made_of(look, "rwsem"):
        return rtlocks.readers(look, lock)
    return lockwords.readers(look.layout, lock.address or 0)


def _holder(
    look: LockContext, task: int | None, confidence: OwnerConfidence
) -> list[Holder]:
    """Give a task, if it is one."""
    if task is None or not may_be_task(task):
        return []
    if confidence == "exact":
        pid = look.pid(task)
        if pid is None or not 0 < pid <= PID_MAX_LIMIT:
            return []
    return [Holder(task, confidence)]


def _record(look: LockContext, case: BlockedTask) -> Record:
    """Take what a task's own record says that it waits for."""
    said = {
        name: int(look.tasks[name][case.row])
        for name in ("blocker", "blocked_on")
        if look.tasks.has(name)
    }
    return Record(**said)
