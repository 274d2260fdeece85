# SPDX-License-Identifier: LGPL-2.1-or-later

"""The preempt count of each CPU: include/linux/preempt.h."""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from msatools.errors import MissingError
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, Members, read_structs
from msatools.selfdesc.find import find_type, find_variable, offset_of

_PREEMPTION = 0xFF
_SOFTIRQ_SHIFT = 8
_HARDIRQ_SHIFTS = 16, 24
_COUNT = 0x7FFF_FFFF
"""Parts of the count: all but the bit of x86 that says whether a switch is due. The
count of interrupts is at the first of the shifts, or at the second where that of
disabled interrupts lies below it."""

_OF_TASK: Members = {
    "count": ("thread_info.preempt.count", "thread_info.preempt_count")
}


def preemption_count(count: int) -> int:
    """Return how often preemption was disabled."""
    return count & _PREEMPTION


def softirq_count(count: int) -> int:
    """Return how often softirqs were disabled, twice each, and 1 if one is served."""
    return count >> _SOFTIRQ_SHIFT & 0xFF


class PreemptCounts:
    """The preempt counts of one report."""

    def __init__(
        self,
        reader: Reader,
        percpu: PerCpu,
        tasks: Callable[[], Addresses],
        losses: LossLog,
    ) -> None:
        """
        :param tasks: Returns the task that each CPU runs.
        """
        self._reader = reader
        self._percpu = percpu
        self._tasks = tasks
        self._losses = losses

    @cached_property
    def by_cpu(self) -> dict[int, int]:
        """The count of each CPU of which it is known.

        "x86/percpu: Move preempt_count next to current_task" (in v6.2) put it into
        ``pcpu_hot``, up to "x86/preempt: Move preempt count to percpu hot section" (in
        v6.15). On arm64 it is part of the task.
        """
        prog = self._reader.prog
        try:
            offset = offset_of(find_type(prog, "struct pcpu_hot"), "preempt_count")
            addresses = self._percpu.addresses("pcpu_hot") + np.uint64(offset)
        except MissingError:
            try:
                addresses = self._percpu.addresses("__preempt_count")
            except MissingError:
                return self._of_tasks()
        records, readable = self._reader.read_records(addresses, 4)
        return self._known(column(records, 0, 4), readable)

    def _of_tasks(self) -> dict[int, int]:
        type_, tasks = "struct task_struct", self._tasks()
        read = read_structs(self._reader, type_, _OF_TASK, tasks, self._losses)
        return self._known(read["count"], read.readable) if read.has("count") else {}

    def _known(self, counts: Addresses, readable: Booleans) -> dict[int, int]:
        each = (self._percpu.cpus.tolist(), counts.tolist(), readable.tolist())
        return {
            cpu: int(count) & _COUNT
            for cpu, count, known in zip(*each, strict=True)
            if known
        }

    def in_interrupt(self, count: int) -> bool:
        """Return whether a CPU was in an interrupt other than an NMI.

        An NMI, by which a crashing kernel stops CPUs, counts as both.
        """
        if not count >> min(_HARDIRQ_SHIFTS):
            # Looking for a variable that is missing takes long.
            return False
        shift = self._reader.once("hardirq shift", self._find_hardirq_shift)
        return count >> shift & 0xF > count >> (shift + 4) & 0xF

    def _find_hardirq_shift(self) -> int:
        """Return where the preempt count has that of interrupts.

        Newer kernels (by 7.3) count there how often interrupts were disabled, too, and
        keep in a per-CPU variable whether they were on before.
        """
        before, after = _HARDIRQ_SHIFTS
        try:
            find_variable(self._reader.prog, "local_interrupt_disable_state")
        except MissingError:
            return before
        return after
