# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks with per-CPU reader counts: ``struct percpu_rw_semaphore``.

kernel/locking/percpu-rwsem.c (since v5.7): the waiters are on a wait queue in the lock.
A writer first sets ``block`` to keep others out, then waits for readers to leave.
``writer`` points at it only while it waits for them. The readers, and the writer once
they have left, are not recorded.
"""

from itertools import islice

import numpy as np

from msatools.errors import UNREADABLE
from msatools.kernel.percpusums import sum_parts
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.base.model import Mode
from msatools.locks.base.rings import Rings, Shape, may_be_task
from msatools.locks.base.wait_queues import wait_queues
from msatools.locks.sleeping.kernellocks import (
    MAX_WORDS,
    KernelLock,
    holders_at,
    kernel_locks,
    known_to,
)

_LOCK = "percpu_rw_semaphore"
_CUSTOM = 0b1100
"""``WQ_FLAG_CUSTOM``, which marks a reader: bit 2, or bit 3 before v6.6. Waiters on
this queue never use the other one."""


def find(context: LockContext, case: BlockedTask) -> KernelLock | None:
    """
    Find the lock that a task waits for; ``None`` if it waits for no such lock.

    :raises drgn.FaultError: if a structure that leads to the lock cannot be read
    :raises MissingError: if the types are unknown
    """
    waits = any(name.startswith("percpu_rwsem_wait") for name in case.names)
    if not waits and not case.is_in("percpu_down_write", "__percpu_down_read"):
        return None
    found = _find_by_entry(context, case) or _find_by_writer(context, case)
    if found is None:
        return KernelLock("percpu_rwsem", None, None, None, None) if waits else None
    address, mode = found
    waiters = queue(context, address)
    count = None if waiters is None else len(waiters)
    owner = writer(context, address)
    # A writer that waits for readers does not wait for itself.
    owner = None if owner == case.address else owner
    return KernelLock("percpu_rwsem", address, mode, count, owner)


def queue(context: LockContext, address: int) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock: the writer that waits for readers, then the queue.

    :raises drgn.FaultError: if the lock cannot be read
    """
    queues = kernel_locks(context).queues
    if ("percpu_rwsem", address) not in queues:
        queues["percpu_rwsem", address] = _read_queue(context, address)
    return queues["percpu_rwsem", address]


def _read_queue(context: LockContext, address: int) -> list[QueuedWaiter] | None:
    shape = Shape.of(context.layout, "wait_queue_entry", "entry", "private", "flags")
    head = address + context.layout.offset(_LOCK, "waiters")
    head += context.layout.offset("wait_queue_head", "head")
    entries = Rings(context.layout, context.losses).walk(head, shape, context.limit)
    if entries is None:
        return None
    first = writer(context, address)
    ahead = [] if first is None else [QueuedWaiter(first, "write")]
    # On a long queue, wake-ups leave a bookmark entry without a task (before v6.6).
    return ahead + [
        QueuedWaiter(entry.task, _mode(entry.kind))
        for entry in entries
        if entry.task and may_be_task(entry.task)
    ]


def writer(context: LockContext, address: int) -> int | None:
    """
    Return the writer that keeps others out and waits for readers to leave.

    :return: Address of its ``struct task_struct``; ``None`` also if a writer owns the
        lock.
    :raises drgn.FaultError: if the lock cannot be read
    """
    task, block = context.layout.members(address, _LOCK, "writer.task", "block")
    return task if block and may_be_task(task) else None


def readers(context: LockContext, address: int) -> int | None:
    """
    Return the number of readers, summed over all CPUs.

    :return: ``None`` if the sum is negative: on a running kernel the CPUs are read one
        after the other.
    :raises drgn.FaultError: if the lock cannot be read
    """
    counts = context.layout.member(address, _LOCK, "read_count")
    total = int(
        sum_parts(context.reader, np.array([counts], np.uint64), context.losses)[0]
    )
    return total if total >= 0 else None


def _find_by_entry(context: LockContext, case: BlockedTask) -> tuple[int, Mode] | None:
    wake_function = context.layout.symbol("percpu_rwsem_wake_function")
    flags = context.layout.offset("wait_queue_entry", "flags")
    for entry in case.stack.wait_entries():
        if entry.function != wake_function:
            continue
        found = wait_queues(context).head_of(entry)
        if found is not None:
            address = found[0] - context.layout.offset(_LOCK, "waiters")
            return address, _mode(case.stack.half(entry.address + flags) or 0)
    return None


def _find_by_writer(context: LockContext, case: BlockedTask) -> tuple[int, Mode] | None:
    if not case.is_in("percpu_down_write"):
        return None
    for address in islice(known_to(case.stack), MAX_WORDS):
        try:
            if writer(context, address) == case.address:
                return address, "write"
        except UNREADABLE:
            continue
    return None


def _mode(flags: int) -> Mode:
    return "read" if flags & _CUSTOM else "write"


def _request(context: LockContext, case: BlockedTask) -> Request | None:
    found = find(context, case)
    return found.request if found else None


def _queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    return queue(context, lock.address or 0)


def _holders(context: LockContext, lock: Lock) -> list[Holder]:
    """Return the writer that keeps others out while it waits for readers to leave."""
    return holders_at(context, writer(context, lock.address or 0), "exact")


def _readers(context: LockContext, lock: Lock) -> int | None:
    return readers(context, lock.address or 0)


PERCPU_RWSEM = LockType(
    names=frozenset({"percpu_rwsem"}),
    requests=at_most_one(_request),
    queue=_queue,
    holders=_holders,
    readers=_readers,
)
