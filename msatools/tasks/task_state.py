# SPDX-License-Identifier: LGPL-2.1-or-later

"""Current class of each thread, and the time in it."""

from enum import IntEnum
from functools import cached_property

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.clocks import Clocks, Nanoseconds
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans
from msatools.kernel.traces import stack_trace
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass, are_any
from msatools.tasks.stackmemory import saved_registers
from msatools.tasks.stacks import StackCollector, Stacks
from msatools.tasks.states import FROZEN, STOPPED, TRACED, WAKING, asleep
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import StackWait, classify

INTERRUPTS = (
    *("asm_sysvec_", "asm_common_interrupt", "asm_exc_nmi", "asm_spurious"),
    *("el0t_64_irq", "el0t_64_fiq", "el0t_32_irq", "el0t_32_fiq", "el0_irq"),
)
"""Prefixes of the entry points of interrupts: arch/x86/include/asm/idtentry.h and, of
user mode, arch/arm64/kernel/entry.S."""


class AgeBound(IntEnum):
    """Accuracy of an age."""

    EXACT = 0
    UPPER = 1
    """An upper bound: it may include earlier states."""
    ESTIMATE = 2
    """By the clock of a CPU that may have lagged."""


class TaskState(Struct, frozen=True, dict=True):
    """One value a thread."""

    classes: npt.NDArray[np.uint8]
    """Members of :class:`TaskClass`."""

    age_ns: Nanoseconds
    """Time in the current class."""

    age_bound: npt.NDArray[np.uint8]
    """Members of :class:`AgeBound`."""

    stacks: Stacks
    """Stacks of the threads off the CPU; the others have none."""

    waits: tuple[StackWait, ...]
    """The wait of each unique stack, in the order of ``stacks.unique``."""

    @cached_property
    def slept_in(self) -> npt.NDArray[np.uint8]:
        """The class of each thread's sleep, also if it was woken but has not run."""
        by_stack = np.array([wait.task_class for wait in self.waits], np.uint8)
        return np.where(self.woken, by_stack[self.stacks.index], self.classes)

    @cached_property
    def woken(self) -> Booleans:
        """Whether each thread has been woken, and has not run since."""
        slept = np.array([not wait.preempted for wait in self.waits], np.bool_)
        awake = are_any(self.classes, (TaskClass.WAK, TaskClass.LAT))
        woken: Booleans = awake & slept[self.stacks.index]
        return woken


def collect_now(
    collector: StackCollector, prog: drgn.Program, tasks: TaskTable, clocks: Clocks
) -> TaskState:
    """Return the class of each thread, its age and its stack.

    :param collector: unwinds the stacks of this kernel
    """
    off = (tasks["on_cpu"] == 0) & (tasks["exit_state"] == 0)
    stacks = collector.collect(
        tasks["address"],
        np.where(off, tasks["stack"], 0).astype(np.uint64),
        saved_registers(tasks),
    )
    waits = tuple(classify(stacks.names(stack)) for stack in stacks.unique)
    by_stack = np.array([wait.task_class for wait in waits], np.uint8)
    classes = by_stack[stacks.index]
    classes[(tasks["state"] & TRACED) != 0] = TaskClass.TRC.value
    classes[(tasks["state"] & (STOPPED | FROZEN)) != 0] = TaskClass.STP.value
    classes[tasks["state"] == 0] = TaskClass.LAT.value
    classes[(tasks["state"] & WAKING) != 0] = TaskClass.WAK.value
    for row in np.flatnonzero(runs(tasks)).tolist():
        classes[row] = running_class(prog, int(tasks["address"][row]))
    classes[tasks["exit_state"] != 0] = TaskClass.ZMB.value
    age, bound = ages(tasks, clocks, classes)
    return TaskState(classes, age, bound, stacks, waits)


def runs(tasks: TaskTable) -> Booleans:
    """Return which threads are on a CPU."""
    found: Booleans = (tasks["on_cpu"] != 0) & (tasks["exit_state"] == 0)
    return found


