# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait queues that tasks wait on for something of their owner's (linux/wait.h)."""

import drgn
import numpy as np

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.base.wait_queues import wait_queues
from msatools.locks.events.events import by_caller, wait_of
from msatools.locks.events.kthreads import kernel_threads
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
"""What wakes those that wait for what has a type of its own, or for no lock."""

_LOOKUPS = ("d_alloc_parallel", "d_wait_lookup")


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the ``struct wait_queue_head`` that a task waits on.

    :raises drgn.FaultError: if it cannot be read
    """
    found = wait_of(context, case)
    if found is None:
        return None
    entry, queue = found
    if entry.function in {context.layout.symbol(name) for name in _OTHERS}:
        return None
    head = context.layout.offset("wait_queue_head", "head")
    lock = Lock("wait_queue", queue.head - head)
    if case.is_in(*_LOOKUPS):
        wait_queues(context).lookups.add(lock)
    return Request(lock)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """Return the waiters on a queue, in order; those that poll it are left out."""
    address = lock.address or 0
    found = wait_queues(context).of_head(
        address + context.layout.offset("wait_queue_head", "head")
    )
    if found is None or found.waiters is None:
        return None
    return wait_queues(context).tasks(found.waiters)


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return who is to wake a queue, where it says so.

    That is the thread that commits a journal, and who looks up a name that others want
    too: it has the queue on its own stack. Of other queues nobody knows.

    :raises drgn.FaultError: if it cannot be read
    """
    if lock in wait_queues(context).lookups:
        return _looks_up(context, lock.address or 0)
    return _commits(context, lock.address or 0)


def _looks_up(context: LockContext, head: int) -> list[Holder]:
    """Find whose stack a queue is on."""
    stacks = context.tasks["stack"].astype(np.uint64)
    # Where it is below a stack this is huge.
    inside = np.uint64(head) - stacks < np.uint64(wait_queues(context).stack_bytes)
    tasks = context.tasks["address"][inside & (stacks != 0)].tolist()
    return [Holder(task, "exact") for task in tasks]


def _commits(context: LockContext, head: int) -> list[Holder]:
    """Find the thread of a journal of which all wait until it has committed."""
    if not context.layout.has("journal_s", "j_task"):
        return []
    for member in ("j_wait_done_commit", "j_wait_transaction_locked"):
        journal = head - context.layout.offset("journal_s", member)
        try:
            task = context.layout.member(journal, "journal_s", "j_task")
            if task < KERNEL_HALF or kernel_threads(context).data_of(task) != journal:
                continue
            barriers = context.layout.member(journal, "journal_s", "j_barrier_count")
        except drgn.FaultError:
            continue
        # With a barrier, those who want to write wait for who has put it up.
        if member == "j_wait_done_commit" or not barriers:
            return [Holder(task, "exact")]
    return []


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe what a task waits for, by the function that waits."""
    return by_caller(case)


WAIT_QUEUE = LockType(
    names=frozenset({"wait_queue"}),
    requests=at_most_one(request),
    queue=queue,
    holders=holders,
    what=what,
)
