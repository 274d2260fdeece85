# SPDX-License-Identifier: LGPL-2.1-or-later

"""Microstates of all threads in the lab's dumps of tasks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
from drgn import Object, Program

from fixtures import lab
from msatools.kernel.clocks import (
    Accounting,
    Clocks,
    Nanoseconds,
    read_accounting,
    read_clocks,
)
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans
from msatools.prstat.states import Breakdown, Sleeps, breakdown, sleeps
from msatools.tasks.accounting import (
    PF_KTHREAD,
    Delays,
    Microstates,
    bound_of,
    microstates,
    read_delays,
    waits_for_cpu,
    without_sleep,
)
from msatools.tasks.sampler import TaskState, collect_now
from msatools.tasks.stacks import StackCollector
from msatools.tasks.states import read_in_iowait
from msatools.tasks.table import TaskReader, TaskTable
from tests.support.dumps import open_dump

OFF = ("tasks-6.1", "tasks-6.12")
ON = ("tasks-on-6.1", "tasks-on-6.12")
MIDWAY = ("tasks-midway-6.1", "tasks-midway-6.12")
ALL = (*OFF, *ON, *MIDWAY)


def long(*names: str) -> list[Any]:
    """Return dumps as test parameters for `make test-long`."""
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
    """Microstates as counted by the kernel, with sleep that counts as latency."""

    lives: Microstates
    parts: Breakdown
    losses: LossLog

    started_boottime_ns: Nanoseconds
    """Start times as shown in /proc."""

    wait_sum_ns: Nanoseconds
    """Time that schedstats count as waiting for a CPU."""

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
        """Whether threads can sleep on the run queue (6.12)."""
        return self.table.has("sched_delayed")

    @property
    def delayed_ns(self) -> Nanoseconds:
        """Time that each thread slept on the run queue, by schedstats.

        Only schedstats count it as waiting for a CPU. A negative value is sleep that
        other counters count so, because the thread was migrated.
        """
        return self.wait_sum_ns - self.table["run_delay_ns"].astype(np.int64)

    @property
    def stopped(self) -> Booleans:
        """Threads that are or were stopped or traced."""
        return self.named("stopped", "stopped-thread", "traced", "has-stopped")

    def still(self) -> Iterator[tuple[int, str]]:
        """Yield threads that last ran before the guest read their files.

        Threads woken since are left out. Each item is a row and a directory in /proc.
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
    """Read a value that the table does not have from each task_struct."""
    tasks = (
        Object(prog, "struct task_struct", address=address)
        for address in table["address"].tolist()
    )
    return np.array([read(task).value_() for task in tasks], np.int64)


@cache
def read_dump(name: str) -> Dump:
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
