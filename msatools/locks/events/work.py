# SPDX-License-Identifier: LGPL-2.1-or-later

"""Work that tasks wait for, and the threads that do it (kernel/workqueue.c)."""

import struct
from dataclasses import dataclass
from functools import cached_property

import drgn

from msatools.kernel.report import LossLog
from msatools.kernel.strings import decode_string
from msatools.kernel.walks import list_records
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.struct_reader import Layout
from msatools.locks.events.kthreads import KernelThreads, kernel_threads
from msatools.target.addresses import KERNEL_HALF, START_KERNEL_MAP
from msatools.tasks.text import KernelText

_WORD = struct.Struct("<Q")
_INT = struct.Struct("<I")

_MAX_WORK = 1 << 16
"""On one list."""

_NAME_BYTES = 32
"""``WQ_NAME_LEN``, which was 24 before 2024."""


@dataclass(frozen=True)
class Work:
    """The work that a barrier is behind."""

    function: str | None
    """The name of the function that it is."""

    worker: int | None
    """The ``struct task_struct`` that does it, or has taken it to do; ``None`` if
    nobody has."""


@dataclass(frozen=True)
class Flushed:
    """A workqueue that is flushed."""

    address: int
    name: str

    color: int
    """Of the work that has to be done first (``flush_color``)."""


class Workqueues:
    """The workqueues, read once for each context."""

    def __init__(
        self, layout: Layout, kthreads: KernelThreads, losses: LossLog
    ) -> None:
        self._layout = layout
        self._kthreads = kthreads
        self._losses = losses

    def behind(self, barrier: int) -> Work | None:
        """
        Return the work that a ``struct wq_barrier`` is behind.

        It is on the list of the worker that does that work, right after it; or on the
        list of all that is to be done, after it, as long as no worker has come to it.

        :return: ``None`` if there is no such barrier, or it is on no list.
        :raises drgn.FaultError: if it cannot be read
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
        before = self._before(node, function)
        worker = head - layout.offset("worker", "scheduled")
        task = self._task_of(worker)
        if before is None and task is not None:
            before = layout.member(worker, "worker", "current_func")
        return Work(None if before is None else self._text.name(before), task)

    def _head(self, node: int) -> int | None:
        """Find the head of a list of work: the one node that is no work."""
        at = self._layout.word(node)
        for _ in range(_MAX_WORK):
            if at == node or at < KERNEL_HALF:
                return None
            if not self._is_work(at):
                return at
            at = self._layout.word(at)
        return None

    def _before(self, node: int, barriers: int) -> int | None:
        """Find the function of the nearest work before a barrier, if there is any."""
        entry = self._layout.offset("work_struct", "entry")
        at = self._layout.word(node + 8)
        for _ in range(_MAX_WORK):
            if at == node or not self._is_work(at):
                return None
            function = self._function(at - entry)
            if function != barriers:
                return function
            at = self._layout.word(at + 8)
        return None

    def _is_work(self, node: int) -> bool:
        """Return whether an address is work; a list's head has no function after it."""
        entry = self._layout.offset("work_struct", "entry")
        return node >= KERNEL_HALF and self._function(node - entry) >= START_KERNEL_MAP

    def _function(self, work: int) -> int:
        return self._layout.member(work, "work_struct", "func")

    def _task_of(self, worker: int) -> int | None:
        """Return the thread of a ``struct worker``; ``None`` if that is none."""
        try:
            task = self._layout.member(worker, "worker", "task")
            if task >= KERNEL_HALF and self._kthreads.data_of(task) == worker:
                return task
        except drgn.FaultError:
            pass
        return None

    @cached_property
    def _text(self) -> KernelText:
        return KernelText(self._layout.reader, self._losses)

    @cached_property
    def flushed(self) -> dict[int, Flushed]:
        """Those that tasks flush, by the ``struct wq_flusher`` on a task's stack."""
        head = self._layout.symbol("workqueues")
        if head is None or not self._layout.has("wq_flusher", "done"):
            return {}
        at, wq = self._layout.offset, "workqueue_struct"
        node, name, color = at(wq, "list"), at(wq, "name"), at(wq, "flush_color")
        first = at(wq, "first_flusher")
        later = (at(wq, "flusher_queue"), at(wq, "flusher_overflow"))
        size = max(node, name, color, first, *later) + _NAME_BYTES
        found: dict[int, Flushed] = {}
        for address, data in list_records(
            self._layout.reader, head, node, size, self._losses, "workqueues"
        ):
            (flusher,) = _WORD.unpack_from(data, first)
            if not flusher:
                continue
            (waits_for,) = _INT.unpack_from(data, color)
            text = decode_string(data[name : name + _NAME_BYTES])
            queue = Flushed(address, text, waits_for)
            found[flusher] = queue
            for place in later:
                found |= dict.fromkeys(self._flushers(address + place), queue)
        return found

    def _flushers(self, head: int) -> list[int]:
        node = self._layout.offset("wq_flusher", "list")
        records = list_records(
            self._layout.reader, head, node, node + 16, self._losses, "flushers"
        )
        return [address for address, _ in records]

    def workers(self, queue: Flushed) -> list[int]:
        """
        Find the threads at work that has to be done before a flush can end.

        :return: Addresses of ``struct task_struct``.
        """
        # "workqueue: Assign a color to barrier work items" (in v5.15): before, a
        # worker did not keep the color of what it does.
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
            owner, part, work = layout.members(worker, "worker", *names)
            if owner != task or min(part, work) < KERNEL_HALF:
                return False
            color = layout.member(worker, "worker", "current_color")
            of = layout.member(part, "pool_workqueue", "wq")
        except drgn.FaultError:
            # It is no worker: the thread's data is another thing.
            return False
        return of == queue.address and color == queue.color


@per_context
def workqueues(context: LockContext) -> Workqueues:
    """Return the reader of the workqueues of a context."""
    return Workqueues(context.layout, kernel_threads(context), context.losses)
