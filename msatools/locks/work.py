# SPDX-License-Identifier: LGPL-2.1-or-later

"""Work items that tasks wait for: the workers on them, or why they have not begun."""

from collections.abc import Iterator
from functools import cached_property

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.percpu import online_cpus, read_percpu
from msatools.kernel.reader import U32, U64, decode_string, unsigned
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.walks import list_records
from msatools.locks.context import LockContext, per_context
from msatools.locks.places import MAX_OBJECT, Slabs
from msatools.locks.report import Holder, OwnerConfidence
from msatools.locks.struct_reader import Layout
from msatools.locks.workers import (
    NAME_BYTES,
    Delay,
    KernelThreads,
    WorkDelays,
    Worker,
    WorkItem,
    WorkPools,
    kernel_threads,
    work_delays,
    work_pools,
)
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_variable
from msatools.tasks.table import PF_WQ_WORKER

# --- Describes the work item that a task executes, if it is a worker.


def current_work(context: LockContext, row: int) -> str | None:
    """Return the work item that a task executes, as ``FUNCTION of WORKQUEUE``.

    :return: ``None`` if the task is no worker, is idle, or that cannot be read.
    """
    if not int(context.tasks["flags"][row]) & PF_WQ_WORKER:
        return None
    try:
        worker = _worker(context, int(context.tasks["address"][row]))
        if worker is None or not worker.work:
            return None
        return name_of_work(work_pools(context), worker)
    except MissingError:
        return None
    except UNREADABLE as error:
        context.losses.lose(
            Loss.WORKQUEUES, f"cannot determine what a worker does: {error}"
        )
        return None


def _worker(context: LockContext, task: int) -> Worker | None:
    address = kernel_threads(context).data_of(task) or 0
    if address < KERNEL_HALF:
        return None
    worker = work_pools(context).worker(address)
    return worker if worker.task == task else None


def name_of_work(pools: WorkPools, worker: Worker) -> str:
    """Return the work item of a worker, as ``FUNCTION of WORKQUEUE``.

    :raises drgn.FaultError: if its workqueue cannot be read
    """
    function = pools.function(worker.function) or "of unknown name"
    return f"{function} of {pools.queue(pools.part(worker.pwq).queue).name}"


# --- Work items that tasks wait for, and their workers (kernel/workqueue.c).


_MAX_WORK = 1 << 16
"""Maximum number of work items on one list."""


class Work(Struct, frozen=True):
    """The work item that a barrier waits for."""

    function: str | None
    """Name of its function; ``None`` if unknown."""

    worker: int | None
    """Address of the ``struct task_struct`` of the worker that executes it or has taken
    it; ``None`` if there is no such worker."""

    delay: Delay | None = None
    """Why it has not begun, if known."""


class Flushed(Struct, frozen=True):
    """A workqueue that is being flushed."""

    address: int
    name: str

    color: int
    """Color of the work items that the flush waits for (``flush_color``)."""


