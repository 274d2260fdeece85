# SPDX-License-Identifier: LGPL-2.1-or-later

"""The futexes that a task waits on, and the waiters on a futex."""

from collections import Counter

from msatools.errors import UNREADABLE
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock import Lock, LockTypeName
from msatools.locks.base.lock_context import (
    FEW_READS,
    MAX_CANDIDATES,
    LockContext,
    per_context,
)
from msatools.locks.user.futexes import Waiter, futex_queues, futex_waiters, futexes
from msatools.target.addresses import KERNEL_HALF

_MAX_VECTOR = 128
"""``FUTEX_WAITV_MAX``."""


class RequestedFutexes:
    """The futexes that were requested in one context."""

    def __init__(self) -> None:
        self.waiters: dict[tuple[LockTypeName, object], Waiter] = {}
        """Maps type and key of each requested lock to one of its waiters."""

        self.words: dict[FutexKey, tuple[FutexKey, FutexKey]] = {}
        """Maps the key of the start of a condition variable to those of its futexes."""


@per_context
def requested_futexes(context: LockContext) -> RequestedFutexes:
    """Return the futexes that were requested in a context."""
    return RequestedFutexes()


def waiters_on(context: LockContext, lock: Lock) -> list[Waiter]:
    """Return the waiters of a requested lock."""
    key = lock.key
    if not isinstance(key, FutexKey):
        return []
    words = requested_futexes(context).words.get(key)
    if words is not None:
        # The two futexes hash to different buckets, so all tables are read.
        queues = futex_queues(context)
        waiters = [waiter for word in words for waiter in queues.get(word, ())]
    elif not context.alone:
        waiters = futex_queues(context).get(key, [])
    else:
        first = requested_futexes(context).waiters.get((lock.type, key))
        chain = futexes(context).chain(first.lock) if first else ()
        waiters = [waiter for waiter in chain if waiter.key == key]
    # Waiters that will be requeued to a PI futex do not have its pi_state yet.
    return [w for w in waiters if bool(w.pi_state) == (lock.type == "pi_futex")]


def waiters_of(
    context: LockContext, case: BlockedTask
) -> tuple[list[Waiter], Counter[FutexKey] | None]:
    """Find the waiters of a task, and the number of waiters of each futex.

    :return: One waiter, or those of ``futex_waitv()`` in the order of the call; empty
        if not found. The counts are ``None`` if there are too many waiters to read.
    """
    if context.alone:
        return _own_futexes(context, case)
    by_task, counts = futex_waiters(context)
    waiters = by_task.get(case.address, [])
    if not waiters:
        # Its chain is broken, or it was queued after that was read.
        waiters, _ = _own_futexes(context, case)
    # Several waiters are in an array, so addresses are in the order of the call.
    return sorted(waiters, key=lambda waiter: waiter.address), counts


def _own_futexes(
    context: LockContext, case: BlockedTask
) -> tuple[list[Waiter], Counter[FutexKey] | None]:
    """Find the waiters of one task without reading all tables."""
    stack = case.stack
    for waiter in futexes(context).on_stack(stack.base, stack.words, case.address):
        # Else it is left over from a call before, and so is the address of a chain.
        if not _is_queued(context, waiter):
            continue
        others = list(futexes(context).chain(waiter.lock, FEW_READS))
        counts = Counter(other.key for other in others)
        if len(others) >= FEW_READS:
            return [waiter], None
        if any(other.address == waiter.address for other in others):
            return [waiter], counts
    if case.call == "futex_waitv":
        return _vector(context, case), None
    return [], None


def _is_queued(context: LockContext, waiter: Waiter) -> bool:
    """Return whether the list neighbours of a waiter point back at it."""
    layout = context.layout
    node = waiter.address + layout.offset("futex_q", "list.node_list")
    try:
        following, previous = layout.word(node), layout.word(node + 8)
        return layout.word(following + 8) == node == layout.word(previous)
    except UNREADABLE:
        return False


def _vector(context: LockContext, case: BlockedTask) -> list[Waiter]:
    """Find the waiters of ``futex_waitv()``, an array on the heap."""
    count = case.arguments[1]
    if not 0 < count <= _MAX_VECTOR:
        return []
    size = context.layout.size("futex_vector")
    first = context.layout.offset("futex_vector", "q")
    for pointer in case.stack.data_pointers()[:MAX_CANDIDATES]:
        try:
            head = futexes(context).read(pointer + first)
            if head.task != case.address or head.lock < KERNEL_HALF:
                continue
            addresses = range(pointer + first, pointer + first + count * size, size)
            waiters = [futexes(context).read(address) for address in addresses]
        except UNREADABLE:
            continue
        if all(w.task == case.address and w.lock >= KERNEL_HALF for w in waiters):
            return waiters
    return []
