# SPDX-License-Identifier: LGPL-2.1-or-later

"""The lives of all threads in one of the lab's dumps of tasks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
from drgn import Object, Program

from fixtures import lab
from msatools.kernel.accounting import Accounting, read_accounting
from msatools.kernel.clocks import Clocks, Nanoseconds, read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans
from msatools.prstat.breakdown import Breakdown, Sleeps, breakdown, sleeps
from msatools.tasks.delays import Delays, read_delays
from msatools.tasks.iowait import read_in_iowait
from msatools.tasks.microstates import (
    PF_KTHREAD,
    Microstates,
    bound_of,
    microstates,
    waits_for_cpu,
    without_sleep,
)
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.task_state import TaskState, collect_now
from tests.support.dumps import open_dump

OFF = ("tasks-6.1", "tasks-6.12")
ON = ("tasks-on-6.1", "tasks-on-6.12")
MIDWAY = ("tasks-midway-6.1", "tasks-midway-6.12")
ALL = (*OFF, *ON, *MIDWAY)


def long(*names: str) -> list[Any]:
    """Give dumps as parameters of tests that run with them in `make test-long`."""
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


@dataclass
class Dump:
    run: lab.Run
    table: TaskTable
    clocks: Clocks
    accounting: Accounting
    now: TaskState
    in_iowait: Booleans
    delays: Delays
    slept: Sleeps
    as_kept: Microstates
    """As the kernel keeps them, with sleep that counts as latency."""

    lives: Microstates
    parts: Breakdown
    losses: LossLog

    started_boottime_ns: Nanoseconds
    """What /proc tells as the start."""

    wait_sum_ns: Nanoseconds
    """What the statistics count as waiting for a CPU."""

    @property
    def bound_ns(self) -> int:
        return bound_of(self.accounting)

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        named: dict[str, dict[str, Any]] = self.run.workload["tasks"]
        return named

    def row(self, name: str) -> int:
        return self.rows[self.tasks[name]["tid"]]

    @cached_property
    def rows(self) -> dict[int, int]:
        return {tid: row for row, tid in enumerate(self.table["pid"].tolist())}

    def named(self, *names: str) -> Booleans:
        mask = np.zeros(len(self.table), np.bool_)
        mask[[self.row(name) for name in names]] = True
        return mask

    @property
    def kernels_own(self) -> Booleans:
        own: Booleans = (self.table["flags"] & PF_KTHREAD) != 0
        return own

    @property
    def cpu_ns(self) -> Nanoseconds:
        return self.lives.user_ns + self.lives.system_ns

    @property
    def delays_dequeue(self) -> bool:
        """Whether threads may sleep on the run queue (6.12)."""
        return self.table.has("sched_delayed")

    @property
    def delayed_ns(self) -> Nanoseconds:
        """How long each thread slept on the run queue, by the kernel's statistics.

        They alone count that as waiting for a CPU. Below zero, it is sleep that all
        but they count so, as the thread was moved.
        """
        return self.wait_sum_ns - self.table["run_delay_ns"].astype(np.int64)

    @property
    def stopped(self) -> Booleans:
        """Who is or was stopped or traced."""
        return self.named("stopped", "stopped-thread", "traced", "has-stopped")

    def still(self) -> Iterator[tuple[int, str]]:
        """Threads that last ran before the guest read what it says of them.

        Nor have they been woken up since. Rows, and where their files lie.
        """
        offset = self.clocks.monotonic_offset_ns
        assert offset is not None
        recorded_ns = self.run.workload["times"]["monotonic_ns"] + offset
        ran_ns = self.table["exec_start_ns"].astype(np.int64)
        woken = waits_for_cpu(self.table)
        for name in self.run.truth_names():
            if not name.endswith("/schedstat") or "/task/" not in name:
                continue
            row = self.rows.get(int(name.split("/")[3]))
            if row is None or woken[row]:
                continue
            if 0 < ran_ns[row] < recorded_ns - self.bound_ns:
                yield row, name.rpartition("/")[0]


def by_drgn(
    prog: Program, table: TaskTable, read: Callable[[Object], Object]
) -> Nanoseconds:
    """Read what the table does not have from each ``struct task_struct``."""
    tasks = (
        Object(prog, "struct task_struct", address=address)
        for address in table["address"].tolist()
    )
    return np.array([read(task).value_() for task in tasks], np.int64)


@cache
def look(name: str) -> Dump:
    prog = open_dump(name, "btf")
    reader, losses = Reader(prog), LossLog()
    table = TaskReader(reader).read_all(losses)
    clocks = read_clocks(reader, losses)
    accounting = read_accounting(prog, losses)
    now = collect_now(StackCollector(reader, losses), prog, table, clocks)
    in_iowait = read_in_iowait(reader, table, losses)
    delays = read_delays(reader, table, losses)
    slept = sleeps(table, accounting, now, in_iowait)
    as_kept = microstates(table, clocks, bound_of(accounting))
    lives = without_sleep(as_kept, slept.total_ns)
    parts = breakdown(table, clocks, lives, slept, delays, accounting)
    return Dump(
        run=lab.build(name),
        table=table,
        clocks=clocks,
        accounting=accounting,
        now=now,
        in_iowait=in_iowait,
        delays=delays,
        slept=slept,
        as_kept=as_kept,
        lives=lives,
        parts=parts,
        losses=losses,
        started_boottime_ns=by_drgn(prog, table, lambda task: task.start_boottime),
        wait_sum_ns=by_drgn(prog, table, lambda task: task.stats.wait_sum),
    )
