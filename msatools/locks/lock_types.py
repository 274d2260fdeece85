# SPDX-License-Identifier: LGPL-2.1-or-later

"""All types of locks: what a task waits for, who else does, and who has it."""

from collections.abc import Sequence

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.events import events
from msatools.locks.sleeping import sleeplocks
from msatools.locks.user import filelocks, userlocks
from msatools.tasks.classes import TaskClass

_FUTEXES = frozenset({"futex", "pi_futex"})
_FILE_LOCKS = frozenset({"posix_lock", "flock"})


def requests_of(look: LockContext, case: BlockedTask) -> Sequence[Request]:
    """
    Tell which locks a task waits for: mostly one, several if any of them will do.

    :raises drgn.FaultError: if it cannot be read
    :raises LookupError: if nothing tells the types
    """
    if case.task_class is TaskClass.LCK:
        return userlocks.requests(look, case)
    if case.task_class is TaskClass.FLK:
        found = filelocks.request(look, case)
    else:
        found = sleeplocks.request(look, case) or events.request(look, case)
    return () if found is None else (found,)


def queue_of(look: LockContext, lock: Lock) -> Sequence[QueuedWaiter] | None:
    """
    Tell who waits for a lock, in its order; ``None`` if it keeps none, or it is lost.

    :raises drgn.FaultError: if it cannot be read
    """
    if lock.type in _FUTEXES:
        return userlocks.queue(look, lock)
    if lock.type in _FILE_LOCKS:
        return filelocks.queue(look, lock)
    if lock.type in sleeplocks.TYPES:
        return sleeplocks.queue(look, lock)
    return events.queue(look, lock)


def holders_of(look: LockContext, lock: Lock) -> Sequence[Holder]:
    """
    Tell who has a lock, as far as the lock itself tells.

    :raises drgn.FaultError: if it cannot be read
    """
    if lock.type in _FUTEXES:
        return userlocks.holders(look, lock)
    if lock.type in _FILE_LOCKS:
        return filelocks.holders(look, lock)
    if lock.type in sleeplocks.TYPES:
        return sleeplocks.holders(look, lock)
    return events.holders(look, lock)


def readers_of(look: LockContext, lock: Lock) -> int | None:
    """
    Tell how many have a lock for reading; ``None`` if it does not count them.

    :raises drgn.FaultError: if it cannot be read
    """
    if lock.type in _FUTEXES:
        return userlocks.readers(look, lock)
    return sleeplocks.readers(look, lock) if lock.type in sleeplocks.TYPES else None


def what_of(
    look: LockContext, case: BlockedTask, requests: Sequence[Request]
) -> str | None:
    """
    Say what a lock that nobody has stands for, such as work that is to be done.

    :raises drgn.FaultError: if it cannot be read
    """
    if len(requests) != 1:
        return None
    (request,) = requests
    if request.lock.type in _FUTEXES:
        return userlocks.what(look, case, request)
    if request.lock.type in _FILE_LOCKS | sleeplocks.TYPES:
        return None
    return events.what(look, case, request.lock)
