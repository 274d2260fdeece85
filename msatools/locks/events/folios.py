# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for a bit of a page, such as locked or writeback (mm/filemap.c).

The kernel does not record the task that will change the bit.
"""

from msatools.errors import MissingError
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.base.ownstack import WaitEntry
from msatools.locks.base.wait_queues import QueueKey, wait_queues
from msatools.locks.events.events import wait_of
from msatools.selfdesc.find import find_type

_PAGE = ("folio", "page")
"""Members of ``struct wait_page_queue``: "mm/filemap: Add folio_wait_bit()" and the
like (in v5.16)."""


def folio_of(context: LockContext, case: BlockedTask, entry: WaitEntry) -> int | None:
    """Return the page of an entry on a task's stack; ``None`` if it waits for none."""
    if entry.function != context.layout.symbol("wake_page_function"):
        return None
    key = _key(context)
    return case.stack.word(entry.address - key.wait + key.of)


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the bit of a page that a task waits for.

    The address of the lock is that of the ``struct folio``, its key the number of the
    bit.

    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    queued = wait_of(context, case)
    if queued is None:
        return None
    entry, bucket = queued
    folio = folio_of(context, case, entry)
    if not folio:
        return None
    key = _key(context)
    bit = case.stack.half(entry.address - key.wait + key.bit)
    if bit is None:
        return None
    lock = Lock("folio", folio, bit)
    wait_queues(context).buckets[lock] = bucket.head
    return Request(lock)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters for a bit of a page that :func:`request` found, in order.

    The queue is a hashed bucket: waiters for other pages are left out.
    """
    wake_function = context.layout.symbol("wake_page_function")
    return wait_queues(context).bucket(lock, _key(context), [wake_function])


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Return the name of the bit, as ``locked``; ``None`` if unknown."""
    try:
        flags = find_type(context.reader.prog, "enum pageflags").enumerators
    except MissingError:
        return None
    # The first of several names is the generic one.
    names = [flag.name for flag in flags or () if flag.value == request.lock.key]
    return names[0].removeprefix("PG_") if names else None


def _key(context: LockContext) -> QueueKey:
    offset, entry = context.layout.offset, "wait_page_queue"
    return QueueKey(
        wait=offset(entry, "wait"),
        of=offset(entry, *_PAGE),
        bit=offset(entry, "bit_nr"),
    )


FOLIO = LockType(
    names=frozenset({"folio"}),
    requests=at_most_one(request),
    queue=queue,
    what=what,
)
