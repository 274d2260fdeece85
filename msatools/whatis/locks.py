# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks that lie at an address: their owners and waiters, as the locks record them."""

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.locks.base.lock import Holder, Lock, LockTypeName
from msatools.locks.lock_types import holders_of, queue_of, readers_of
from msatools.locks.report import LockRow
from msatools.target.model import Address
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import LockOwner, LockThere


def read_lock(lookup: Lookup, type_: LockTypeName, address: int) -> LockThere | None:
    """Return a lock by its type and address; ``None`` if it cannot be read."""
    lock = Lock(type_, address)
    try:
        return make_lock(lookup, lock, address, f"{type_} {address:#x}")
    except LOST as error:
        lookup.losses.lose(Loss.LOCKS, f"a lock cannot be read: {error}")
        return None


def make_lock(lookup: Lookup, lock: Lock, address: int, id_: str) -> LockThere:
    """Read the owners and waiters of a lock.

    :param address: Where it lies, also if it has no address of its own.
    :raises drgn.FaultError: if it cannot be read
    :raises MissingError: if its types are unknown
    """
    context = lookup.locks
    holders = holders_of(context, lock)
    queue = queue_of(context, lock)
    waiters = None
    if queue is not None:
        pids = (context.pid(waiter.task) for waiter in queue)
        waiters = tuple(pid for pid in pids if pid is not None)
    return LockThere(
        id=id_,
        type=lock.type,
        address=Address(address),
        owners=tuple(_owner(lookup, holder) for holder in holders),
        waiters=waiters,
        readers=readers_of(context, lock),
    )


def from_waits(row: LockRow) -> LockThere | None:
    """Return a lock of msa-locks; ``None`` if it has no address."""
    if row.address is None:
        return None
    return LockThere(
        id=row.id,
        type=row.type,
        address=row.address,
        owners=tuple(
            LockOwner(pid=owner.pid, comm=owner.comm, confidence=owner.confidence)
            for owner in row.owners
        ),
        waiters=row.waiters,
        readers=row.readers,
    )


def _owner(lookup: Lookup, holder: Holder) -> LockOwner:
    task = lookup.task(holder.task)
    return LockOwner(pid=task.pid, comm=task.comm, confidence=holder.confidence)
