# SPDX-License-Identifier: LGPL-2.1-or-later

"""Completions: what tasks wait for until it is done (kernel/sched/completion.c).

A completion does not record who will complete it. Some lie in a structure that does:
that of a kernel thread, one that a vforked child points to, or work that is queued
behind the work that is waited for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.walks import list_records
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, QueuedWaiter, Request
from msatools.locks.base.lock_context import (
    FEW_READS,
    MAX_CANDIDATES,
    LockContext,
    per_context,
)
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.base.wait_queues import wait_queues
from msatools.locks.events.events import by_caller, is_completion, is_event
from msatools.locks.events.kthreads import kernel_threads
from msatools.locks.events.work import Work, workqueues

_MAX_CHILDREN = 4096


@dataclass(frozen=True)
class _Known:
    """What a completion is for, by the structure that it is in."""

    what: str
    holders: tuple[Holder, ...] = ()


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the ``struct completion`` that a task waits for.

    :raises drgn.FaultError: if it cannot be read
    """
    if not is_completion(case) or not is_event(context, case):
        return None
    if not context.layout.has("completion", "wait.task_list"):
        # "completion: Use simple wait queues" (in v5.7): before, it has one of those
        # that anybody may use.
        return None
    found = wait_queues(context).simple(case.stack)
    if found is None:
        return None
    within = context.layout.offset("completion", "wait.task_list")
    return Request(Lock("completion", found.head - within))


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """Return the waiters for a completion, in order."""
    within = context.layout.offset("completion", "wait.task_list")
    found = wait_queues(context).of_simple_head((lock.address or 0) + within)
    if found is None or found.waiters is None:
        return None
    return wait_queues(context).tasks(found.waiters)


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """Return who is to complete it, if it lies in what says so."""
    known = _known(context, lock)
    return list(known.holders) if known else []


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe what a task waits for in a few words; ``None`` if unknown."""
    known = _known(context, request.lock)
    if known is not None:
        return known.what
    return by_caller(case)


@per_context
def _known_before(context: LockContext) -> dict[Lock, _Known | None]:
    """By completion: many may wait for one."""
    return {}


def _known(context: LockContext, lock: Lock) -> _Known | None:
    known = _known_before(context)
    if lock not in known:
        known[lock] = _read(context, lock)
    return known[lock]


def _read(context: LockContext, lock: Lock) -> _Known | None:
    address = lock.address or 0
    known = _thread(context, address)
    if known is not None:
        return known
    for queued in queue(context, lock) or ():
        if not wait_queues(context).is_on_stack(address, queued.task):
            continue
        for ask in (_child, _work, _queue_of_work, _thread_work, _creation):
            try:
                known = ask(context, queued.task, address)
            except LookupError:
                # The kernel has no such thing, or nothing tells its type.
                continue
            except drgn.FaultError as error:
                context.losses.lose(
                    Loss.COMPLETIONS, f"who is to complete one is lost: {error}"
                )
                continue
            if known is not None:
                return known
        break
    return None


def _thread(context: LockContext, address: int) -> _Known | None:
    """A thread of the kernel that is to stop or to park."""
    for member, doing in (("exited", "stop"), ("parked", "park")):
        if not context.layout.has("kthread", member):
            continue
        kthread = address - context.layout.offset("kthread", member)
        task = kernel_threads(context).by_kthread.get(kthread)
        if task is not None:
            pid = context.pid(task)
            return _Known(f"thread {pid} to {doing}", (Holder(task, "exact"),))
    return None


def _child(context: LockContext, waiter: int, address: int) -> _Known | None:
    """A child that has yet to execute a program, or to end."""
    child = vforked(context, waiter, lambda done: done == address)
    if child is None:
        return None
    pid = context.pid(child, leader=True)
    return _Known(f"child {pid} to exec", (Holder(child, "exact"),))


def vforked(
    context: LockContext, parent: int, is_it: Callable[[int], bool]
) -> int | None:
    """
    Find the child for which a task that has vforked waits.

    :param is_it: Tells the completion that it waits for; the child points at it.
    :return: The address of its ``struct task_struct``.
    :raises drgn.FaultError: if a child cannot be read
    """
    head = parent + context.layout.offset("task_struct", "children")
    sibling = context.layout.offset("task_struct", "sibling")
    # From the end of the list on, where the youngest is.
    node = context.layout.word(head + 8)
    for _ in range(FEW_READS if context.alone else _MAX_CHILDREN):
        if node in (head, 0):
            break
        task = node - sibling
        if is_it(context.layout.member(task, "task_struct", "vfork_done")):
            return task
        node = context.layout.word(node + 8)
    return None


def _work(context: LockContext, waiter: int, address: int) -> _Known | None:
    """Work that is put behind what is waited for: flush_work() and the like."""
    if not context.layout.has("wq_barrier", "done"):
        return None
    barrier = address - context.layout.offset("wq_barrier", "done")
    if context.layout.member(barrier, "wq_barrier", "task") != waiter:
        return None
    work = workqueues(context).behind(barrier)
    if work is None:
        return None
    if work.worker is None:
        return _Known(f"work {_named(work)}, not begun")
    pid = context.pid(work.worker)
    return _Known(
        f"work {_named(work)} of thread {pid}", (Holder(work.worker, "exact"),)
    )


def _queue_of_work(context: LockContext, waiter: int, address: int) -> _Known | None:
    """All work of a queue up to now: flush_workqueue()."""
    if not context.layout.has("wq_flusher", "done"):
        return None
    flusher = address - context.layout.offset("wq_flusher", "done")
    flushed = workqueues(context).flushed.get(flusher)
    if flushed is None:
        return None
    workers = workqueues(context).workers(flushed)
    holders = tuple(Holder(worker, "exact") for worker in workers)
    return _Known(f"workqueue {flushed.name}", holders)


def _named(work: Work) -> str:
    return work.function or "of unknown name"


def _thread_work(context: LockContext, waiter: int, address: int) -> _Known | None:
    """Work of a thread that has its own: kthread_flush_work() and the like."""
    if not context.layout.has("kthread_flush_work", "done"):
        return None
    flush = address - context.layout.offset("kthread_flush_work", "done")
    flushes = context.layout.symbol("kthread_flush_work_fn")
    function = context.layout.member(flush, "kthread_flush_work", "work.func")
    if flushes is None or function != flushes:
        return None
    worker = context.layout.member(flush, "kthread_flush_work", "work.worker")
    task = context.layout.member(worker, "kthread_worker", "task")
    if task not in kernel_threads(context).by_kthread.values():
        return None
    return _Known(f"work of thread {context.pid(task)}", (Holder(task, "exact"),))


def _creation(context: LockContext, waiter: int, address: int) -> _Known | None:
    """A thread of the kernel that is to be made: kthreadd does it."""
    maker, requests = (
        kernel_threads(context).maker,
        context.layout.symbol("kthread_create_list"),
    )
    if maker is None or requests is None:
        return None
    what = "kthreadd to make a thread"
    info = "kthread_create_info"
    done = context.layout.offset(info, "done")
    size = context.layout.size(info)
    node = context.layout.offset(info, "list")
    name = "threads to be made"
    for _, data in list_records(
        context.reader, requests, node, size, context.losses, name
    ):
        if int.from_bytes(data[done : done + 8], "little") == address:
            return _Known(what, (Holder(maker, "exact"),))
    if kernel_threads(context).is_making(
        address, MAX_CANDIDATES, wait_queues(context).stack_bytes
    ):
        return _Known(what, (Holder(maker, "likely"),))
    return None


COMPLETION = LockType(
    names=frozenset({"completion"}),
    requests=at_most_one(request),
    queue=queue,
    holders=holders,
    what=what,
)
