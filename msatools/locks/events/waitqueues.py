# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait queues that are part of a subsystem's structure (include/linux/wait.h)."""

import numpy as np

from msatools.errors import UNREADABLE
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.base.wait_queues import wait_queues
from msatools.locks.events.events import by_caller, wait_of
from msatools.locks.events.kthreads import kernel_threads
from msatools.locks.workqueues.writeback import writeback, writeback_text
from msatools.target.addresses import KERNEL_HALF

_OTHERS = (
    "wake_page_function",
    "wake_bit_function",
    "var_wake_function",
    "percpu_rwsem_wake_function",
    "child_wait_callback",
    "pollwake",
    "ep_autoremove_wake_function",
)
"""Wake functions of waiters for other lock types, or for no lock."""

_LOOKUPS = ("d_alloc_parallel", "d_wait_lookup")


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the ``struct wait_queue_head`` that a task waits on.

    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    queued = wait_of(context, case)
    if queued is None:
        return None
    entry, queue = queued
    if entry.function in {context.layout.symbol(name) for name in _OTHERS}:
        return None
    head = context.layout.offset("wait_queue_head", "head")
    lock = Lock("wait_queue", queue.head - head)
    if case.is_in(*_LOOKUPS):
        wait_queues(context).lookups.add(lock)
    return Request(lock)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """Return the waiters on a queue, in order, without those that poll it."""
    head = (lock.address or 0) + context.layout.offset("wait_queue_head", "head")
    wait_queue = wait_queues(context).of_head(head)
    if wait_queue is None or wait_queue.waiters is None:
        return None
    return wait_queues(context).tasks(wait_queue.waiters)


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return the task that will wake a queue; empty if unknown.

    It is known for some kinds of queues: that of a journal is woken by the thread that
    commits it; that of a dentry lookup is on the stack of the task that looks it up;
    that of a backing device by the worker that writes back its inodes.

    :raises drgn.FaultError: if a structure that leads to the task cannot be read
    """
    if lock in wait_queues(context).lookups:
        return _lookup_task(context, lock.address or 0)
    address = lock.address or 0
    return _journal_thread(context, address) or list(writeback(context, address))


def _lookup_task(context: LockContext, head: int) -> list[Holder]:
    """Find the task that has a queue on its stack."""
    stacks = context.tasks["stack"].astype(np.uint64)
    # For a stack above the queue, the unsigned difference is huge.
    inside = np.uint64(head) - stacks < np.uint64(wait_queues(context).stack_bytes)
    tasks = context.tasks["address"][inside & (stacks != 0)].tolist()
    return [Holder(task, "exact") for task in tasks]


def _journal_thread(context: LockContext, head: int) -> list[Holder]:
    """Find the thread of a journal whose waiters wait for the end of its commit."""
    if not context.layout.has("journal_s", "j_task"):
        return []
    for member in ("j_wait_done_commit", "j_wait_transaction_locked"):
        journal = head - context.layout.offset("journal_s", member)
        try:
            task = context.layout.member(journal, "journal_s", "j_task")
            if task < KERNEL_HALF or kernel_threads(context).data_of(task) != journal:
                continue
            barriers = context.layout.member(journal, "journal_s", "j_barrier_count")
        except UNREADABLE:
            continue
        # With a barrier, writers wait for the task that set the barrier.
        if member == "j_wait_done_commit" or not barriers:
            return [Holder(task, "exact")]
    return []


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe what a task waits for, by the function that waits."""
    return writeback_text(context, request.lock.address or 0) or by_caller(case)


WAIT_QUEUE = LockType(
    names=frozenset({"wait_queue"}),
    requests=at_most_one(request),
    queue=queue,
    holders=holders,
    what=what,
)
