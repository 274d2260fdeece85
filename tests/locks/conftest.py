# SPDX-License-Identifier: LGPL-2.1-or-later

"""What all tasks of a dump are said to wait on."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from drgn import Program

from fixtures import lab
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.locks.model import On
from msatools.locks.on.explain import explain
from msatools.tasks.now import Now, collect_now
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader, TaskTable
from tests.support.dumps import open_dump


@dataclass
class Seen:
    run: lab.Run
    reader: Reader
    collector: StackCollector
    table: TaskTable
    clocks: Clocks
    now: Now
    ons: list[On | None]
    findings: Findings
    """Of what tasks wait on alone."""

    reads: int
    """That it took to tell."""

    @cached_property
    def rows(self) -> dict[int, int]:
        return {tid: row for row, tid in enumerate(self.table["pid"].tolist())}

    def row(self, name: str) -> int:
        return self.rows[self.run.workload["tasks"][name]["tid"]]

    def named(self) -> dict[str, dict[str, Any]]:
        tasks: dict[str, dict[str, Any]] = self.run.workload["tasks"]
        return tasks

    def alone(self, row: int) -> tuple[On | None, int, Findings]:
        """Look at one task only; also what it took, in reads."""
        findings = Findings()
        address = int(self.table["address"][row])
        one = TaskReader(self.reader).read([address], findings)
        now = collect_now(self.collector, self.reader.prog, one, self.clocks)
        before = self.reader.reads
        (on,) = explain(self.reader, one, now, self.clocks, findings)
        return on, self.reader.reads - before, findings


def look_at(prog: Program, name: str) -> Seen:
    reader, aside, findings = Reader(prog), Findings(), Findings()
    table = TaskReader(reader).read_all(aside)
    clocks = read_clocks(reader, aside)
    collector = StackCollector(reader, aside)
    now = collect_now(collector, prog, table, clocks)
    before = reader.reads
    ons = explain(reader, table, now, clocks, findings)
    reads = reader.reads - before
    run = lab.build(name)
    return Seen(run, reader, collector, table, clocks, now, ons, findings, reads)


@lru_cache(maxsize=2)
def seen(name: str, types: str = "btf") -> Seen:
    """Look at a dump; the last ones are kept for the next test."""
    return look_at(open_dump(name, types), name)


def rows_of(seen: Seen, tids: list[int]) -> np.ndarray[Any, np.dtype[np.intp]]:
    return np.array([seen.rows[tid] for tid in tids])