class WorkFlushes:
    """The flushes of work items and workqueues, read once per context."""

    def __init__(
        self,
        layout: Layout,
        kthreads: KernelThreads,
        losses: LossLog,
        pools: WorkPools,
        delays: WorkDelays,
    ) -> None:
        self._layout = layout
        self._kthreads = kthreads
        self._losses = losses
        self._pools = pools
        self._delays = delays

    def behind(self, barrier: int) -> Work | None:
        """
        Return the work item that a ``struct wq_barrier`` waits for.

        The barrier follows that work item: on ``worker.scheduled`` of the worker that
        executes it, or, while no worker has taken it, on the worklist of the pool.

        :return: ``None`` if there is no such barrier, or it is on no list.
        :raises drgn.FaultError: if the barrier cannot be read
        """
        layout = self._layout
        function = layout.symbol("wq_barrier_func")
        start = barrier + layout.offset("wq_barrier", "work")
        if function is None or self._function(start) != function:
            return None
        node = start + layout.offset("work_struct", "entry")
        head = self._head(node)
        if head is None:
            return None
        before = self._item_before(node, function)
        flushed = None if before is None else before.function
        worker = head - layout.offset("worker", "scheduled")
        task = self._task_of(worker)
        if task is None:
            delay = self._delay(before or self._pools.item(start))
        elif flushed is None:
            flushed = layout.member(worker, "worker", "current_func")
        name = None if flushed is None else self._pools.function(flushed)
        return Work(name, task, delay if task is None else None)

    def _delay(self, item: WorkItem) -> Delay | None:
        try:
            return self._delays.of_item(item)
        except MissingError:
            # Without symbols of data, as on Debian's cloud kernel of arm64.
            return None
        except UNREADABLE as error:
            text = f"cannot determine why work has not begun: {error}"
            self._losses.lose(Loss.WORKQUEUES, text)
            return None

    def _head(self, node: int) -> int | None:
        """Find the list head of a list of work items: the node that is no work item."""
        for following in self._layout.nodes(node, _MAX_WORK):
            if not self._is_work(following):
                return following if following >= KERNEL_HALF else None
        return None

    def _item_before(self, node: int, barrier_function: int) -> WorkItem | None:
        """Return the nearest work item before a barrier.

        :return: ``None`` if there are only barriers before it.
        """
        entry = self._layout.offset("work_struct", "entry")
        for previous in self._layout.nodes(node, _MAX_WORK, back=True):
            if not self._is_work(previous):
                return None
            item = self._pools.item(previous - entry)
            if item.function != barrier_function:
                return item
        return None

    def _is_work(self, node: int) -> bool:
        """Return whether a node is that of a work item: it has a function."""
        entry = self._layout.offset("work_struct", "entry")
        start = self._layout.code_start
        return node >= KERNEL_HALF and self._function(node - entry) >= start

    def _function(self, work: int) -> int:
        return self._layout.member(work, "work_struct", "func")

    def _task_of(self, worker: int) -> int | None:
        """Return the task of a ``struct worker``; ``None`` if the address is none."""
        try:
            task = self._layout.member(worker, "worker", "task")
            if task >= KERNEL_HALF and self._kthreads.data_of(task) == worker:
                return task
        except UNREADABLE:
            pass
        return None

    @cached_property
    def flushed(self) -> dict[int, Flushed]:
        """Maps addresses of ``struct wq_flusher``, on tasks' stacks, to workqueues."""
        head = self._layout.symbol("workqueues")
        if head is None or not self._layout.has("wq_flusher", "done"):
            return {}
        offset, wq = self._layout.offset, "workqueue_struct"
        node, name = offset(wq, "list"), offset(wq, "name")
        color, first = offset(wq, "flush_color"), offset(wq, "first_flusher")
        lists = (offset(wq, "flusher_queue"), offset(wq, "flusher_overflow"))
        size = max(node, name, color, first, *lists) + NAME_BYTES
        by_flusher: dict[int, Flushed] = {}
        for address, data in list_records(
            self._layout.reader, head, node, size, self._losses, "workqueues"
        ):
            (flusher,) = U64.unpack_from(data, first)
            if not flusher:
                continue
            (flush_color,) = U32.unpack_from(data, color)
            text = decode_string(data[name : name + NAME_BYTES])
            queue = Flushed(address, text, flush_color)
            by_flusher[flusher] = queue
            for head_offset in lists:
                flushers = self._flushers(address + head_offset)
                by_flusher |= dict.fromkeys(flushers, queue)
        return by_flusher

    def _flushers(self, head: int) -> list[int]:
        node = self._layout.offset("wq_flusher", "list")
        records = list_records(
            self._layout.reader, head, node, node + 16, self._losses, "flushers"
        )
        return [address for address, _ in records]

    def workers(self, queue: Flushed) -> list[int]:
        """
        Find the workers that execute work items which a flush waits for.

        :return: Addresses of their ``struct task_struct``.
        """
        # "workqueue: Assign a color to barrier work items" (in v5.15): before, a
        # worker did not store the color of its work item.
        if not self._layout.has("worker", "current_color"):
            return []
        tasks = self._kthreads.by_kthread.values()
        return [task for task in tasks if self._works_for(task, queue)]

    def _works_for(self, task: int, queue: Flushed) -> bool:
        names = ("task", "current_pwq", "current_work")
        layout = self._layout
        try:
            worker = self._kthreads.data_of(task) or 0
            if worker < KERNEL_HALF:
                return False
            owner, pwq, work = layout.members(worker, "worker", *names)
            if owner != task or min(pwq, work) < KERNEL_HALF:
                return False
            color = layout.member(worker, "worker", "current_color")
            workqueue = layout.member(pwq, "pool_workqueue", "wq")
        except UNREADABLE:
            # The argument of this thread is not a struct worker.
            return False
        return workqueue == queue.address and color == queue.color


