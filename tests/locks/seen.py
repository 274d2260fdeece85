# SPDX-License-Identifier: LGPL-2.1-or-later

"""The tasks of a dump, the locks they wait for, and the guest's record of them."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from drgn import Program

from fixtures import lab
from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.context import BlockedTask, LockContext, read_cases
from msatools.locks.report import Request, WaitTarget
from msatools.locks.struct_reader import Layout
from msatools.locks.wait_targets import Explainer
from msatools.tasks.sampler import collect_now
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.unwind import stack_bytes
from msatools.tasks.waits import TaskClass
from tests.support.dumps import open_dump

STOCK = ("locks-6.1", "locks-6.12")
MODULE = ("lockmodule-6.1", "lockmodule-6.12")
SPINNING = ("lockspin-6.1", "lockspin-6.12")
TASKS = ("tasks-6.1", "tasks-6.12")

Truth = dict[str, Any]
"""The guest's record of a task or a lock."""

Asked = Callable[[LockContext, BlockedTask], Request | None]


class Seen:
    """Some or all tasks of a dump."""

    def __init__(self, run: lab.Run, reader: Reader, table: TaskTable) -> None:
        aside = LossLog()
        self.run, self.reader, self.table = run, reader, table
        self.prog = reader.prog
        self.clocks = read_clocks(reader, aside)
        self.collector = StackCollector(reader, aside)
        self.now = collect_now(self.collector, self.prog, table, self.clocks)
        self.losses = LossLog()
        """Losses after the tasks themselves were read."""

    def again(self) -> "Seen":
        """Read all tasks again."""
        return look_at(self.prog, self.run.name)

    def only(self, tid: int) -> "Seen":
        """Read one thread only: no others are in the table of tasks."""
        address = int(self.table["address"][self.rows[tid]])
        one = TaskReader(self.reader).read([address], LossLog())
        return Seen(self.run, self.reader, one)

    # --- the guest's record

    @cached_property
    def rows(self) -> dict[int, int]:
        return {tid: row for row, tid in enumerate(self.table["pid"].tolist())}

    @property
    def named(self) -> dict[str, Truth]:
        tasks: dict[str, Truth] = self.run.workload["tasks"]
        return tasks

    def tid(self, name: str) -> int:
        return int(self.named[name]["tid"])

    def row(self, name: str) -> int:
        return self.rows[self.tid(name)]

    def address(self, name: str) -> int:
        return int(self.table["address"][self.row(name)])

    def waits(self, *kinds: str) -> dict[str, Truth]:
        """Return the named tasks that wait for certain kinds of objects."""
        return {
            name: task
            for name, task in self.named.items()
            if (task["on"] or {}).get("kind") in kinds
        }

    def is_as_said(self, name: str) -> bool:
        """Return whether a task is in its recorded class, as a steady task must be."""
        task, row = self.named[name], self.row(name)
        same = bool(self.now.classes[row] == TaskClass[task["class"]])
        assert same or not task["steady"], name
        return same

    def locks(self, *types: str) -> list[Truth]:
        """Return the recorded locks of some types, or all."""
        locks: list[Truth] = self.run.workload["locks"]
        return [lock for lock in locks if not types or lock["type"] in types]

    # --- results

    @cached_property
    def _explained(self) -> tuple[list[WaitTarget | None], int]:
        before = self.reader.reads
        ons = Explainer(self.reader).explain(
            self.table, self.now, self.clocks, self.losses
        )
        return ons, self.reader.reads - before

    @property
    def ons(self) -> list[WaitTarget | None]:
        """The wait target of each task."""
        return self._explained[0]

    @property
    def reads(self) -> int:
        """Number of reads that the wait targets took."""
        return self._explained[1]

    def on(self, name: str) -> WaitTarget:
        found = self.ons[self.row(name)]
        assert found is not None, name
        return found

    def context(self, alone: bool | None = None) -> LockContext:
        """Return a context for these tasks, with its own losses."""
        alone = len(self.table) == 1 if alone is None else alone
        layout = Layout(self.reader)
        return LockContext(layout, self.table, LossLog(), self.clocks, alone=alone)

    def cases(
        self, context: LockContext, rows: Iterable[int] | None = None
    ) -> Iterator[BlockedTask]:
        """Read the blocked tasks of some rows, or all."""
        wanted = range(len(self.table)) if rows is None else rows
        size = stack_bytes(self.prog)
        return read_cases(context, self.now, np.array(list(wanted), np.intp), size)

    def case(self, of: str | int, context: LockContext | None = None) -> BlockedTask:
        """Read a blocked task, by its name or thread ID."""
        row = self.row(of) if isinstance(of, str) else self.rows[of]
        (case,) = self.cases(context or self.context(), [row])
        return case

    def requests(self, context: LockContext, asked: Asked) -> dict[int, Request]:
        """Return the request of each task that has one, by thread ID."""
        tids = self.table["pid"].tolist()
        found = ((tids[case.row], asked(context, case)) for case in self.cases(context))
        return {tid: request for tid, request in found if request is not None}

    def pids(self, tasks: Iterable[int]) -> list[int]:
        return [self._by_address[task] for task in tasks]

    @cached_property
    def _by_address(self) -> dict[int, int]:
        addresses, pids = self.table["address"].tolist(), self.table["pid"].tolist()
        return dict(zip(addresses, pids, strict=True))


def look_at(prog: Program, name: str) -> Seen:
    """Read all tasks of a dump."""
    reader = Reader(prog)
    return Seen(lab.build(name), reader, TaskReader(reader).read_all(LossLog()))


@lru_cache(maxsize=4)
def seen(name: str, types: str = "btf") -> Seen:
    """Read a dump; the last ones are cached."""
    return look_at(open_dump(name, types), name)


def damaged(name: str) -> Seen:
    """Read a dump that the test can damage."""
    return look_at(open_dump(name, "btf"), name)
