# SPDX-License-Identifier: LGPL-2.1-or-later

"""Details of tasks on run queues."""

from collections.abc import Iterable

import drgn
import numpy as np

from msatools.cpus.model import RunnableTask, SchedClass
from msatools.errors import MissingError
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.selfdesc.find import find_symbol, find_type
from msatools.tasks.identity import comm_text
from msatools.tasks.standing import (
    DEADLINE,
    MAX_RT_PRIO,
    NICE_0,
    POLICIES,
    REALTIME,
    Throttles,
)
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.task_cgroups import read_cgroups

_QUEUED = 1
"""TASK_ON_RQ_QUEUED (kernel/sched/sched.h), not TASK_ON_RQ_MIGRATING."""

_CLASSES: dict[str, SchedClass] = {
    "stop_sched_class": "stop",
    "dl_sched_class": "deadline",
    "rt_sched_class": "realtime",
    "fair_sched_class": "fair",
    "idle_sched_class": "idle",
    "ext_sched_class": "ext",
}

_MORE: Members = {
    "class": ("sched_class",),
    "deadline": ("dl.deadline",),
}


class QueuedTasks:
    """Tasks at some addresses, read at once."""

    def __init__(
        self, reader: Reader, addresses: Iterable[int], now: int, losses: LossLog
    ) -> None:
        """Read the tasks, none of which may be an idle task.

        :param now: The local clock, in nanoseconds.
        """
        self._now = now
        task_reader = reader.once(TaskReader, lambda: TaskReader(reader))
        self._table = task_reader.read(list(addresses), losses)
        self._rows = {
            address: row for row, address in enumerate(self._table["address"].tolist())
        }
        self._more = read_structs(
            reader, "struct task_struct", _MORE, self._table["address"], losses
        )
        self._classes = reader.once(_classes, lambda: _classes(reader.prog))
        self._cgroups = read_cgroups(reader, self._table, losses)
        self._throttles = Throttles(reader, self._table, losses)

    def is_queued(self, address: int, cpu: int) -> bool:
        """Return whether a task is on a CPU's run queue; ``False`` if unreadable."""
        row = self._rows.get(address)
        if row is None or int(self._table["cpu"][row]) != cpu:
            return False
        return int(self._table["on_rq"][row]) == _QUEUED

    def queued_ns(self, address: int) -> int:
        """Return the time when a task was last queued; 0 if unknown."""
        row = self._rows.get(address)
        if row is None or not self._table.has("last_queued_ns"):
            return 0
        return int(self._table["last_queued_ns"][row])

    def sleeps(self, address: int) -> bool:
        """Return whether a task sleeps on the run queue."""
        return delays(self._table) and bool(
            self._table["sched_delayed"][self._rows[address]]
        )

    def running(self, address: int) -> RunnableTask | None:
        """Return a running task; ``None`` if it could not be read."""
        if address not in self._rows:
            return None
        sched_class = self._classes.get(int(self._more["class"][self._rows[address]]))
        return sched_class and self.queued(address, sched_class, runs=True)

    def queued(
        self,
        address: int,
        sched_class: SchedClass,
        *,
        runs: bool = False,
        throttled: bool = False,
    ) -> RunnableTask:
        """Return a waiting or running task."""
        row, table = self._rows[address], self._table
        policy = int(table["policy"][row])
        wait = self._since("last_arrival_ns" if runs else "last_queued_ns", row)
        deadline = int(self._more["deadline"].astype(np.int64)[row])
        return RunnableTask(
            pid=int(table["pid"][row]),
            comm=comm_text(table["comm"][row]),
            sched_class=sched_class,
            policy=POLICIES.get(policy, str(policy)),
            priority=int(table["prio"][row]) - MAX_RT_PRIO,
            rt_priority=int(table["rt_priority"][row]) if policy in REALTIME else None,
            nice=None
            if policy in (*REALTIME, DEADLINE)
            else int(table["static_prio"][row]) - NICE_0,
            deadline_ns=deadline - self._now if sched_class == "deadline" else None,
            wait_ns=wait,
            wait_bound="upper" if not runs and self._may_have_slept(row) else "exact",
            cgroup=self._cgroups.path(row),
            throttled=throttled,
            throttle=self._throttle(row) if throttled else None,
        )

    def _may_have_slept(self, row: int) -> bool:
        """Return whether its time on the queue may include sleep.

        A delayed sleeper that moves to another CPU is queued there while it sleeps
        (v6.12), and loses its exec_start until it runs (migrate_task_rq_fair()).
        """
        return delays(self._table) and not self._table["exec_start_ns"][row]

    def _throttle(self, row: int) -> str | None:
        found = self._throttles.of(row, self._now)
        return None if found is None else found.text

    def _since(self, column: str, row: int) -> int | None:
        """Return the time since a stamp; ``None`` without CONFIG_SCHED_INFO."""
        if not self._table.has(column) or not self._table[column][row]:
            return None
        return max(self._now - int(self._table[column][row]), 0)


def idle_task(cpu: int, since: int | None) -> RunnableTask:
    """Return the idle task of a CPU, without a read (init_idle()).

    :param since: time that it has been running
    """
    return RunnableTask(
        pid=0,
        comm=f"swapper/{cpu}",
        sched_class="idle",
        policy=POLICIES[0],
        priority=NICE_0 - MAX_RT_PRIO,
        rt_priority=None,
        nice=0,
        deadline_ns=None,
        wait_ns=since,
        wait_bound="exact",
        cgroup=None,
        throttled=False,
    )


def delays(tasks: TaskTable) -> bool:
    """Return whether tasks may sleep on the run queue (delayed dequeue, v6.12)."""
    return tasks.has("sched_delayed")


def _classes(prog: drgn.Program) -> dict[int, SchedClass]:
    """Return the classes by the address of their ``struct sched_class``."""
    # The first lookup of a missing symbol takes long.
    has_ext = find_type(prog, "struct rq").has_member("scx")
    classes: dict[int, SchedClass] = {}
    for name, sched_class in _CLASSES.items():
        if sched_class == "ext" and not has_ext:
            continue
        try:
            classes[find_symbol(prog, name).address] = sched_class
        except MissingError:
            # The symbols are incomplete.
            continue
    return classes