def running_class(prog: drgn.Program, task: int) -> TaskClass:
    """Return the mode of a running thread, by the registers in a dump.

    :param task: address of the ``struct task_struct`` of a thread that runs
    :return: :attr:`TaskClass.CPU` on a live kernel, :attr:`TaskClass.OTH` if the dump
        lacks the registers.
    """
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return TaskClass.CPU
    frames = running_frames(prog, task)
    if not frames:
        return TaskClass.OTH
    if frames[0][0] < KERNEL_HALF:
        return TaskClass.USR
    kernel = [name for pc, name in frames if pc >= KERNEL_HALF]
    over_user = any(pc < KERNEL_HALF for pc, _ in frames)
    if over_user and kernel[-1].startswith(INTERRUPTS):
        return TaskClass.INT
    return TaskClass.SYS


def running_frames(
    prog: drgn.Program, task: int, losses: LossLog | None = None
) -> list[tuple[int, str]]:
    """Unwind the stack of a task that runs, by the registers in a dump.

    :param task: address of its ``struct task_struct``
    :param losses: As in :func:`.stack_trace`.
    :return: Addresses and functions, the innermost first; empty without registers, as
        on a live kernel.
    """
    trace = stack_trace(prog, task, losses) or ()
    return [(frame.pc, frame.name or "") for frame in trace if not frame.is_inline]


def ages(
    tasks: TaskTable, clocks: Clocks, classes: npt.NDArray[np.uint8]
) -> tuple[Nanoseconds, npt.NDArray[np.uint8]]:
    """Return each thread's time in its class, and the bound (:class:`AgeBound`).

    ``exec_start`` is the time at which a thread was last on the CPU (update_curr()), by
    the task clock of that CPU; it needs no kernel option.
    """
    now_task = clocks.task_clock_ns(tasks["cpu"])
    since = tasks["exec_start_ns"].astype(np.int64)
    arrival = tasks["last_arrival_ns"].astype(np.int64)
    age = now_task - since
    bound = np.full(len(since), AgeBound.EXACT.value, np.uint8)
    # Moving a delayed sleeper to another CPU clears exec_start (v6.12).
    lost = since == 0
    age[lost] = (clocks.local_ns - arrival)[lost]
    bound[lost] = AgeBound.UPPER.value
    on_cpu = runs(tasks)
    age[on_cpu] = (clocks.local_ns - arrival)[on_cpu]
    queued = tasks["last_queued_ns"].astype(np.int64)
    waits = (classes == TaskClass.LAT.value) & (queued != 0)
    age[waits] = (clocks.local_ns - queued)[waits]
    # last_queued of a delayed sleeper may be from before its sleep.
    delays = tasks.has("sched_delayed")
    bound[waits] = AgeBound.UPPER.value if delays else AgeBound.EXACT.value
    # The time of the wakeup is not recorded.
    bound[classes == TaskClass.WAK.value] = AgeBound.UPPER.value
    # sleep_start of a delayed sleeper is set only when it leaves the run queue.
    stamped = lost if delays else asleep(tasks)
    for column in ("sleep_start_ns", "block_start_ns"):
        if tasks.has(column):
            # Only with schedstats enabled; by the clock of the run queue.
            start = tasks[column].astype(np.int64)
            kept = (start != 0) & stamped & asleep(tasks)
            age[kept] = (clocks.local_ns - start)[kept]
            bound[kept] = AgeBound.EXACT.value
    bound[classes == TaskClass.ZMB.value] = AgeBound.ESTIMATE.value
    if clocks.monotonic_offset_ns is not None:
        # Clocks differ, and times in a damaged dump may have any value.
        started = tasks["start_ns"].astype(np.int64) + clocks.monotonic_offset_ns
        age = np.minimum(age, clocks.local_ns - started)
    return np.maximum(age, 0), bound
