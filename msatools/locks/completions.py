# SPDX-License-Identifier: LGPL-2.1-or-later

"""Completions: requests, waiters, and tasks that will complete them."""

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import unsigned
from msatools.kernel.report import Loss
from msatools.kernel.structs import Members, read_structs
from msatools.kernel.walks import list_records
from msatools.locks.context import (
    FEW_READS,
    MAX_CANDIDATES,
    BlockedTask,
    LockContext,
    LockType,
    at_most_one,
    per_context,
)
from msatools.locks.rcu import awaited_callbacks, awaited_grace_period
from msatools.locks.report import Holder, Lock, QueuedWaiter, Request
from msatools.locks.wait_queues import by_caller, is_completion, is_event, wait_queues
from msatools.locks.work import Work, work_beside, workqueues
from msatools.locks.workers import Delay, kernel_threads, work_pools
from msatools.program.linear import KERNEL_HALF

_HOTPLUG_BYTES = 1024
"""More bytes than a ``struct cpuhp_cpu_state`` has."""

_MAX_CHILDREN = 4096
_UNNAMED = "of unknown name"


class _Purpose(Struct, frozen=True):
    """The purpose of a completion, by the structure that contains it."""

    what: str
    holders: tuple[Holder, ...] = ()


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the ``struct completion`` that a task waits for; ``None`` if not found.

    :raises drgn.FaultError: if a structure that leads to it cannot be read
    """
    if not is_completion(case) or not is_event(context, case):
        return None
    if not context.layout.has("completion", "wait.task_list"):
        # Before "completion: Use simple wait queues" (in v5.7) it had a wait queue.
        return None
    simple_queue = wait_queues(context).simple(case.stack)
    if simple_queue is None:
        return None
    offset = context.layout.offset("completion", "wait.task_list")
    return Request(Lock("completion", simple_queue.head - offset))


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """Return the waiters for a completion, in order; ``None`` if not readable."""
    offset = context.layout.offset("completion", "wait.task_list")
    simple_queue = wait_queues(context).of_simple_head((lock.address or 0) + offset)
    if simple_queue is None or simple_queue.waiters is None:
        return None
    return wait_queues(context).tasks(simple_queue.waiters)


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """Return the tasks that will complete a completion; empty if unknown."""
    purpose = _purpose(context, lock)
    return list(purpose.holders) if purpose else []


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe in a few words what will complete a completion; ``None`` if unknown."""
    purpose = _purpose(context, request.lock)
    if purpose is not None:
        return purpose.what
    return by_caller(case)


@per_context
def _purposes(context: LockContext) -> dict[Lock, _Purpose | None]:
    """Maps a completion to its purpose, as many tasks may wait for one."""
    return {}


def _purpose(context: LockContext, lock: Lock) -> _Purpose | None:
    purposes = _purposes(context)
    if lock not in purposes:
        purposes[lock] = _find_purpose(context, lock)
    return purposes[lock]


def _find_purpose(context: LockContext, lock: Lock) -> _Purpose | None:
    address = lock.address or 0
    purpose = (
        _thread(context, address)
        or _hotplug(context, address)
        or _callbacks(context, address)
    )
    if purpose is not None:
        return purpose
    stack = None
    for queued in queue(context, lock) or ():
        if not wait_queues(context).is_on_stack(address, queued.task):
            continue
        base = context.layout.member(queued.task, "task_struct", "stack")
        stack = base, base + wait_queues(context).stack_bytes
        for find in (
            *(_child, _work, _workqueue, _thread_work, _creation, _move),
            _grace_period,
        ):
            try:
                purpose = find(context, queued.task, address)
            except MissingError:
                # This kernel has no such type, or it is unknown.
                continue
            except UNREADABLE as error:
                context.losses.lose(
                    Loss.COMPLETIONS,
                    f"cannot determine who is to complete one: {error}",
                )
                continue
            if purpose is not None:
                return purpose
        break
    return _beside(context, address, stack)


