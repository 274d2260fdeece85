# SPDX-License-Identifier: LGPL-2.1-or-later

"""The zombies of real dumps, and why they are there."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import pytest
from drgn import FaultError, Program

from fixtures import lab
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.tasks.table import TaskReader, TaskTable
from msatools.zombies.dead import Dead, read_ages, read_dead
from msatools.zombies.model import Verdict
from msatools.zombies.parents import Parents, read_parents
from msatools.zombies.verdicts import VERDICTS, verdicts
from tests.support.dumps import TYPES, open_dump
from tests.support.overlay import lay_over

Facts = dict[str, Any]


@dataclass
class Seen:
    """All of one dump."""

    run: lab.Run
    prog: Program
    reader: Reader
    table: TaskTable
    clocks: Clocks
    dead: Dead
    parents: Parents
    reads: tuple[int, int]
    """That the dead took, and their parents."""

    findings: Findings

    @cached_property
    def verdicts(self) -> dict[int, Verdict]:
        """By thread ID."""
        found = verdicts(self.dead, self.parents).tolist()
        return {
            pid: VERDICTS[number] for pid, number in zip(self.pids, found, strict=True)
        }

    @property
    def pids(self) -> list[int]:
        """The thread IDs of the dead."""
        pids: list[int] = self.table["pid"][self.dead.row].tolist()
        return pids

    @cached_property
    def told(self) -> dict[int, Facts]:
        """What the guest knew of its dead, by thread ID."""
        work = self.run.workload
        return {one["pid"]: one for one in work["zombies"] + work["zombie_threads"]}

    def place(self, name: str) -> int:
        """Find one of the dead by its name."""
        (pid,) = [pid for pid, one in self.told.items() if one["comm"] == name]
        return self.pids.index(pid)

    def address(self, pid: int) -> int:
        """Find a thread's ``struct task_struct``."""
        row = self.table["pid"].tolist().index(pid)
        return int(self.table["address"][row])

    def parent_pid(self, name: str) -> int:
        """Find a parent by its name."""
        (pid,) = [p["pid"] for p in self.run.workload["parents"] if p["comm"] == name]
        return int(pid)


def look_at(prog: Program, name: str) -> Seen:
    reader, findings = Reader(prog), Findings()
    table = TaskReader(reader).read_all(findings)
    clocks = read_clocks(reader, findings)
    start = reader.reads
    aged = read_ages(table, clocks)
    dead = read_dead(reader, table, aged, findings)
    middle = reader.reads
    parents = read_parents(reader, table, dead, aged, findings)
    reads = middle - start, reader.reads - middle
    run = lab.build(name)
    return Seen(run, prog, reader, table, clocks, dead, parents, reads, findings)


@lru_cache(maxsize=4)
def seen(name: str, types: str = "btf") -> Seen:
    """Look at a dump; the last ones are kept for the next test."""
    return look_at(open_dump(name, types), name)


def lose(prog: Program, address: int, size: int) -> None:
    """Make memory of a dump unreadable."""

    def fault(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError("gone", address)

    lay_over(prog, address, size, fault)


def put(prog: Program, address: int, data: bytes) -> None:
    """Have other data in memory of a dump."""

    def read(_: int, count: int, offset: int, physical: bool) -> bytes:
        return data[offset : offset + count]

    lay_over(prog, address, len(data), read)


KERNELS = ("6.1", "6.12")


@pytest.fixture(params=product(KERNELS, TYPES), ids="-".join)
def dump(request: pytest.FixtureRequest) -> Seen:
    """The zombies scenario, on each kernel, with debug info and without."""
    kernel, types = request.param
    return seen(f"zombies-{kernel}", types)


@pytest.fixture
def program() -> Program:
    """One dump opened anew, to be damaged."""
    return open_dump("zombies-6.12", "btf")
