# SPDX-License-Identifier: LGPL-2.1-or-later

"""Work items that tasks wait for, and their workers (kernel/workqueue.c)."""

from functools import cached_property

from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.strings import decode_string
from msatools.kernel.walks import list_records
from msatools.kernel.words import U32, U64
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.struct_reader import Layout
from msatools.locks.events.kthreads import KernelThreads, kernel_threads
from msatools.locks.workqueues.delays import Delay, WorkDelays, work_delays
from msatools.locks.workqueues.pools import WorkItem, WorkPools, work_pools
from msatools.target.addresses import KERNEL_HALF

_MAX_WORK = 1 << 16
"""Maximum number of work items on one list."""

_NAME_BYTES = 32
"""``WQ_NAME_LEN``, which was 24 before 2024."""


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
        following = self._layout.word(node)
        for _ in range(_MAX_WORK):
            if following == node or following < KERNEL_HALF:
                return None
            if not self._is_work(following):
                return following
            following = self._layout.word(following)
        return None

    def _item_before(self, node: int, barrier_function: int) -> WorkItem | None:
        """Return the nearest work item before a barrier.

        :return: ``None`` if there are only barriers before it.
        """
        entry = self._layout.offset("work_struct", "entry")
        previous = self._layout.word(node + 8)
        for _ in range(_MAX_WORK):
            if previous == node or not self._is_work(previous):
                return None
            item = self._pools.item(previous - entry)
            if item.function != barrier_function:
                return item
            previous = self._layout.word(previous + 8)
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
        """Maps each ``struct wq_flusher``, on a task's stack, to its workqueue."""
        head = self._layout.symbol("workqueues")
        if head is None or not self._layout.has("wq_flusher", "done"):
            return {}
        offset, wq = self._layout.offset, "workqueue_struct"
        node, name = offset(wq, "list"), offset(wq, "name")
        color, first = offset(wq, "flush_color"), offset(wq, "first_flusher")
        lists = (offset(wq, "flusher_queue"), offset(wq, "flusher_overflow"))
        size = max(node, name, color, first, *lists) + _NAME_BYTES
        by_flusher: dict[int, Flushed] = {}
        for address, data in list_records(
            self._layout.reader, head, node, size, self._losses, "workqueues"
        ):
            (flusher,) = U64.unpack_from(data, first)
            if not flusher:
                continue
            (flush_color,) = U32.unpack_from(data, color)
            text = decode_string(data[name : name + _NAME_BYTES])
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
    """Return the reader of the workqueues of a context."""
    return WorkFlushes(
        context.layout,
        kernel_threads(context),
        context.losses,
        work_pools(context),
        work_delays(context),
    )
