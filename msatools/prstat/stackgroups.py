# SPDX-License-Identifier: LGPL-2.1-or-later

"""Groups sleeping threads by their kernel stacks, as mdb's ``::stacks``."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from msatools.prstat.model import StackGroup
from msatools.tasks.classes import TaskClass
from msatools.tasks.identity import comm_text
from msatools.tasks.runningstacks import (
    StackReader,
    frame_text,
    named_frames,
)
from msatools.tasks.stacks import Stack, Stacks
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState, runs


def stack_groups(
    tasks: TaskTable,
    now: TaskState,
    wanted: npt.NDArray[np.bool_],
    running: StackReader | None = None,
    *,
    functions: Iterable[str] = (),
    modules: Iterable[str] = (),
) -> tuple[StackGroup, ...]:
    """Group the wanted threads that have a stack, the largest group first.

    :param running: Reads the stacks of threads that run, in a dump; without it these
        have none.
    :param functions: If not empty, only stacks with one of these functions.
    :param modules: If not empty, only stacks with a function of one of these modules.
    """
    functions, modules = frozenset(functions), frozenset(modules)
    frames: dict[int, tuple[str, ...]] = {}
    groups: dict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(wanted & (now.stacks.index != 0)).tolist():
        index = int(now.stacks.index[row])
        if index not in frames:
            named = _frames(now.stacks, now.stacks.unique[index])
            keep = _has(named, functions, modules)
            frames[index] = tuple(map(frame_text, named)) if keep else ()
        if frames[index]:
            groups[frames[index], int(now.classes[row])].append(row)
    on_cpu = np.flatnonzero(wanted & runs(tasks)).tolist() if running else []
    for row in on_cpu:
        assert running is not None
        address = int(tasks["address"][row])
        stack = running.read(address) or running.at_last_switch(address)
        named = [] if stack is None else list(named_frames(stack, now.stacks.text))
        if named and _has(named, functions, modules):
            key = tuple(map(frame_text, named)), int(now.classes[row])
            groups[key].append(row)
    made = [
        StackGroup(
            frames=stack_frames,
            task_class=TaskClass(task_class).name,
            pids=tuple(tasks["pid"][rows].tolist()),
            min_age_ns=int(now.age_ns[rows].min()),
            max_age_ns=int(now.age_ns[rows].max()),
            ages_ns=tuple(now.age_ns[rows].tolist()),
            comms=tuple(map(comm_text, tasks["comm"][rows])),
        )
        for (stack_frames, task_class), rows in groups.items()
    ]
    return tuple(sorted(made, key=lambda group: (-len(group.pids), group.pids)))


def _frames(stacks: Stacks, stack: Stack) -> list[tuple[str, str | None]]:
    """Return the functions of a stack, with their modules if they are in one."""
    text = stacks.text
    return [
        (name, text.module_name(address))
        for name, address in zip(stacks.names(stack), stack.instructions(), strict=True)
    ]


def _has(
    frames: list[tuple[str, str | None]],
    functions: frozenset[str],
    modules: frozenset[str],
) -> bool:
    # Names may have suffixes of the compiler, as in do_exit.cold.
    names = {name.partition(".")[0] for name, _ in frames}
    names |= {name for name, _ in frames}
    return (not functions or bool(functions & names)) and (
        not modules or any(module in modules for _, module in frames)
    )
