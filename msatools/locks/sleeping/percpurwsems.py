# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks that a writer takes from readers on all CPUs: ``struct percpu_rw_semaphore``.

kernel/locking/percpu-rwsem.c (since v5.7): who finds it taken waits on a queue of its
own. A writer that has won shuts it first (``block``), then waits for readers that are
still inside, and only so long the lock names it (``writer``). Who is inside is written
nowhere.
"""

import struct
from itertools import islice

import drgn
import numpy as np

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
"""``WQ_FLAG_CUSTOM``, the third bit or (before v6.6) the fourth: a reader. The other of
them is for waiters of other kinds."""


def find(context: LockContext, case: BlockedTask) -> KernelLock | None:
    """
    Find such a lock that a task waits for; ``None`` if it waits for none.

    :raises drgn.FaultError: if a structure on the way cannot be read
    :raises LookupError: if the types are unknown
    """
    waits = any(name.startswith("percpu_rwsem_wait") for name in case.names)
    if not waits and not case.is_in("percpu_down_write", "__percpu_down_read"):
        return None
    found = _by_entry(context, case) or _by_writer(context, case)
    if found is None:
        return KernelLock("percpu_rwsem", None, None, None, None) if waits else None
    address, mode = found
    waiters = queue(context, address)
    count = None if waiters is None else len(waiters)
    owner = writer(context, address)
    # It waits for readers, not for itself.
    owner = None if owner == case.address else owner
    return KernelLock("percpu_rwsem", address, mode, count, owner)


def queue(context: LockContext, address: int) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock: the writer that waits for readers, then its queue.

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
    # A waker leaves a mark on a long queue, which is no task's.
    return ahead + [
        QueuedWaiter(entry.task, _mode(entry.kind))
        for entry in entries
        if entry.task and may_be_task(entry.task)
    ]


def writer(context: LockContext, address: int) -> int | None:
    """
    Return which writer has shut a lock and waits for readers to leave.

    :return: Its ``struct task_struct``; ``None`` also while a writer is inside.
    :raises drgn.FaultError: if it cannot be read
    """
    task_at = context.layout.offset(_LOCK, "writer.task")
    block_at = context.layout.offset(_LOCK, "block")
    start, end = min(task_at, block_at), max(task_at + 8, block_at + 4)
    data = context.reader.read(address + start, end - start)
    (task,) = struct.unpack_from("<Q", data, task_at - start)
    (block,) = struct.unpack_from("<I", data, block_at - start)
    return task if block and may_be_task(task) else None


def readers(context: LockContext, address: int) -> int | None:
    """
    Count who is inside for reading, on all CPUs.

    :return: ``None`` if it is not told; on a running kernel, CPUs are read one after
        the other.
    :raises drgn.FaultError: if the lock cannot be read
    """
    counts = context.layout.member(address, _LOCK, "read_count")
    total = int(
        sum_parts(context.reader, np.array([counts], np.uint64), context.losses)[0]
    )
    return total if total >= 0 else None


def _by_entry(context: LockContext, case: BlockedTask) -> tuple[int, Mode] | None:
    wakes = context.layout.symbol("percpu_rwsem_wake_function")
    flags = context.layout.offset("wait_queue_entry", "flags")
    for entry in case.stack.wait_entries():
        if entry.function != wakes:
            continue
        found = wait_queues(context).head_of(entry)
        if found is not None:
            address = found[0] - context.layout.offset(_LOCK, "waiters")
            return address, _mode(case.stack.half(entry.address + flags) or 0)
    return None


def _by_writer(context: LockContext, case: BlockedTask) -> tuple[int, Mode] | None:
    if not case.is_in("percpu_down_write"):
        return None
    for word in islice(known_to(case.stack), MAX_WORDS):
        try:
            if writer(context, word) == case.address:
                return word, "write"
        except drgn.FaultError:
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
    """Return the first of the queue, if it keeps the others out."""
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
