# SPDX-License-Identifier: LGPL-2.1-or-later

"""Threads are grouped by stack, with stacks made by hand."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from msatools.prstat.model import StackGroup
from msatools.prstat.prstat import stack_groups
from msatools.tasks.sampler import TaskState
from msatools.tasks.stacks import NO_STACK, Stack, Stacks
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import TaskClass

NAMES = {1: "schedule", 2: "io_schedule", 3: "wait.part.0", 4: "commit", 5: "entry"}
MODULES = {4: "jbd2"}
LCK, DSK = TaskClass.LCK, TaskClass.DSK


class Text:
    def module_name(self, address: int) -> str | None:
        return MODULES.get(address)

    def name(self, address: int) -> str | None:
        return NAMES.get(address)


@dataclass
class Thread:
    pid: int
    stack: int
    age_ns: int = 0
    task_class: TaskClass = DSK
    comm: bytes = b"cat"
    wanted: bool = True


STACKS = [
    NO_STACK,
    # Return addresses are after the call.
    *(
        Stack(tuple(start + 1 for start in starts))
        for starts in ((1, 2, 5), (1, 4, 5), (1, 3))
    ),
    Stack((2, 100)),
]


def groups(*threads: Thread, **filters: list[str]) -> tuple[StackGroup, ...]:
    records = np.zeros(len(threads), [("pid", "i4"), ("comm", "S16")])
    records["pid"] = [thread.pid for thread in threads]
    records["comm"] = [thread.comm for thread in threads]
    text: Any = Text()
    index = np.array([thread.stack for thread in threads], np.int32)
    now = TaskState(
        classes=np.array([thread.task_class for thread in threads], np.uint8),
        age_ns=np.array([thread.age_ns for thread in threads], np.int64),
        age_bound=np.zeros(len(threads), np.uint8),
        stacks=Stacks(text, STACKS, index),
        waits=(),
    )
    wanted = np.array([thread.wanted for thread in threads], np.bool_)
    table = TaskTable(records, frozenset(("pid", "comm")))
    return stack_groups(table, now, wanted, **filters)


@pytest.mark.parametrize(
    ("filters", "pids"),
    [
        ({"functions": ["io_schedule"]}, [1]),
        ({"functions": ["io_schedule", "commit"]}, [1, 2]),
        # Parts of functions (.part, .cold) match the function's name as well.
        ({"functions": ["wait"]}, [3]),
        ({"functions": ["wait.part.0"]}, [3]),
        ({"functions": ["io"]}, []),
        ({"modules": ["jbd2"]}, [2]),
        ({"modules": ["ext4", "jbd2"]}, [2]),
        ({"modules": ["ext4"]}, []),
        ({"functions": ["io_schedule"], "modules": ["jbd2"]}, []),
        ({"functions": ["entry"], "modules": ["jbd2"]}, [2]),
    ],
)
def test_filters(filters: dict[str, list[str]], pids: list[int]) -> None:
    found = groups(Thread(1, 1), Thread(2, 2), Thread(3, 3), **filters)
    assert sorted(pid for group in found for pid in group.pids) == pids
