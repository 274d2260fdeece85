# SPDX-License-Identifier: LGPL-2.1-or-later

"""All tasks of each kernel's dump, with debug info and without."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from drgn import Object, Program
from drgn.helpers.linux.pid import for_each_task

from fixtures import lab
from msatools.kernel.reader import Addresses
from msatools.target import TargetSpec, open_target

IDLE = ("memory-5.10", "memory-6.1", "memory-6.12", "crash-6.1", "crash-6.12")
"""Where nothing happens: threads sleep, kernel threads wait for work."""

BUSY = ("tasks-6.1", "tasks-6.12")
"""Where tasks of every class are."""

TYPES = ("btf", "dwarf")


@dataclass
class Tasks:
    """The tasks of one dump that do not run, as what collects stacks wants them."""

    name: str
    prog: Program
    objects: list[Object]
    tasks: Addresses
    stacks: Addresses
    pointers: Addresses


def open_dump(name: str, types: str) -> Program:
    run = lab.build(name)
    path = str(run.dump("elf" if run.elf else "vmcore"))
    vmlinux = str(run.vmlinux) if types == "dwarf" else None
    spec = TargetSpec(path=path, types=types, vmlinux=vmlinux)
    return open_target(spec).prog


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


def pairs(names: Iterable[str]) -> Iterator[object]:
    for name, types in product(names, TYPES):
        yield pytest.param((name, types), id=f"{name}-{types}")


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
