# SPDX-License-Identifier: LGPL-2.1-or-later

"""What each sleeping task waits on.

By what its stack tells it waits for, the arguments of its system call, and what it has
left on its stack. What none of them tells exactly is not told.
"""

from collections.abc import Callable, Sequence

import drgn
import numpy as np

from msatools.kernel.clocks import Clocks
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.base.blocked_tasks import BlockedTask, read_cases
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.model import Herd, WaitTarget
from msatools.locks.base.struct_reader import Layout
from msatools.locks.user import filelocks
from msatools.locks.user.wakers import with_frames
from msatools.locks.wait_targets import data, files, futexes, kernellocks, others
from msatools.locks.wait_targets.conditions import as_conditions
from msatools.tasks.classes import TaskClass, are_any
from msatools.tasks.stackmemory import Rows, stack_bytes
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState

_BY_CLASS: dict[TaskClass, Callable[[LockContext, BlockedTask], WaitTarget | None]] = {
    TaskClass.LCK: futexes.futex,
    TaskClass.KLK: kernellocks.kernel_lock,
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


def explain(
    reader: Reader,
    tasks: TaskTable,
    now: TaskState,
    clocks: Clocks,
    findings: LossLog,
    *,
    rows: Rows | None = None,
) -> list[WaitTarget | None]:
    """
    Tell what tasks wait on.

    For a single row it looks at little more than the task: other waiters are counted
    only if they are few.

    :param tasks: What *now* was collected from.
    :param rows: Whose; all if not given.
    :return: One for each row; ``None`` for who does not wait, or if nothing tells.
    """
    return Explainer(reader).explain(tasks, now, clocks, findings, rows=rows)


class Explainer:
    """Tells what tasks of one kernel wait on; what it learns of types it keeps."""

    def __init__(self, reader: Reader) -> None:
        self._layout = Layout(reader)
        self._stack_bytes = stack_bytes(reader.prog)

    def explain(
        self,
        tasks: TaskTable,
        now: TaskState,
        clocks: Clocks,
        findings: LossLog,
        *,
        rows: Rows | None = None,
    ) -> list[WaitTarget | None]:
        """Tell what tasks wait on: see :func:`explain`."""
        chosen = np.arange(len(tasks)) if rows is None else rows
        look = LockContext(
            self._layout, tasks, findings, clocks, alone=len(chosen) == 1
        )
        found: list[WaitTarget | None] = [None] * len(chosen)
        alike: dict[WaitTarget | None, WaitTarget | None] = {}
        waits = are_any(now.classes[chosen], [*_BY_CLASS])
        asleep = np.flatnonzero(waits)
        cases = read_cases(look, now, chosen[asleep], self._stack_bytes)
        for place, case in zip(asleep.tolist(), cases, strict=True):
            on = tell(look, case)
            # Crowds wait on one thing: it takes room once.
            found[place] = alike.setdefault(on, on)
        return found

    def leaving(
        self,
        tasks: TaskTable,
        now: TaskState,
        clocks: Clocks,
        rows: Rows,
    ) -> list[WaitTarget | None]:
        """
        Tell which futexes threads have waited on that do not run yet.

        They have been woken, or are about to sleep: their system call has not ended.
        What cannot be read is not told.
        """
        look = LockContext(self._layout, tasks, LossLog(), clocks, alone=False)
        return leaving(look, now, rows, self._stack_bytes)

    def as_conditions(
        self,
        tasks: TaskTable,
        clocks: Clocks,
        ons: Sequence[WaitTarget | None],
        least: int,
    ) -> list[WaitTarget | None]:
        """Put condition variables in place of futexes that at least some wait on.

        What cannot be read is not told.
        """
        look = LockContext(self._layout, tasks, LossLog(), clocks, alone=False)
        return as_conditions(look, ons, least)

    def with_frames(
        self, tasks: TaskTable, clocks: Clocks, herds: Sequence[Herd]
    ) -> tuple[Herd, ...]:
        """
        Tell where the wakers of herds stand: see :mod:`msatools.locks.user.wakers`.

        What cannot be read is not told.
        """
        look = LockContext(self._layout, tasks, LossLog(), clocks, alone=False)
        return with_frames(herds, look, self._stack_bytes)


def awake_rows(tasks: TaskTable, now: TaskState) -> Rows:
    """Find the threads that want a CPU and have none, of processes."""
    awake = are_any(now.classes, (TaskClass.LAT, TaskClass.WAK))
    return np.flatnonzero(awake & (tasks["mm"] != 0))


def leaving(
    look: LockContext, now: TaskState, rows: Rows, stack_bytes: int
) -> list[WaitTarget | None]:
    """Tell which futex each of some threads that do not run is about to leave."""
    cases = read_cases(look, now, rows, stack_bytes)
    return [futexes.asked_for(case) for case in cases]


def tell(look: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Tell what one task waits on; what cannot be read costs a note."""
    by_class = _BY_CLASS.get(case.task_class)
    try:
        return by_class(look, case) if by_class else None
    except drgn.FaultError as error:
        look.findings.lose(Loss.WAITS, f"what a task waits on is lost: {error}")
    except LookupError as error:
        look.findings.note(
            "waits-unknown",
            f"what tasks of class {case.task_class.name} wait on is not told: {error}",
            case.task_class.name,
        )
    return None
