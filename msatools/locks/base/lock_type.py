# SPDX-License-Identifier: LGPL-2.1-or-later

"""The description of a lock type; :mod:`msatools.locks.lock_types` has all of them."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, LockTypeName, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.tasks.classes import TaskClass


def _no_queue(context: LockContext, lock: Lock) -> Sequence[QueuedWaiter] | None:
    return None


def _no_holders(context: LockContext, lock: Lock) -> Sequence[Holder]:
    return ()


def _no_readers(context: LockContext, lock: Lock) -> int | None:
    return None


def _no_description(
    context: LockContext, case: BlockedTask, request: Request
) -> str | None:
    return None


Finder = Callable[[LockContext, BlockedTask], Request | None]


class LockType(Struct, frozen=True, kw_only=True):
    """A type of locks, or several types that are read the same way.

    All functions may raise ``UNREADABLE`` if memory cannot be read, or is
    inconsistent, as on a running kernel.
    """

    names: frozenset[LockTypeName]
    """The values of :attr:`Lock.type`."""

    requests: Callable[[LockContext, BlockedTask], Sequence[Request]]
    """Return the locks of this type that a task waits for: none, one, or several if any
    one of them ends the wait. Raises ``MissingError`` if a type is missing."""

    queue: Callable[[LockContext, Lock], Sequence[QueuedWaiter] | None] = _no_queue
    """Return the waiters of a lock in queue order; ``None`` if it keeps no list, or
    they could not be read."""

    holders: Callable[[LockContext, Lock], Sequence[Holder]] = _no_holders
    """Return the tasks that the lock's own fields name as holders."""

    readers: Callable[[LockContext, Lock], int | None] = _no_readers
    """Return the number of readers of a lock; ``None`` if it does not count them."""

    what: Callable[[LockContext, BlockedTask, Request], str | None] = _no_description
    """Describe what a waiter of a lock without an owner waits for, such as work."""

    task_class: TaskClass | None = None
    """The class of all tasks that wait for such a lock; ``None`` if they have various
    classes. If a task's class is that of some lock type, only such types are tried."""


def at_most_one(
    find: Finder,
) -> Callable[[LockContext, BlockedTask], Sequence[Request]]:
    """Wrap a function that finds at most one lock as :attr:`LockType.requests`."""

    def requests(context: LockContext, case: BlockedTask) -> Sequence[Request]:
        request = find(context, case)
        return () if request is None else (request,)

    return requests