def _beside(
    context: LockContext, address: int, stack: tuple[int, int] | None
) -> _Purpose | None:
    """Return the work item in the structure that contains a completion."""
    try:
        work = work_beside(context).find(address, stack)
    except MissingError:
        return None
    except UNREADABLE as error:
        context.losses.lose(
            Loss.COMPLETIONS, f"cannot determine what completes one: {error}"
        )
        return None
    if work is None:
        return None
    name = work_pools(context).function(work.function) or _UNNAMED
    if work.worker is None:
        return _not_begun(name, work.delay)
    what = f"work {name} of thread {context.pid(work.worker)}"
    return _Purpose(what, (Holder(work.worker, work.confidence),))


def _grace_period(context: LockContext, task: int, address: int) -> _Purpose | None:
    """Return the tasks that hold up the RCU grace period that a task waits for."""
    found = awaited_grace_period(context, address)
    return None if found is None else _Purpose(*found)


def _move(context: LockContext, task: int, address: int) -> _Purpose | None:
    """Return the task that has to leave its CPU after another one set its affinity.

    kernel/sched/core.c, affine_move_task(): a task that has migration disabled stays.
    """
    done = context.layout.offset("set_affinity_pending", "done")
    mover = _migrations(context).get(address - done)
    if mover is None:
        return None
    pid = context.pid(mover)
    text = f"the migration of pid {pid} to another CPU"
    if context.layout.member(mover, "task_struct", "migration_disabled"):
        text += ", which has migration disabled"
    return _Purpose(text, (Holder(mover, "exact"),))


@per_context
def _migrations(context: LockContext) -> dict[int, int]:
    """Maps each ``struct set_affinity_pending`` to the task that is to move."""
    addresses = context.tasks["address"].astype(np.uint64)
    members: Members = {"pending": ("migration_pending",)}
    found = read_structs(
        context.reader, "struct task_struct", members, addresses, context.losses
    )
    if not found.has("pending"):
        return {}
    rows = np.flatnonzero(found["pending"]).tolist()
    return {int(found["pending"][row]): int(addresses[row]) for row in rows}


def _hotplug(context: LockContext, address: int) -> _Purpose | None:
    """Return the hotplug thread that takes its CPU on- or offline (kernel/cpu.c)."""
    for cpu, state in _hotplug_states(context).items():
        if state <= address < state + _HOTPLUG_BYTES:
            try:
                size = context.layout.size("cpuhp_cpu_state")
                task = context.layout.member(state, "cpuhp_cpu_state", "thread")
            except (MissingError, *UNREADABLE):
                return None
            if address >= state + size or task < KERNEL_HALF:
                return None
            return _Purpose(f"hotplug of CPU {cpu}", (Holder(task, "exact"),))
    return None


def _callbacks(context: LockContext, address: int) -> _Purpose | None:
    """Return the threads that have to invoke the callbacks rcu_barrier() waits for."""
    try:
        found = awaited_callbacks(context, address)
    except MissingError:
        return None
    except UNREADABLE as error:
        context.losses.lose(Loss.COMPLETIONS, f"cannot read RCU's callbacks: {error}")
        return None
    return None if found is None else _Purpose(*found)


@per_context
def _hotplug_states(context: LockContext) -> dict[int, int]:
    """Maps each CPU to the address of its ``struct cpuhp_cpu_state``."""
    try:
        percpu = read_percpu(context.reader, context.losses)
        states = percpu.addresses("cpuhp_state").tolist()
    except LOST:
        return {}
    return dict(zip(percpu.cpus.tolist(), states, strict=True))


def _thread(context: LockContext, address: int) -> _Purpose | None:
    """Return the kernel thread that has to stop or to park."""
    for member, doing in (("exited", "stop"), ("parked", "park")):
        if not context.layout.has("kthread", member):
            continue
        kthread = address - context.layout.offset("kthread", member)
        task = kernel_threads(context).by_kthread.get(kthread)
        if task is not None:
            pid = context.pid(task)
            return _Purpose(f"thread {pid} to {doing}", (Holder(task, "exact"),))
    return None


def _child(context: LockContext, waiter: int, address: int) -> _Purpose | None:
    """Return the child of vfork() that has to call execve() or to exit."""
    child = vforked(context, waiter, lambda done: done == address)
    if child is None:
        return None
    pid = context.pid(child, leader=True)
    return _Purpose(f"child {pid} to exec", (Holder(child, "exact"),))


