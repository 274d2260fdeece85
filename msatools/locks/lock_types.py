# SPDX-License-Identifier: LGPL-2.1-or-later

"""All types of locks: a new one is a file with a :class:`LockType`, and a line here."""

from collections.abc import Sequence

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType
from msatools.locks.events import (
    bitwaits,
    completions,
    folios,
    hotplugwaits,
    relatives,
    waitqueues,
)
from msatools.locks.sleeping import percpurwsems, sleeplocks, spinlocks, srcu, vmalocks
from msatools.locks.user import filelocks, userlocks

# The first type that finds a request of a task is used.
LOCK_TYPES: tuple[LockType, ...] = (
    userlocks.FUTEX,
    filelocks.FILE_LOCK,
    spinlocks.SPINLOCK,
    percpurwsems.PERCPU_RWSEM,
    sleeplocks.SLEEPING_LOCK,
    vmalocks.VMA_LOCK,
    srcu.SRCU,
    relatives.RELATIVES,
    hotplugwaits.HOTPLUG_WAIT,
    completions.COMPLETION,
    folios.FOLIO,
    bitwaits.BIT_WAIT,
    waitqueues.WAIT_QUEUE,
)

_BY_NAME = {name: lock_type for lock_type in LOCK_TYPES for name in lock_type.names}
_OWN_CLASSES = {lock_type.task_class for lock_type in LOCK_TYPES} - {None}


def requests_of(context: LockContext, case: BlockedTask) -> Sequence[Request]:
    """
    Return the locks that a task waits for: one, or several if any one ends the wait.

    :raises drgn.FaultError: if a structure that leads to them cannot be read
    :raises MissingError: if the types are unknown
    """
    own = case.task_class if case.task_class in _OWN_CLASSES else None
    for lock_type in LOCK_TYPES:
        found = lock_type.requests(context, case) if lock_type.task_class is own else ()
        if found:
            return found
    return ()


def queue_of(context: LockContext, lock: Lock) -> Sequence[QueuedWaiter] | None:
    """
    Return the waiters of a lock, in order.

    :return: ``None`` if it has no list of them, or that could not be read.
    :raises drgn.FaultError: if the lock cannot be read
    """
    return _BY_NAME[lock.type].queue(context, lock)


def holders_of(context: LockContext, lock: Lock) -> Sequence[Holder]:
    """
    Return the holders that a lock records.

    :raises drgn.FaultError: if the lock cannot be read
    """
    return _BY_NAME[lock.type].holders(context, lock)


def readers_of(context: LockContext, lock: Lock) -> int | None:
    """
    Return the number of readers of a lock; ``None`` if it does not count them.

    :raises drgn.FaultError: if the lock cannot be read
    """
    return _BY_NAME[lock.type].readers(context, lock)


def what_of(
    context: LockContext, case: BlockedTask, requests: Sequence[Request]
) -> str | None:
    """
    Describe what a waiter of a lock without an owner waits for, such as work.

    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    if len(requests) != 1:
        return None
    (request,) = requests
    return _BY_NAME[request.lock.type].what(context, case, request)