@per_context
def workqueues(context: LockContext) -> WorkFlushes:
    """Return the reader of the flushes of work items and workqueues of a context."""
    return WorkFlushes(
        context.layout,
        kernel_threads(context),
        context.losses,
        work_pools(context),
        work_delays(context),
    )


# --- Finds delayed work whose timer is on an offline CPU, where it never fires.
#
# kernel/time/timer.c: the timers of a CPU that goes offline move to another one, but
# queue_delayed_work_on() may add one later.


_MAX_TIMERS = 1 << 12
"""Maximum number of timers of one offline CPU: there are hardly any."""


class DelayedWork(Struct, frozen=True):
    """A ``struct delayed_work`` whose timer is pending."""

    cpu: int
    work: int
    """Address of its work item."""

    function: int
    queue: int
    expires: int
    """Jiffies at which its timer is to fire."""


def read_offline_work(layout: Layout, losses: LossLog) -> list[DelayedWork]:
    """Return the delayed work of offline CPUs.

    :raises MissingError: if the types or variables are unknown
    """
    reader = layout.reader
    percpu = read_percpu(reader, losses)
    online = frozenset(online_cpus(reader, losses))
    if not online or online.issuperset(percpu.cpus.tolist()):
        return []
    variable = find_variable(reader.prog, "timer_bases")
    size = layout.size("timer_base")
    # An array with one base or more for each CPU.
    count = max(1, drgn.sizeof(variable.type_) // size)
    found: list[DelayedWork] = []
    starts = percpu.addresses("timer_bases").tolist()
    for cpu, start in zip(percpu.cpus.tolist(), starts, strict=True):
        if cpu in online:
            continue
        for base in range(start, start + count * size, size):
            try:
                found += _of_base(layout, cpu, base)
            except UNREADABLE as error:
                losses.lose(
                    Loss.WORKQUEUES, f"cannot read timers of CPU {cpu}: {error}"
                )
    return found


def _of_base(layout: Layout, cpu: int, base: int) -> Iterator[DelayedWork]:
    function = layout.symbol("delayed_work_timer_fn")
    start = layout.offset("timer_base", "vectors")
    heads = layout.reader.words(base + start, (layout.size("timer_base") - start) // 8)
    left = _MAX_TIMERS
    for timer in heads[heads >= np.uint64(KERNEL_HALF)].tolist():
        while timer >= KERNEL_HALF and left:
            left -= 1
            called, expires, following = layout.members(
                timer, "timer_list", "function", "expires", "entry.next"
            )
            if called == function:
                yield _delayed(layout, cpu, timer, expires)
            timer = following


def _delayed(layout: Layout, cpu: int, timer: int, expires: int) -> DelayedWork:
    start = timer - layout.offset("delayed_work", "timer")
    size = layout.size("delayed_work")
    data = layout.reader.read(start, size)
    return DelayedWork(
        cpu=cpu,
        work=start + layout.offset("delayed_work", "work"),
        function=unsigned(data, layout.offset("delayed_work", "work.func"), 8),
        queue=unsigned(data, layout.offset("delayed_work", "wq"), 8),
        expires=expires,
    )


# --- Finds the work item that is to complete a completion beside it.
#
# A driver often has both in one structure, on the waiter's stack or in a slab object.


_ON_STACK = 512
"""Maximum distance on a stack, in bytes."""


class BesideWork(Struct, frozen=True):
    """A work item beside a completion."""

    function: int
    confidence: OwnerConfidence
    """``likely`` on the waiter's stack, ``evidence`` in the same slab object."""

    worker: int | None = None
    """Address of the ``struct task_struct`` of the worker that executes it."""

    delay: Delay | None = None
    """Why it has not begun, if no worker executes it."""


class WorkBeside:
    """Finds work items by address; reads all queued and executed ones once."""

    def __init__(
        self, layout: Layout, pools: WorkPools, delays: WorkDelays, losses: LossLog
    ) -> None:
        self._layout = layout
        self._pools = pools
        self._delays = delays
        self._losses = losses
        self._slabs = Slabs(layout)

    def find(self, address: int, stack: tuple[int, int] | None) -> BesideWork | None:
        """
        Return the only work item in the structure of a completion.

        :param address: Address of the completion.
        :param stack: Bounds of the waiter's stack, if the completion is on it.
        :return: ``None`` if there is none, or several.
        :raises drgn.FaultError: if a structure that leads to it cannot be read
        :raises MissingError: if the types are unknown
        """
        confidence: OwnerConfidence
        if stack is not None:
            low, high = address - _ON_STACK, address + _ON_STACK
            bounds = max(low, stack[0]), min(high, stack[1])
            confidence = "likely"
        else:
            found = self._slabs.find(address)
            if found is None or found.size > MAX_OBJECT:
                return None
            bounds, confidence = (found.start, found.end), "evidence"
        near = [work for work in self._known if bounds[0] <= work < bounds[1]]
        if len(near) != 1:
            return None
        return self._explain(self._known[near[0]], confidence)

    def _explain(
        self, work: Worker | WorkItem | DelayedWork, confidence: OwnerConfidence
    ) -> BesideWork:
        if isinstance(work, Worker):
            return BesideWork(work.function, confidence, worker=work.task)
        if isinstance(work, DelayedWork):
            text = f"its timer is on CPU {work.cpu}, which is offline"
            return BesideWork(work.function, confidence, delay=Delay(text))
        delay = self._delays.of_item(work)
        if delay is not None:
            holders = (Holder(each.task, confidence) for each in delay.holders)
            delay = Delay(delay.text, tuple(holders))
        return BesideWork(work.function, confidence, delay=delay)

    @cached_property
    def _known(self) -> dict[int, Worker | WorkItem | DelayedWork]:
        """Maps a work item's address to its worker if executed, or to its record."""
        known: dict[int, Worker | WorkItem | DelayedWork] = {}
        for work in self._offline():
            known[work.work] = work
        pools = self._pools
        for pool in pools.pools.values():
            known |= {item.address: item for item in self._plain(pools.pending(pool))}
            for worker in pools.workers(pool):
                if worker.work:
                    known[worker.work] = worker
        for queue in pools.queues:
            for part in pools.parts(queue):
                items = self._plain(pools.inactive(part))
                known |= {item.address: item for item in items}
        return known

    def _plain(self, items: list[WorkItem]) -> Iterator[WorkItem]:
        """Yield the work items that are not barriers."""
        for item in items:
            if item.function != self._pools.barrier_function:
                yield item

    def _offline(self) -> list[DelayedWork]:
        try:
            return read_offline_work(self._layout, self._losses)
        except LOST as error:
            self._losses.lose(Loss.WORKQUEUES, f"cannot read delayed work: {error}")
            return []


@per_context
def work_beside(context: LockContext) -> WorkBeside:
    """Return the finder of work items beside completions of a context."""
    pools, delays = work_pools(context), work_delays(context)
    return WorkBeside(context.layout, pools, delays, context.losses)


# --- Finds the workers that write back the inodes of a backing device.
#
# fs/fs-writeback.c: sync and others queue a request, queue the work item of the device,
# wb_workfn(), and wait on bdi->wb_waitq. A device has one such work item, and one more
# for each control group with pages of the device.


class Writeback(Struct, frozen=True):
    """The writeback of a backing device."""

    name: str
    """Name of the device, as ``254:0``."""

    workers: tuple[int, ...]
    """Addresses of the ``struct task_struct`` of the workers that write."""

    delay: Delay | None
    """Why the work has not begun, if no worker writes and it is queued."""


def writeback(context: LockContext, head: int) -> Iterator[Holder]:
    """
    Yield the workers that a waiter on a queue of a backing device waits for.

    All are ``likely``: they may write back pages of another control group.

    :param head: Address of a ``struct wait_queue_head``.
    """
    found = _find(context, head)
    if found is None:
        return
    for worker in found.workers:
        yield Holder(worker, "likely")
    if not found.workers and found.delay is not None:
        for holder in found.delay.holders:
            yield Holder(holder.task, "likely")


def writeback_text(context: LockContext, head: int) -> str | None:
    """Describe the writeback that a waiter on a queue waits for.

    :return: ``None`` if the queue is of something else.
    """
    found = _find(context, head)
    if found is None:
        return None
    text = f"writeback of {found.name}"
    if found.workers or found.delay is None:
        return text
    return f"{text}, not begun: {found.delay.text}"


@per_context
def _known(context: LockContext) -> dict[int, Writeback | None]:
    """Maps the address of a wait queue to its writeback; ``None`` if it has none."""
    return {}


def _find(context: LockContext, head: int) -> Writeback | None:
    known = _known(context)
    if head not in known:
        try:
            known[head] = _read(context, head)
        except MissingError:
            known[head] = None
        except UNREADABLE as error:
            context.losses.lose(Loss.WORKQUEUES, f"cannot read writeback: {error}")
            known[head] = None
    return known[head]


def _read(context: LockContext, head: int) -> Writeback | None:
    layout, name = context.layout, "backing_dev_info"
    device = head - layout.offset(name, "wb_waitq")
    try:
        owner = layout.member(device, name, "wb.bdi")
    except UNREADABLE:
        return None
    if owner != device:
        return None
    # "bdi: add a ->dev_name field to struct backing_dev_info" (in v5.7)
    text = layout.text(device, name, "dev_name")
    workers = tuple(_workers(context, device))
    delay = None if workers else _delay(context, device)
    return Writeback(text, workers, delay)


def _workers(context: LockContext, device: int) -> Iterator[int]:
    """Yield the tasks of the workers that write back inodes of a device."""
    layout, pools = context.layout, work_pools(context)
    function = layout.symbol("wb_workfn")
    offset = layout.offset("bdi_writeback", "dwork.work")
    for pool in pools.pools.values():
        for worker in pools.workers(pool):
            if not worker.work or worker.function != function:
                continue
            owner = layout.member(worker.work - offset, "bdi_writeback", "bdi")
            if owner == device:
                yield worker.task


def _delay(context: LockContext, device: int) -> Delay | None:
    """Explain why the device's own work item has not begun, if it is queued."""
    layout = context.layout
    work = device + layout.offset("backing_dev_info", "wb.dwork.work")
    item = work_pools(context).item(work)
    if layout.word(work + layout.offset("work_struct", "entry")) < KERNEL_HALF:
        return None
    return work_delays(context).of_item(item)
