# SPDX-License-Identifier: LGPL-2.1-or-later

"""All tasks of each kernel's dump, with debug info and without."""

from dataclasses import dataclass

import numpy as np
import pytest
from drgn import Object, Program
from drgn.helpers.linux.pid import for_each_task

from msatools.kernel.reader import Addresses
from tests.support.dumps import BUSY, IDLE, open_dump, pairs


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


@pytest.fixture(scope="session", params=pairs(IDLE + BUSY))
def tasks(request: pytest.FixtureRequest) -> Tasks:
    return tasks_of(*request.param)


@pytest.fixture(scope="session", params=pairs(IDLE))
def idle(request: pytest.FixtureRequest) -> Tasks:
    return tasks_of(*request.param)


@pytest.fixture(scope="session", params=pairs(BUSY))
def busy(request: pytest.FixtureRequest) -> Tasks:
    return tasks_of(*request.param)


@pytest.fixture(scope="session", params=IDLE + BUSY)
def tasks_btf(request: pytest.FixtureRequest) -> Tasks:
    return tasks_of(request.param, "btf")
