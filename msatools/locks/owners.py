# SPDX-License-Identifier: LGPL-2.1-or-later

"""Owners of locks, by the lock itself and by stacks, with their confidence. Pure."""

from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from msatools.locks.base.lock import Lock, OwnerConfidence

BY_STACK = frozenset({"rwsem", "semaphore", "percpu_rwsem", "srcu"})
"""Lock types that do not record all owners: stacks are searched."""

MAX_BY_STACK = 32
"""Maximum number of owners of one lock to report by their stacks."""


class Owned(Struct, frozen=True):
    """An owner of a lock, certain or probable."""

    row: int
    confidence: OwnerConfidence
    seen: bool
    """Whether its stack has the lock's address."""

    firm: bool
    """Whether it may be part of a deadlock."""

    against: tuple[str, ...] = ()
    """Reasons why it cannot have the lock, though the lock names it."""

    others: tuple[int, ...] = ()
    """Rows of other tasks whose stacks have the lock's address: a contradiction."""


def owners(
    lock: Lock,
    named: Sequence[tuple[int, OwnerConfidence]],
    readers: int | None,
    seen: Collection[int],
    waiting: Collection[int],
    *,
    searched: bool = True,
    implied: Collection[int] = (),
    against: Callable[[int], tuple[str, ...]] = lambda row: (),
    handles: Callable[[int], bool] = lambda row: True,
) -> tuple[Owned, ...]:
    """
    Return the owners of a lock, by the evidence in falling order.

    1. The lock's own word, unless something refutes it: see
       :mod:`msatools.locks.standing`. Then the lock has no known owner.
    2. Where a reader is, if that implies that it has the lock; and the kernel's hint,
       the last reader of a lock or the last owner of a semaphore, unless refuted: it
       may have released the lock since.
    3. The lock's address on a stack, below a function that takes such locks, for as
       many readers as the others leave. An owner usually has it there. So has each
       waiter, and sometimes a task that has released the lock: so stacks prove nothing
       if there are more of them than readers. If they are just as many, the last
       reader has left, unless something else speaks for it.

    :param named: Rows of tasks that the lock itself records, with the confidence.
    :param readers: The number of readers; ``None`` if the lock does not count them.
    :param seen: Rows of tasks whose stacks have its address.
    :param waiting: Rows of tasks that wait for the lock.
    :param searched: Whether all stacks were searched, not just those of named tasks.
    :param implied: Rows of tasks that have it, because of where they are.
    :param against: Returns what refutes that a task has it.
    :param handles: Returns whether a task is in a function that takes such locks.
    """
    refuted = {row: texts for row, _ in named if (texts := against(row))}
    if any(confidence == "exact" and row in refuted for row, confidence in named):
        return tuple(
            Owned(row, "evidence", False, False, texts)
            for row, texts in refuted.items()
        )
    recorded = [
        Owned(
            row,
            confidence,
            seen=row in seen or confidence == "evidence",
            firm=confidence == "exact" or not readers,
        )
        for row, confidence in named
        # A writer may be recorded while it waits for readers to leave.
        if not (readers and row in waiting) and row not in refuted
    ]
    recorded = _with_implied(recorded, implied, seen)
    if lock.type not in BY_STACK or any(own.confidence == "exact" for own in recorded):
        return tuple(recorded)
    if not searched:
        # The last reader may have left, and other stacks were not searched.
        return tuple(own for own in recorded if own.seen)
    if lock.type == "srcu" and not readers:
        return tuple(recorded)
    known = {own.row for own in recorded}
    others = sorted(set(seen) - set(waiting) - known)
    others = [row for row in others if not against(row) and handles(row)]
    if lock.type == "semaphore":
        # A semaphore does not count its owners.
        alone = not recorded and len(others) == 1
        found = [Owned(row, "evidence", True, alone) for row in others]
        return (*recorded, *found[:MAX_BY_STACK])
    most = 1 if readers is None else readers
    if lock.type == "percpu_rwsem" and not readers:
        most = 1  # a writer owns the lock
    supported = [own for own in recorded if own.seen or own.firm]
    if len(others) + len(supported) > most:
        # There are more candidates than owners that are left.
        return tuple(_contradicted(own, others) for own in recorded)
    if others and len(others) + len(supported) == most:
        recorded = supported
    seen_too = [own for own in recorded if own.seen]
    confirmed = [Owned(own.row, own.confidence, True, True) for own in seen_too]
    unseen = [own for own in recorded if not own.seen]
    found = [Owned(row, "evidence", True, True) for row in others]
    return (*confirmed, *unseen, *found[:MAX_BY_STACK])


def _contradicted(own: Owned, others: Sequence[int]) -> Owned:
    """Add who else may have the lock to an owner of which it is not certain."""
    if own.firm or own.seen:
        return own
    return Owned(own.row, own.confidence, own.seen, own.firm, others=tuple(others))


def _with_implied(
    recorded: list[Owned], implied: Collection[int], seen: Collection[int]
) -> list[Owned]:
    """Add the tasks that have a lock where they are, which confirms those recorded."""
    known = {own.row: own for own in recorded}
    for row in sorted(implied):
        known[row] = Owned(row, "likely", seen=row in seen, firm=True)
    return list(known.values())
