# SPDX-License-Identifier: LGPL-2.1-or-later

"""The tasks of a dump that do not run, and their stacks: ours, and drgn's."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from drgn import Object, Program
from drgn.helpers.linux.pid import for_each_task

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.tasks.stacks import StackCollector, Stacks
from tests.support.dumps import open_dump

USER_SPACE = 1 << 63


@dataclass
class Tasks:
    """The tasks of one dump that do not run, as what collects stacks wants them."""

    name: str
    prog: Program
    objects: list[Object]
    tasks: Addresses
    stacks: Addresses
    pointers: Addresses


def tasks_of(name: str, types: str) -> Tasks:
    prog = open_dump(name, types)
    objects = [task for task in for_each_task(prog) if not task.on_cpu]
    columns = [
        np.array(values, np.uint64)
        for values in (
            [task.value_() for task in objects],
            [task.stack.value_() for task in objects],
            [task.thread.sp.value_() for task in objects],
        )
    ]
    return Tasks(name, prog, objects, *columns)


@cache
def known(name: str, types: str) -> Tasks:
    """The same, read once: they are to be left as they are."""
    return tasks_of(name, types)


def collect(tasks: Tasks, losses: LossLog | None = None) -> Stacks:
    collector = StackCollector(Reader(tasks.prog), losses or LossLog())
    return collector.collect(tasks.tasks, tasks.stacks, tasks.pointers)


def by_drgn(task: Object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """
    Unwind one stack, without inlined calls and user mode.

    :return: The pc of each frame, and which frames an exception left.
    """
    addresses: list[int] = []
    interrupted = []
    for frame in task.prog_.stack_trace(task):
        if frame.pc < USER_SPACE:
            break
        if not frame.is_inline:
            if frame.interrupted:
                interrupted.append(len(addresses))
            addresses.append(frame.pc)
    return tuple(addresses), tuple(interrupted)
