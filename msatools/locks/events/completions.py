# SPDX-License-Identifier: LGPL-2.1-or-later

"""Completions: what tasks wait for until it is done (kernel/sched/completion.c).

A completion does not say who is to do it. Some lie in a structure that does: a kernel
thread's own, what a vforked child points to, a piece of work that is put behind the
work that is waited for.
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
class _Told:
    """What a structure around a completion tells."""

    what: str
    holders: tuple[Holder, ...] = ()


def request(look: LockContext, case: BlockedTask) -> Request | None:
    """
    Tell the ``struct completion`` that a task waits for.

    :raises drgn.FaultError: if it cannot be read
    """
    if not is_completion(case) or not is_event(look, case):
        return None
    if not look.layout.has("completion", "wait.task_list"):
        # "completion: Use simple wait queues" (in v5.7): before, it has one of those
        # that anybody may use.
        return None
    found = wait_queues(look).simple(case.stack)
    if found is None:
        return None
    within = look.layout.offset("completion", "wait.task_list")
    return Request(Lock("completion", found.head - within))


def queue(look: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """Tell who waits for a completion, in order."""
    within = look.layout.offset("completion", "wait.task_list")
    found = wait_queues(look).of_simple_head((lock.address or 0) + within)
    if found is None or found.waiters is None:
        return None
    return wait_queues(look).tasks(found.waiters)


def holders(look: LockContext, lock: Lock) -> list[Holder]:
    """Tell who is to complete it, if it lies in what says so."""
    told = _told(look, lock)
    return list(told.holders) if told else []


def what(look: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Say in a few words what a task waits for; ``None`` if nothing tells."""
    told = _told(look, request.lock)
    if told is not None:
        return told.what
    return by_caller(case)


@per_context
def _told_before(look: LockContext) -> dict[Lock, _Told | None]:
    """By completion: many may wait for one."""
    return {}


def _told(look: LockContext, lock: Lock) -> _Told | None:
    known = _told_before(look)
    if lock not in known:
        known[lock] = _read(look, lock)
    return known[lock]


def _read(look: LockContext, lock: Lock) -> _Told | None:
    address = lock.address or 0
    told = _thread(look, address)
    if told is not None:
        return told
    for queued in queue(look, lock) or ():
        if not wait_queues(look).is_on_stack(address, queued.task):
            continue
        for ask in (_child, _work, _queue_of_work, _thread_work, _creation):
            try:
                told = ask(look, queued.task, address)
            except LookupError:
                # The kernel has no such thing, or nothing tells its type.
                continue
            except drgn.FaultError as error:
                look.findings.lose(
                    Loss.COMPLETIONS, f"who is to complete one is lost: {error}"
                )
                continue
            if told is not None:
                return told
        break
    return None


def _thread(look: LockContext, address: int) -> _Told | None:
    """A thread of the kernel that is to stop or to park."""
    for member, doing in (("exited", "stop"), ("parked", "park")):
        if not look.layout.has("kthread", member):
            continue
        kthread = address - look.layout.offset("kthread", member)
        task = kernel_threads(look).by_kthread.get(kthread)
        if task is not None:
            pid = look.pid(task)
            return _Told(f"thread {pid} to {doing}", (Holder(task, "exact"),))
    return None


def _child(look: LockContext, waiter: int, address: int) -> _Told | None:
    """A child that has yet to execute a program, or to end."""
    child = vforked(look, waiter, lambda done: done == address)
    if child is None:
        return None
    pid = look.pid(child, leader=True)
    return _Told(f"child {pid} to exec", (Holder(child, "exact"),))


def vforked(look: LockContext, parent: int, is_it: Callable[[int], bool]) -> int | None:
    """
    Find the child for which a task that has vforked waits.

    :param is_it: Tells the completion that it waits for; the child points at it.
    :return: The address of its ``struct task_struct``.
    :raises drgn.FaultError: if a child cannot be read
    """
    head = parent + look.layout.offset("task_struct", "children")
    sibling = look.layout.offset("task_struct", "sibling")
    # From the end of the list on, where the youngest is.
    node = look.layout.word(head + 8)
    for _ in range(FEW_READS if look.alone else _MAX_CHILDREN):
        if node in (head, 0):
            break
        task = node - sibling
        if is_it(look.layout.member(task, "task_struct", "vfork_done")):
            return task
        node = look.layout.word(node + 8)
    return None


def _work(look: LockContext, waiter: int, address: int) -> _Told | None:
    """Work that is put behind what is waited for: flush_work() and the like."""
    if not look.layout.has("wq_barrier", "done"):
        return None
    barrier = address - look.layout.offset("wq_barrier", "done")
    if look.layout.member(barrier, "wq_barrier", "task") != waiter:
        return None
    work = workqueues(look).behind(barrier)
    if work is None:
        return None
    if work.worker is None:
        return _Told(f"work {_named(work)}, not begun")
    pid = look.pid(work.worker)
    return _Told(
        f"work {_named(work)} of thread {pid}", (Holder(work.worker, "exact"),)
    )


def _queue_of_work(look: LockContext, waiter: int, address: int) -> _Told | None:
    """All work of a queue up to now: flush_workqueue()."""
    if not look.layout.has("wq_flusher", "done"):
        return None
    flusher = address - look.layout.offset("wq_flusher", "done")
    flushed = workqueues(look).flushed.get(flusher)
    if flushed is None:
        return None
    workers = workqueues(look).workers(flushed)
    holders = tuple(Holder(worker, "exact") for worker in workers)
    return _Told(f"workqueue {flushed.name}", holders)


def _named(work: Work) -> str:
    return work.function or "of unknown name"


def _thread_work(look: LockContext, waiter: int, address: int) -> _Told | None:
    """Work of a thread that has its own: kthread_flush_work() and the like."""
    if not look.layout.has("kthread_flush_work", "done"):
        return None
    flush = address - look.layout.offset("kthread_flush_work", "done")
    flushes = look.layout.symbol("kthread_flush_work_fn")
    function = look.layout.member(flush, "kthread_flush_work", "work.func")
    if flushes is None or function != flushes:
        return None
    worker = look.layout.member(flush, "kthread_flush_work", "work.worker")
    task = look.layout.member(worker, "kthread_worker", "task")
    if task not in kernel_threads(look).by_kthread.values():
        return None
    return _Told(f"work of thread {look.pid(task)}", (Holder(task, "exact"),))


def _creation(look: LockContext, waiter: int, address: int) -> _Told | None:
    """A thread of the kernel that is to be made: kthreadd does it."""
    maker, requests = (
        kernel_threads(look).maker,
        look.layout.symbol("kthread_create_list"),
    )
    if maker is None or requests is None:
        return None
    what = "kthreadd to make a thread"
    info = "kthread_create_info"
    done = look.layout.offset(info, "done")
    size = look.layout.size(info)
    node = look.layout.offset(info, "list")
    name = "threads to be made"
    for _, data in list_records(look.reader, requests, node, size, look.findings, name):
        if int.from_bytes(data[done : done + 8], "little") == address:
            return _Told(what, (Holder(maker, "exact"),))
    if kernel_threads(look).is_making(
        address, MAX_CANDIDATES, wait_queues(look).stack_bytes
    ):
        return _Told(what, (Holder(maker, "likely"),))
    return None


COMPLETION = LockType(
    names=frozenset({"completion"}),
    requests=at_most_one(request),
    queue=queue,
    holders=holders,
    what=what,
)