def vforked(
    context: LockContext, parent: int, is_awaited: Callable[[int], bool]
) -> int | None:
    """
    Find the child of vfork() that a task waits for.

    :param is_awaited: Returns whether the task waits for the completion at an address;
        it is called with each child's ``vfork_done``.
    :return: Address of the child's ``struct task_struct``; ``None`` if not found.
    :raises drgn.FaultError: if a child cannot be read
    """
    head = parent + context.layout.offset("task_struct", "children")
    sibling = context.layout.offset("task_struct", "sibling")
    most = FEW_READS if context.alone else _MAX_CHILDREN
    # The youngest child is the last.
    for node in context.layout.nodes(head, most, back=True):
        task = node - sibling
        if is_awaited(context.layout.member(task, "task_struct", "vfork_done")):
            return task
    return None


def _work(context: LockContext, waiter: int, address: int) -> _Purpose | None:
    """Return the work item that flush_work() or the like waits for with a barrier."""
    if not context.layout.has("wq_barrier", "done"):
        return None
    barrier = address - context.layout.offset("wq_barrier", "done")
    if context.layout.member(barrier, "wq_barrier", "task") != waiter:
        return None
    work = workqueues(context).behind(barrier)
    if work is None:
        return None
    if work.worker is None:
        return _not_begun(_named(work), work.delay)
    pid = context.pid(work.worker)
    return _Purpose(
        f"work {_named(work)} of thread {pid}", (Holder(work.worker, "exact"),)
    )


def _not_begun(name: str, delay: Delay | None) -> _Purpose:
    """Return the purpose of a completion for a work item that no worker has begun."""
    if delay is None:
        return _Purpose(f"work {name}, not begun")
    return _Purpose(f"work {name}, not begun: {delay.text}", delay.holders)


def _workqueue(context: LockContext, waiter: int, address: int) -> _Purpose | None:
    """Return the workqueue that flush_workqueue() waits for, and its busy workers."""
    if not context.layout.has("wq_flusher", "done"):
        return None
    flusher = address - context.layout.offset("wq_flusher", "done")
    flushed = workqueues(context).flushed.get(flusher)
    if flushed is None:
        return None
    workers = workqueues(context).workers(flushed)
    holders = tuple(Holder(worker, "exact") for worker in workers)
    return _Purpose(f"workqueue {flushed.name}", holders)


def _named(work: Work) -> str:
    return work.function or _UNNAMED


def _thread_work(context: LockContext, waiter: int, address: int) -> _Purpose | None:
    """Return the thread of the kthread_worker that kthread_flush_work() or the like
    waits for."""
    if not context.layout.has("kthread_flush_work", "done"):
        return None
    flush = address - context.layout.offset("kthread_flush_work", "done")
    flush_function = context.layout.symbol("kthread_flush_work_fn")
    function = context.layout.member(flush, "kthread_flush_work", "work.func")
    if flush_function is None or function != flush_function:
        return None
    worker = context.layout.member(flush, "kthread_flush_work", "work.worker")
    task = context.layout.member(worker, "kthread_worker", "task")
    if task not in kernel_threads(context).by_kthread.values():
        return None
    return _Purpose(f"work of thread {context.pid(task)}", (Holder(task, "exact"),))


def _creation(context: LockContext, waiter: int, address: int) -> _Purpose | None:
    """Return kthreadd if a task waits until it has created a kernel thread."""
    maker = kernel_threads(context).maker
    requests = context.layout.symbol("kthread_create_list")
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
        if unsigned(data, done, 8) == address:
            return _Purpose(what, (Holder(maker, "exact"),))
    if kernel_threads(context).is_making(
        address, MAX_CANDIDATES, wait_queues(context).stack_bytes
    ):
        return _Purpose(what, (Holder(maker, "likely"),))
    return None


COMPLETION = LockType(
    names=frozenset({"completion"}),
    requests=at_most_one(request),
    queue=queue,
    holders=holders,
    what=what,
)
