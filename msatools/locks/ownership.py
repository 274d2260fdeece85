# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the owners of the locks of a snapshot: all evidence, brought together.

:func:`msatools.locks.owners.owners` weighs it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks import positions, standing
from msatools.locks.base.lock import LockTypeName
from msatools.locks.evidence import seen_on_stacks
from msatools.locks.handlers import takes
from msatools.locks.owners import BY_STACK, Owned, owners
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted
from msatools.target.addresses import KERNEL_HALF


def find_owners(
    snapshot: WaitSnapshot,
    reader: Reader,
    stack_size: int,
    losses: LossLog,
    search: bool,
) -> None:
    """Set the owners of each lock, by the lock itself and by stacks.

    :param search: Whether all stacks are searched, not just those of known owners.
    """
    rows = snapshot.rows
    named = {
        lock: [
            (rows[holder.task], holder.confidence)
            for holder in want.holders
            # A lock may still point at a task that has exited.
            if holder.task in rows
        ]
        for lock, want in snapshot.wanted.items()
    }
    of_kernel = {
        lock: lock.address
        for lock in snapshot.wanted
        if lock.address is not None and lock.address >= KERNEL_HALF
    }
    unsure = any(lock.type in BY_STACK for lock in of_kernel)
    known = {row for lock in of_kernel for row, _ in named[lock]}
    searched = np.arange(len(snapshot.tasks)) if search and unsure else _array(known)
    seen = seen_on_stacks(
        reader, snapshot.tasks, searched, set(of_kernel.values()), stack_size, losses
    )
    for lock, want in snapshot.wanted.items():
        queued = {rows[each.task] for each in want.queue or () if each.task in rows}
        found = owners(
            lock,
            named[lock],
            want.readers,
            _seen(snapshot, want, seen, search) if lock in of_kernel else (),
            queued.union(want.rows),
            searched=search,
            implied=positions.readers(snapshot, want, stack_size) if search else (),
            against=partial(standing.against, snapshot, want),
            handles=partial(_takes, snapshot, lock.type),
        )
        want.refuted = tuple(own for own in found if own.against)
        want.owners = tuple(own for own in found if not own.against)
        want.owners += tuple(_servers(snapshot, want))


def _seen(
    snapshot: WaitSnapshot,
    want: Wanted,
    seen: Mapping[int, Collection[int]],
    search: bool,
) -> Collection[int]:
    """Return the rows of tasks whose stacks, or code there, have a lock's address."""
    found = seen.get(want.lock.address or 0, ())
    by_code = positions.readers_by_code(snapshot, want) if search else frozenset()
    return {*found, *by_code} if by_code else found


def _takes(snapshot: WaitSnapshot, type_: LockTypeName, row: int) -> bool:
    """Return whether a task is in a function that takes locks of a type."""
    stack = snapshot.now.stacks[row]
    # That of a task that runs was not unwound.
    return not stack.addresses or takes(snapshot.context, stack, type_)


def _servers(snapshot: WaitSnapshot, want: Wanted) -> Iterator[Owned]:
    """Yield the servers of a wait that are blocked themselves.

    Other servers are reported with the wait.
    """
    known: set[int] = {own.row for own in want.owners}
    for row in want.rows:
        external = snapshot.blocked[row].external
        for server in external.servers if external else ():
            owner = snapshot.rows.get(server.task)
            if owner in snapshot.blocked and owner not in known and owner != row:
                known.add(owner)
                yield Owned(owner, server.confidence, seen=False, firm=True)


def _array(rows: set[int]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.array(sorted(rows), np.intp)


def missing_owners(snapshot: WaitSnapshot) -> Sequence[int]:
    """Return the owners of locks that are not in the table yet."""
    rows = snapshot.rows
    holders = [holder for want in snapshot.wanted.values() for holder in want.holders]
    return list(dict.fromkeys(h.task for h in holders if h.task not in rows))
