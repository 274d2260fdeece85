# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who has a lock, and how sure that is: what it says, held against all stacks. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msatools.locks.base.lock import Lock, OwnerConfidence

BY_STACK = frozenset({"rwsem", "semaphore", "percpu_rwsem"})
"""Types of locks that do not name all who have them: stacks are searched."""

MAX_TOLD = 32
"""Tasks that are told by what is on their stacks: a waiter waits for each of them."""


@dataclass(frozen=True)
class Owned:
    """A task that has a lock, or probably has it."""

    row: int
    confidence: OwnerConfidence
    seen: bool
    """Whether its stack has the lock's address."""

    firm: bool
    """Whether a deadlock may be made of it."""


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
    Tell who has a lock.

    A task that has a lock for reading, or a semaphore, is nowhere recorded, or only the
    last that came. But it has mostly left the lock's address on its stack; so has who
    waits for it, which is known, and at times who has released it. So stacks prove
    nothing when more of them have the address than readers have the lock; and the last
    reader is none any more when as many others are seen as there are readers.

    :param named: Rows of tasks that the lock itself names.
    :param readers: How many have it for reading; ``None`` if it does not count them.
    :param seen: Rows of tasks whose stacks have its address.
    :param waiting: Rows of tasks that wait for it.
    :param searched: Whether all stacks were looked at, not those of named tasks alone.
    """
    told = [
        Owned(
            row,
            confidence,
            seen=row in seen or confidence == "evidence",
            firm=confidence == "exact" or not readers,
        )
        for row, confidence in named
        # A writer may have shut out others, and wait for readers to leave.
        if not (readers and row in waiting)
    ]
    if lock.type not in BY_STACK or any(own.confidence == "exact" for own in told):
        return tuple(told)
    if not searched:
        # The last reader may have left, and nobody looked who else there is.
        return tuple(own for own in told if own.seen)
    known = {own.row for own in told}
    others = sorted(set(seen) - set(waiting) - known)
    if lock.type == "semaphore":
        # It does not count how many have it.
        alone = not told and len(others) == 1
        found = [Owned(row, "evidence", True, alone) for row in others]
        return (*told, *found[:MAX_TOLD])
    most = 1 if readers is None else readers
    if lock.type == "percpu_rwsem" and not readers:
        most = 1  # a writer is in
    last = [own for own in told if own.seen]
    if len(others) + len(last) > most:
        # Too many to know whom to believe.
        return tuple(told)
    if len(others) == most:
        told = last
    confirmed = [Owned(own.row, own.confidence, True, True) for own in last]
    unseen = [own for own in told if not own.seen]
    found = [Owned(row, "evidence", True, True) for row in others]
    return (*confirmed, *unseen, *found[:MAX_TOLD])
