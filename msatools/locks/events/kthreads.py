# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernel threads, by their ``struct kthread`` (kernel/kthread.c)."""

from functools import cached_property

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_records
from msatools.kernel.words import unsigned
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

_KTHREAD = ("worker_private", "set_child_tid")
"""Members that point at the ``struct kthread``: "kthread: Generalize pf_io_worker so it
can point to struct kthread" (in v5.17)."""


class KernelThreads:
    """The threads that kthreadd created."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses

    @cached_property
    def maker(self) -> int | None:
        """The task of kthreadd, which creates all others; ``None`` if unknown."""
        variable = self._layout.symbol("kthreadd_task")
        try:
            task = self._layout.word(variable) if variable else 0
        except UNREADABLE as error:
            self._losses.lose(Loss.KERNEL_THREADS, f"cannot read kthreadd: {error}")
            return None
        return task if task >= KERNEL_HALF else None

    @cached_property
    def by_kthread(self) -> dict[int, int]:
        """Maps the address of a ``struct kthread`` to its task."""
        if self.maker is None:
            return {}
        offset = self._layout.offset
        sibling = offset("task_struct", "sibling")
        kthread = offset("task_struct", *_KTHREAD)
        size = max(sibling, kthread) + 8
        head = self.maker + offset("task_struct", "children")
        children = list_records(
            self._layout.reader, head, sibling, size, self._losses, "kernel threads"
        )
        tasks = {unsigned(data, kthread, 8): task for task, data in children}
        tasks.pop(0, None)
        return tasks

    def data_of(self, task: int) -> int | None:
        """Return the argument of the main function of a kernel thread.

        :return: ``None`` if the task is no kernel thread.
        :raises drgn.FaultError: if the task cannot be read
        """
        kthread = self._layout.member(task, "task_struct", *_KTHREAD)
        # The members of a process have another meaning: look among kernel threads.
        if self.by_kthread.get(kthread) != task:
            return None
        return self._layout.member(kthread, "kthread", "data")

    def is_making(self, completion: int, limit: int, stack_bytes: int) -> bool:
        """
        Return whether kthreadd handles a request: its stack has a pointer to that.

        :param completion: Address of the completion of the request.
        :param limit: Maximum number of pointers to try.
        :param stack_bytes: Bytes of a kernel stack.
        """
        if self.maker is None:
            return False
        try:
            stack = self._layout.member(self.maker, "task_struct", "stack")
            pointer = self._layout.member(self.maker, "task_struct", "thread.sp")
            used = stack + stack_bytes - pointer
            if not 0 < used <= stack_bytes:
                return False
            words = self._layout.reader.words(pointer, used // 8)
        except UNREADABLE:
            return False
        for request in self._layout.data_pointers(words)[:limit]:
            try:
                done = self._layout.member(request, "kthread_create_info", "done")
            except UNREADABLE:
                continue
            if done == completion:
                return True
        return False


@per_context
def kernel_threads(context: LockContext) -> KernelThreads:
    """Return the reader of the kernel threads of a context."""
    return KernelThreads(context.layout, context.losses)
