# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels made of tasks, their stacks, and locks."""

from collections.abc import Mapping, Sequence

import numpy as np
from drgn import Type

from msatools.locks.context import BlockedTask, LockContext
from msatools.locks.kernel_locks import KernelLocks
from msatools.locks.struct_reader import OwnStack
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import TaskClass
from tests.locks.madememory import BASE, MadeMemory

LOCK, OTHER_LOCK = BASE + 0x108, BASE + 0x208
TASKS = [BASE + 0x1000 + 0x100 * number for number in range(8)]
STACKS = [BASE + 0x4000 + 0x400 * number for number in range(8)]
STACK_BYTES = 0x400
WAITER_OFFSET = 0x200
"""Byte offset of the waiter from the stack base."""

WAITERS = [stack + WAITER_OFFSET for stack in STACKS]
PID, TASK_BYTES = 8, 0x80


class MadeKernel(MadeMemory):
    """A kernel with tasks and stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.atomic = self.struct("atomic", 8, counter=(self.u64, 0))
        self.columns: dict[str, Sequence[int]] = {}
        self.add_task_type()
        for number, task in enumerate(TASKS):
            self.write_u32(task + PID, 100 + number)

    def add_task_type(self, **members: tuple[Type, int]) -> None:
        pid = {"pid": (self.u32, PID), "tgid": (self.u32, PID + 4)}
        self.struct("task_struct", TASK_BYTES, **pid, **members)

    def locks(self) -> KernelLocks:
        return KernelLocks(self.layout, self.losses)

    def stack(self, number: int) -> OwnStack:
        """Return a task's stack."""
        start = STACKS[number] - BASE
        words = np.frombuffer(bytes(self.memory[start : start + STACK_BYTES]), "<u8")
        return OwnStack(self.layout, TASKS[number], STACKS[number], words)

    def context(self) -> LockContext:
        """Return a context for the tasks, with ``columns`` in their records."""
        names = ("address", "pid", "tgid", *self.columns)
        records = np.zeros(len(TASKS), [(name, "u8") for name in names])
        records["address"] = TASKS
        records["pid"] = records["tgid"] = 100 + np.arange(len(TASKS))
        for name, values in self.columns.items():
            records[name] = values
        context = LockContext.__new__(LockContext)
        context.layout, context.losses = self.layout, self.losses
        context.reader, context.limit, context.alone = (
            context.layout.reader,
            1000,
            False,
        )
        context.tasks = TaskTable(records, frozenset(names))
        context.made = {}
        return context

    def case(self, number: int, *names: str) -> BlockedTask:
        """Return a blocked task, with the functions on its stack."""
        return BlockedTask(
            row=number,
            address=TASKS[number],
            mm=0,
            task_class=TaskClass.KLK,
            names=("__schedule", "schedule", *names),
            call=None,
            arguments=[0] * 6,
            plain=False,
            stack=self.stack(number),
        )


def per_task(values: Mapping[int, int]) -> list[int]:
    """Return a column of the table of tasks, 0 where there is no value."""
    return [values.get(number, 0) for number in range(len(TASKS))]
