# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the wait target of each sleeping task.

It is determined by the functions on the stack, the arguments of the system call, and
structures on the stack. Fields that cannot be determined exactly are ``None``.
"""

from collections.abc import Callable

import numpy as np

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.clocks import Clocks
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.base.blocked_tasks import BlockedTask, read_cases
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import WaitTarget
from msatools.locks.base.struct_reader import Layout
from msatools.locks.user import filelocks
from msatools.locks.wait_targets import data, files, locks, others
from msatools.tasks.classes import TaskClass, are_any
from msatools.tasks.stackmemory import Rows, stack_bytes
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState

_BY_CLASS: dict[TaskClass, Callable[[LockContext, BlockedTask], WaitTarget | None]] = {
    TaskClass.LCK: locks.futex,
    TaskClass.KLK: locks.kernel_lock,
    TaskClass.FLK: filelocks.file_lock,
    TaskClass.POL: files.poll,
    TaskClass.FLT: data.fault,
    TaskClass.SWP: data.fault,
    TaskClass.RCL: data.reclaim,
    TaskClass.DSK: data.disk,
    TaskClass.PIP: files.by_file,
    TaskClass.NET: files.by_file,
    TaskClass.TTY: files.by_file,
    TaskClass.TMR: others.timer,
    TaskClass.WAI: others.child,
    TaskClass.SIG: others.signal,
    TaskClass.IPC: others.message,
    TaskClass.URG: files.io_uring,
    TaskClass.STP: others.stopped,
    TaskClass.TRC: others.traced,
}


class Explainer:
    """Finds wait targets of tasks of one kernel; looks up types once."""

    def __init__(self, reader: Reader) -> None:
        self._layout = Layout(reader)
        self.stack_bytes = stack_bytes(reader.prog)

    def explain(
        self,
        tasks: TaskTable,
        now: TaskState,
        clocks: Clocks,
        losses: LossLog,
        *,
        rows: Rows | None = None,
    ) -> list[WaitTarget | None]:
        """
        Return the wait targets of tasks.

        For a single row, other waiters are counted only if there are few of them.

        :param tasks: The tasks from which *now* was collected.
        :param rows: Rows of the tasks; all if not given.
        :return: One target per row; ``None`` for a task that does not wait, or whose
            target is unknown.
        """
        chosen = np.arange(len(tasks)) if rows is None else rows
        context = LockContext(
            self._layout, tasks, losses, clocks, alone=len(chosen) == 1
        )
        found: list[WaitTarget | None] = [None] * len(chosen)
        alike: dict[WaitTarget | None, WaitTarget | None] = {}
        waits = are_any(now.classes[chosen], [*_BY_CLASS])
        asleep = np.flatnonzero(waits)
        cases = read_cases(context, now, chosen[asleep], self.stack_bytes)
        for index, case in zip(asleep.tolist(), cases, strict=True):
            on = wait_target(context, case)
            # Equal targets of many tasks are stored once.
            found[index] = alike.setdefault(on, on)
        return found

    def context(self, tasks: TaskTable, clocks: Clocks) -> LockContext:
        """Return a context of tasks whose losses are not reported."""
        return LockContext(self._layout, tasks, LossLog(), clocks, alone=False)


def awake_rows(tasks: TaskTable, now: TaskState) -> Rows:
    """Return the rows of threads of processes that wait for a CPU."""
    awake = are_any(now.classes, (TaskClass.LAT, TaskClass.WAK))
    return np.flatnonzero(awake & (tasks["mm"] != 0))


def leaving(
    context: LockContext, now: TaskState, rows: Rows, stack_bytes: int
) -> list[WaitTarget | None]:
    """
    Return the futexes that threads were waiting on, by their system calls.

    The threads were woken, or are about to sleep: the call has not returned.
    """
    cases = read_cases(context, now, rows, stack_bytes)
    return [locks.asked_for(case) for case in cases]


def wait_target(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the wait target of a task; log what cannot be read."""
    by_class = _BY_CLASS.get(case.task_class)
    try:
        return by_class(context, case) if by_class else None
    except UNREADABLE as error:
        context.losses.lose(
            Loss.WAITS, f"cannot determine what a task waits on: {error}"
        )
    except MissingError as error:
        context.losses.note(
            "waits-unknown",
            f"what tasks of class {case.task_class.name} wait on is unknown: {error}",
            case.task_class.name,
        )
    return None
