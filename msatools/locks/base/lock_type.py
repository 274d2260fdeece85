# SPDX-License-Identifier: LGPL-2.1-or-later

"""The protocol of a type of locks; :mod:`msatools.locks.lock_types` lists them all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def _no_words(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    return None


Finder = Callable[[LockContext, BlockedTask], Request | None]


@dataclass(frozen=True, kw_only=True)
class LockType:
    """A type of locks, or several that are read alike.

    All of its functions may raise ``drgn.FaultError`` where the dump is damaged.
    """

    names: frozenset[LockTypeName]
    """The values of :attr:`Lock.type`."""

    requests: Callable[[LockContext, BlockedTask], Sequence[Request]]
    """Find the locks that a task waits for, if it sleeps in a function of theirs;
    several if any one of them will do. Raises ``LookupError`` if a type is missing."""

    queue: Callable[[LockContext, Lock], Sequence[QueuedWaiter] | None] = _no_queue
    """Read who waits for a lock, in its order; ``None`` if it keeps none, or it is
    lost."""

    holders: Callable[[LockContext, Lock], Sequence[Holder]] = _no_holders
    """Read who has a lock, as far as the lock itself records it."""

    readers: Callable[[LockContext, Lock], int | None] = _no_readers
    """Count who has a lock for reading; ``None`` if it does not count them."""

    what: Callable[[LockContext, BlockedTask, Request], str | None] = _no_words
    """Describe what a lock without an owner stands for, such as work to be done."""

    task_class: TaskClass | None = None
    """The class of all tasks that wait for such a lock; ``None`` if they are of several
    classes. Who is of a class that one type has, waits for no other."""


def at_most_one(
    find: Finder,
) -> Callable[[LockContext, BlockedTask], Sequence[Request]]:
    """Make what finds one lock or none fit for :attr:`LockType.requests`."""

    def requests(context: LockContext, case: BlockedTask) -> Sequence[Request]:
        found = find(context, case)
        return () if found is None else (found,)

    return requests
