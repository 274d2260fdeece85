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


def find(look: LockContext, case: BlockedTask) -> KernelLock | None:
    """
    Find such a lock that a task waits for; ``None`` if it waits for none.

    :raises drgn.FaultError: if what tells cannot be read
    :raises LookupError: if nothing tells the types
    """
    waits = any(name.startswith("percpu_rwsem_wait") for name in case.names)
    if not waits and not case.is_in("percpu_down_write", "__percpu_down_read"):
        return None
    found = _by_entry(look, case) or _by_writer(look, case)
    if found is None:
        return KernelLock("percpu_rwsem", None, None, None, None) if waits else None
    address, mode = found
    waiters = queue(look, address)
    count = None if waiters is None else len(waiters)
    owner = writer(look, address)
    # It waits for readers, not for itself.
    owner = None if owner == case.address else owner
    return KernelLock("percpu_rwsem", address, mode, count, owner)


def queue(look: LockContext, address: int) -> list[QueuedWaiter] | None:
    """
    Tell who waits for a lock: the writer that waits for readers, then its queue.

    :raises drgn.FaultError: if the lock cannot be read
    """
    queues = kernel_locks(look).queues
    if ("percpu_rwsem", address) not in queues:
        queues["percpu_rwsem", address] = _read_queue(look, address)
    return queues["percpu_rwsem", address]


def _read_queue(look: LockContext, address: int) -> list[QueuedWaiter] | None:
    shape = Shape.of(look.layout, "wait_queue_entry", "entry", "private", "flags")
    head = address + look.layout.offset(_LOCK, "waiters")
    head += look.layout.offset("wait_queue_head", "head")
    entries = Rings(look.layout, look.findings).walk(head, shape, look.limit)
    if entries is None:
        return None
    first = writer(look, address)
    told = [] if first is None else [QueuedWaiter(first, "write")]
    # A waker leaves a mark on a long queue, which is no task's.
    return told + [
        QueuedWaiter(entry.task, _mode(entry.kind))
        for entry in entries
        if entry.task and may_be_task(entry.task)
    ]


def writer(look: LockContext, address: int) -> int | None:
    """
    Tell which writer has shut a lock and waits for readers to leave.

    :return: Its ``struct task_struct``; ``None`` also while a writer is inside.
    :raises drgn.FaultError: if it cannot be read
    """
    task_at = look.layout.offset(_LOCK, "writer.task")
    block_at = look.layout.offset(_LOCK, "block")
    start, end = min(task_at, block_at), max(task_at + 8, block_at + 4)
    data = look.reader.read(address + start, end - start)
    (task,) = struct.unpack_from("<Q", data, task_at - start)
    (block,) = struct.unpack_from("<I", data, block_at - start)
    return task if block and may_be_task(task) else None


def readers(look: LockContext, address: int) -> int | None:
    """
    Count who is inside for reading, on all CPUs.

    :return: ``None`` if it is not told; on a kernel that runs, CPUs are read one after
        the other.
    :raises drgn.FaultError: if the lock cannot be read
    """
    counts = look.layout.member(address, _LOCK, "read_count")
    total = int(sum_parts(look.reader, np.array([counts], np.uint64), look.findings)[0])
    return total if total >= 0 else None


def _by_entry(look: LockContext, case: BlockedTask) -> tuple[int, Mode] | None:
    wakes = look.layout.symbol("percpu_rwsem_wake_function")
    flags = look.layout.offset("wait_queue_entry", "flags")
    for entry in case.stack.wait_entries():
        if entry.function != wakes:
            continue
        found = wait_queues(look).head_of(entry)
        if found is not None:
            address = found[0] - look.layout.offset(_LOCK, "waiters")
            return address, _mode(case.stack.half(entry.address + flags) or 0)
    return None


def _by_writer(look: LockContext, case: BlockedTask) -> tuple[int, Mode] | None:
    if not case.is_in("percpu_down_write"):
        return None
    for word in islice(known_to(case.stack), MAX_WORDS):
        try:
            if writer(look, word) == case.address:
                return word, "write"
        except drgn.FaultError:
            continue
    return None


def _mode(flags: int) -> Mode:
    return "read" if flags & _CUSTOM else "write"


def _request(look: LockContext, case: BlockedTask) -> Request | None:
    found = find(look, case)
    return found.request if found else None


def _queue(look: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    return queue(look, lock.address or 0)


def _holders(look: LockContext, lock: Lock) -> list[Holder]:
    """Return the first of the queue, if it keeps the others out."""
    return holders_at(look, writer(look, lock.address or 0), "exact")


def _readers(look: LockContext, lock: Lock) -> int | None:
    return readers(look, lock.address or 0)


PERCPU_RWSEM = LockType(
    names=frozenset({"percpu_rwsem"}),
    requests=at_most_one(_request),
    queue=_queue,
    holders=_holders,
    readers=_readers,
)
