# SPDX-License-Identifier: LGPL-2.1-or-later

"""Owners of locks, by the lock itself and by stacks, with their confidence. Pure."""

from collections.abc import Collection, Sequence

from msatools.locks.base.lock import Lock, OwnerConfidence
from msatools.records import dataclass

BY_STACK = frozenset({"rwsem", "semaphore", "percpu_rwsem"})
"""Lock types that do not record all owners: stacks are searched."""

MAX_BY_STACK = 32
"""Maximum number of owners of one lock to report by their stacks."""


@dataclass(frozen=True)
class Owned:
    """An owner of a lock, certain or probable."""

    row: int
    confidence: OwnerConfidence
    seen: bool
    """Whether its stack has the lock's address."""

    firm: bool
    """Whether it may be part of a deadlock."""


def owners(
    lock: Lock,
    named: Sequence[tuple[int, OwnerConfidence]],
    readers: int | None,
    seen: Collection[int],
    waiting: Collection[int],
    *,
    searched: bool = True,
) -> tuple[Owned, ...]:
    """
    Return the owners of a lock.

    The kernel records at most the last reader of a lock and the last owner of a
    semaphore. But an owner usually has the lock's address on its stack. So has each
    waiter, and sometimes a task that has released the lock. So stacks prove nothing if
    more of them have the address than the lock has readers. And the last reader has
    left if as many other stacks have the address as there are readers.

    :param named: Rows of tasks that the lock itself records, with the confidence.
    :param readers: The number of readers; ``None`` if the lock does not count them.
    :param seen: Rows of tasks whose stacks have its address.
    :param waiting: Rows of tasks that wait for the lock.
    :param searched: Whether all stacks were searched, not just those of named tasks.
    """
    recorded = [
        Owned(
            row,
            confidence,
            seen=row in seen or confidence == "evidence",
            firm=confidence == "exact" or not readers,
        )
        for row, confidence in named
        # A writer may be recorded while it waits for readers to leave.
        if not (readers and row in waiting)
    ]
    if lock.type not in BY_STACK or any(own.confidence == "exact" for own in recorded):
        return tuple(recorded)
    if not searched:
        # The last reader may have left, and other stacks were not searched.
        return tuple(own for own in recorded if own.seen)
    known = {own.row for own in recorded}
    others = sorted(set(seen) - set(waiting) - known)
    if lock.type == "semaphore":
        # A semaphore does not count its owners.
        alone = not recorded and len(others) == 1
        found = [Owned(row, "evidence", True, alone) for row in others]
        return (*recorded, *found[:MAX_BY_STACK])
    most = 1 if readers is None else readers
    if lock.type == "percpu_rwsem" and not readers:
        most = 1  # a writer owns the lock
    last = [own for own in recorded if own.seen]
    if len(others) + len(last) > most:
        # There are more candidates than owners.
        return tuple(recorded)
    if len(others) == most:
        recorded = last
    confirmed = [Owned(own.row, own.confidence, True, True) for own in last]
    unseen = [own for own in recorded if not own.seen]
    found = [Owned(row, "evidence", True, True) for row in others]
    return (*confirmed, *unseen, *found[:MAX_BY_STACK])
