# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for a bit of a page: until it is unlocked, or written back (mm/filemap.c).

Nothing records who will change the bit.
"""

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.base.ownstack import WaitEntry
from msatools.locks.base.wait_queues import QueueKey, wait_queues
from msatools.locks.events.events import wait_of

_PAGE = ("folio", "page")
"""Of ``struct wait_page_queue``: "mm/filemap: Add folio_wait_bit()" and the like (in
v5.16)."""


def folio_of(context: LockContext, case: BlockedTask, entry: WaitEntry) -> int | None:
    """Return the page that an entry on a task's stack waits for, if it does for one."""
    if entry.function != context.layout.symbol("wake_page_function"):
        return None
    key = _key(context)
    return case.stack.word(entry.address - key.wait + key.of)


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the page that a task waits for, and which of its bits.

    The lock's address is the ``struct folio``'s, its key the bit's number.

    :raises drgn.FaultError: if it cannot be read
    """
    found = wait_of(context, case)
    folio = folio_of(context, case, found[0]) if found else None
    if found is None or not folio:
        return None
    entry, queue = found
    key = _key(context)
    bit = case.stack.half(entry.address - key.wait + key.bit)
    if bit is None:
        return None
    lock = Lock("folio", folio, bit)
    wait_queues(context).buckets[lock] = queue.head
    return Request(lock)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters for a bit of a page that :func:`request` found, in order.

    Waiters for other pages may be on the same queue: they are left out.
    """
    wakes = context.layout.symbol("wake_page_function")
    return wait_queues(context).bucket(lock, _key(context), [wakes])


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Name the bit that is waited for, as ``locked`` or ``writeback``."""
    try:
        flags = context.reader.prog.type("enum pageflags").enumerators
    except LookupError:
        return None
    # Other names of the same bit come later.
    names = [flag.name for flag in flags or () if flag.value == request.lock.key]
    return names[0].removeprefix("PG_") if names else None


def _key(context: LockContext) -> QueueKey:
    at, entry = context.layout.offset, "wait_page_queue"
    return QueueKey(at(entry, "wait"), at(entry, *_PAGE), at(entry, "bit_nr"))


FOLIO = LockType(
    names=frozenset({"folio"}),
    requests=at_most_one(request),
    queue=queue,
    what=what,
)
