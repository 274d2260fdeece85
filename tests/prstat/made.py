# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make threads by hand: by default each started ten seconds ago and sleeps."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from msatools.kernel.clocks import Accounting, Clocks
from msatools.prstat.states import Breakdown, breakdown, sleeps
from msatools.tasks.accounting import Delays, Microstates, microstates, without_sleep
from msatools.tasks.sampler import AgeBound, TaskState
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import TaskClass

MS = 1_000_000
SECOND = 1000 * MS
START = 5 * SECOND
NOW = 15 * SECOND
ASLEEP, BLOCKED = 1, 2

COLUMNS = (
    *("cpu", "exit_state", "on_cpu", "on_rq", "sched_delayed", "state", "flags"),
    *("sum_exec_ns", "exec_start_ns", "run_delay_ns", "last_queued_ns", "start_ns"),
    *("utime_ns", "stime_ns", "policy"),
    *("sum_sleep_ns", "sum_block_ns", "iowait_sum_ns"),
    *("sleep_start_ns", "block_start_ns"),
)
CLOCKS = Clocks(NOW, 0, np.array([0, 2 * MS]))
"""Clocks of which CPU 1 lost 2 ms to interrupts or to the hypervisor."""

DEFAULTS = {"start_ns": START, "utime_ns": 1, "stime_ns": 1, "state": ASLEEP}
NEW = ("sched_delayed",)
"""Columns that kernels up to 6.11 lack."""

OFF = Accounting(False, False, False, False, True)
ON = Accounting(True, True, False, False, True)

Thread = Mapping[str, Any]
"""Columns of the table, and ``age_ns``, ``task_class``, ``in_iowait``, ``delays``."""


class Made:
    """Some threads with their microstates and breakdowns."""

    def __init__(
        self,
        *threads: Thread,
        accounting: Accounting = ON,
        without: tuple[str, ...] = NEW,
        refine: bool = False,
    ) -> None:
        kept = [name for name in COLUMNS if name not in without]
        records = np.zeros(len(threads), [(name, "u8") for name in kept])
        for name in kept:
            default = DEFAULTS.get(name, 0)
            records[name] = [thread.get(name, default) for thread in threads]
        self.accounting = accounting
        self.tasks = TaskTable(records, frozenset(kept))
        self.now = now_of(threads)
        in_iowait = np.array([bool(t.get("in_iowait")) for t in threads], np.bool_)
        slept = sleeps(self.tasks, accounting, self.now, in_iowait)
        self.lives: Microstates = microstates(self.tasks, CLOCKS)
        if refine:
            self.lives = without_sleep(self.lives, slept.total_ns)
        self.parts: Breakdown = breakdown(
            self.tasks, CLOCKS, self.lives, slept, delays_of(threads), accounting
        )


def shares(lives: Microstates, row: int = 0) -> list[int]:
    """Return user, system, latency, off-CPU and zombie in ms; they sum to the life."""
    arrays = (lives.user_ns, lives.system_ns, lives.latency_ns, lives.off_cpu_ns)
    found = [int(values[row]) for values in (*arrays, lives.zombie_ns)]
    assert sum(found) == lives.lifetime_ns[row]
    assert min(found) >= 0
    return [value // MS for value in found]


def now_of(threads: tuple[Thread, ...]) -> TaskState:
    classes = [thread.get("task_class", TaskClass.OTH) for thread in threads]
    ages = [thread.get("age_ns", 0) for thread in threads]
    stacks: Any = None
    return TaskState(
        classes=np.array(classes, np.uint8),
        age_ns=np.array(ages, np.int64),
        age_bound=np.full(len(threads), AgeBound.EXACT, np.uint8),
        stacks=stacks,
        waits=(),
    )


def delays_of(threads: tuple[Thread, ...]) -> Delays:
    kept = [thread.get("delays") for thread in threads]
    kinds = dict.fromkeys(kind for delays in kept if delays for kind in delays)
    return Delays(
        has=np.array([delays is not None for delays in kept], np.bool_),
        delay_ns={
            kind: np.array([(delays or {}).get(kind, 0) for delays in kept], np.int64)
            for kind in kinds
        },
        count={},
    )
