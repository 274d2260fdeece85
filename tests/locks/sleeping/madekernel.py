# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels of which there is nothing but tasks, their stacks and locks, all of bytes."""

from collections.abc import Mapping, Sequence

import numpy as np
from drgn import Type

from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.ownstack import OwnStack
from msatools.locks.sleeping.kernellocks import KernelLocks
from msatools.tasks.classes import TaskClass
from msatools.tasks.table import TaskTable
from tests.locks.madememory import BASE, MadeMemory

LOCK, OTHER_LOCK = BASE + 0x108, BASE + 0x208
TASKS = [BASE + 0x1000 + 0x100 * number for number in range(8)]
STACKS = [BASE + 0x4000 + 0x400 * number for number in range(8)]
STACK_BYTES = 0x400
WAITER_AT = 0x200
"""Of each waiter on its stack."""

WAITERS = [stack + WAITER_AT for stack in STACKS]
PID, TASK_BYTES = 8, 0x80


class MadeKernel(MadeMemory):
    """Tasks with stacks, which wait for locks."""

    def __init__(self) -> None:
        super().__init__()
        self.atomic = self.struct("atomic", 8, counter=(self.word, 0))
        self.columns: dict[str, Sequence[int]] = {}
        self.add_task_type()
        for number, task in enumerate(TASKS):
            self.write_half(task + PID, 100 + number)

    def add_task_type(self, **members: tuple[Type, int]) -> None:
        pid = {"pid": (self.half, PID), "tgid": (self.half, PID + 4)}
        self.struct("task_struct", TASK_BYTES, **pid, **members)

    def locks(self) -> KernelLocks:
        return KernelLocks(self.layout, self.losses)

    def stack(self, number: int) -> OwnStack:
        """What a task has on its stack."""
        start = STACKS[number] - BASE
        words = np.frombuffer(bytes(self.memory[start : start + STACK_BYTES]), "<u8")
        return OwnStack(self.layout, TASKS[number], STACKS[number], words)

    def context(self) -> LockContext:
        """Look at the tasks, with what their records say in ``columns``."""
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
        """Make a task's case, with the functions on its stack."""
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
    """Give a column of the table of tasks, 0 for those that are not named."""
    return [values.get(number, 0) for number in range(len(TASKS))]
