# SPDX-License-Identifier: LGPL-2.1-or-later

"""Dumps with dead tasks, and the guests' records of them."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

from drgn import Program

from fixtures import lab
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.unwind import Rows
from msatools.zombies.model import Verdict
from msatools.zombies.parents import (
    Dead,
    ParentFacts,
    Parents,
    read_ages,
    read_dead,
    read_parents,
    zombie_rows,
)
from msatools.zombies.verdicts import VERDICTS, verdicts
from tests.support.dumps import open_dump

Facts = dict[str, Any]


class Dump:
    """The tasks of a dump, and the dead among them."""

    def __init__(self, prog: Program, name: str) -> None:
        self.run = lab.build(name)
        self.prog = prog
        self.reader, self.losses = Reader(prog), LossLog()
        self.table = TaskReader(self.reader).read_all(self.losses)

    @cached_property
    def rows(self) -> Rows:
        """Rows of the dead in the table."""
        return zombie_rows(self.table)

    @cached_property
    def _look(self) -> tuple[Dead, Parents, tuple[int, int]]:
        _ = self.clocks  # read before counting reads
        start = self.reader.reads
        dead = self.read_dead(self.table, self.losses)
        middle = self.reader.reads
        parents = self.read_parents(self.table, dead, self.losses)
        return dead, parents, (middle - start, self.reader.reads - middle)

    def read_dead(self, table: TaskTable, losses: LossLog) -> Dead:
        """Read the dead tasks in a table."""
        aged = read_ages(table, self.clocks)
        return read_dead(self.reader, table, aged, losses)

    def read_parents(self, table: TaskTable, dead: Dead, losses: LossLog) -> Parents:
        aged = read_ages(table, self.clocks)
        return read_parents(self.reader, table, dead, aged, losses)

    def with_records(self, **columns: tuple[Any, Any]) -> TaskTable:
        """Return a copy of the table with values changed: column=(rows, values)."""
        records = self.table.records.copy()
        for column, (rows, values) in columns.items():
            records[column][rows] = values
        return TaskTable(records, self.table.columns)

    @cached_property
    def clocks(self) -> Clocks:
        return read_clocks(self.reader, self.losses)

    @property
    def dead(self) -> Dead:
        return self._look[0]

    @property
    def parents(self) -> Parents:
        return self._look[1]

    @property
    def reads(self) -> tuple[int, int]:
        """Number of reads for the dead tasks, and for their parents."""
        return self._look[2]

    @cached_property
    def verdicts(self) -> dict[int, Verdict]:
        """Verdicts by thread ID."""
        return verdicts_of(self.table, self.dead, self.parents)

    @property
    def pids(self) -> list[int]:
        """The thread IDs of the dead."""
        pids: list[int] = self.table["pid"][self.dead.row].tolist()
        return pids

    @property
    def workload(self) -> Facts:
        return self.run.workload

    @cached_property
    def recorded(self) -> dict[int, Facts]:
        """Thread ID -> the guest's record of a dead task."""
        return {one["pid"]: one for one in all_dead(self.run)}

    def index(self, name: str) -> int:
        """Return the index of a dead task by its name."""
        (pid,) = [pid for pid, one in self.recorded.items() if one["comm"] == name]
        return self.pids.index(pid)

    def row(self, pid: int) -> int:
        """Return a thread's row in the table."""
        row: int = self.table["pid"].tolist().index(pid)
        return row

    def address(self, pid: int) -> int:
        """Return the address of a thread's ``struct task_struct``."""
        return int(self.table["address"][self.row(pid)])

    def parent(self, name: str) -> ParentFacts:
        """Return a parent by its name."""
        (parent,) = [facts for facts in self.parents.facts if facts.comm == name]
        return parent

    def task(self, name: str) -> int:
        """Return the PID of a named task of the workload."""
        return int(self.workload["tasks"][name]["pid"])


def all_dead(run: lab.Run) -> list[Facts]:
    """Return the guest's records of dead processes and of dead, traced threads."""
    return [*run.workload["zombies"], *run.workload["zombie_threads"]]


def verdicts_of(table: TaskTable, dead: Dead, parents: Parents) -> dict[int, Verdict]:
    """Verdicts by thread ID."""
    pids = table["pid"][dead.row].tolist()
    found = verdicts(dead, parents).tolist()
    return {pid: VERDICTS[number] for pid, number in zip(pids, found, strict=True)}


@lru_cache(maxsize=4)
def read_dump(name: str, types: str = "btf") -> Dump:
    """Read the tasks of a dump; the last dumps are cached."""
    dump = Dump(open_dump(name, types), name)
    assert not dump.losses.notes
    return dump


def with_above(counts: Counter[str]) -> Iterator[tuple[str, int]]:
    """Yield each control group but the root, with its count including its children."""
    above: Counter[str] = Counter()
    for path, count in counts.items():
        parts = path.split("/")[1:]
        for depth in range(1, len(parts) + 1):
            above["/" + "/".join(parts[:depth])] += count
    above.pop("/", None)
    yield from above.items()
