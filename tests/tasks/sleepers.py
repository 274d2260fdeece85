# SPDX-License-Identifier: LGPL-2.1-or-later

"""The sleeping tasks of a dump, and their stacks by msatools and by drgn."""

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
    """The sleeping tasks of one dump, as arguments of StackCollector.collect()."""

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
    """Return the sleeping tasks, cached: tests must not change them."""
    return tasks_of(name, types)


def collect(tasks: Tasks, losses: LossLog | None = None) -> Stacks:
    collector = StackCollector(Reader(tasks.prog), losses or LossLog())
    return collector.collect(tasks.tasks, tasks.stacks, tasks.pointers)


def by_drgn(task: Object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """
    Unwind one stack with drgn, without inlined calls and user mode.

    :return: The pc of each frame, and the indices of frames that were interrupted.
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
