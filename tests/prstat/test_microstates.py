# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lives made by hand."""

from typing import Any

import numpy as np
import pytest

from msatools.kernel.clocks import Clocks
from msatools.prstat.microstates import (
    BOUND_NS,
    EXIT_ZOMBIE,
    PF_KTHREAD,
    Microstates,
    microstates,
)
from msatools.tasks.table import TaskTable

MS = 1_000_000
SECOND = 1000 * MS
START = 5 * SECOND
NOW = 15 * SECOND
COLUMNS = (
    *("cpu", "exit_state", "on_cpu", "on_rq", "sched_delayed", "state", "flags"),
    *("sum_exec_ns", "exec_start_ns", "run_delay_ns", "last_queued_ns", "start_ns"),
    *("utime_ns", "stime_ns"),
)
ASLEEP = 1


def life(*, without: tuple[str, ...] = (), **columns: int) -> Microstates:
    """The microstates of one thread that started ten seconds ago on CPU 0."""
    values: dict[str, Any] = dict.fromkeys(COLUMNS, 0)
    values |= {"start_ns": START, "utime_ns": 1, "stime_ns": 1, "state": ASLEEP}
    values |= columns
    kept = [name for name in COLUMNS if name not in without]
    records = np.zeros(1, [(name, "u8") for name in kept])
    for name in kept:
        records[name] = values[name]
    clocks = Clocks(NOW, 0, np.array([0, 2 * MS]))
    return microstates(TaskTable(records, frozenset(kept)), clocks)


def parts(made: Microstates) -> list[int]:
    """User, system, latency, off the CPU, zombie; they must be all there is."""
    arrays = (made.user_ns, made.system_ns, made.latency_ns, made.off_cpu_ns)
    found = [int(values[0]) for values in (*arrays, made.zombie_ns)]
    assert sum(found) == made.lifetime_ns[0]
    assert min(found) >= 0
    return [value // MS for value in found]


def test_sleeper() -> None:
    made = life(sum_exec_ns=2 * SECOND, run_delay_ns=SECOND, utime_ns=3, stime_ns=1)
    assert parts(made) == [1500, 500, 1000, 7000, 0]
    assert made.lifetime_ns[0] == 10 * SECOND


def test_running() -> None:
    """Since it was last accounted for, it has run."""
    made = life(sum_exec_ns=SECOND, exec_start_ns=NOW - SECOND, on_cpu=1, state=0)
    assert parts(made) == [1000, 1000, 0, 8000, 0]


def test_running_where_the_task_clock_is_behind() -> None:
    """CPU 1 has lost 2 ms to interrupts, or to the hypervisor."""
    made = life(exec_start_ns=NOW - SECOND, on_cpu=1, state=0, cpu=1)
    assert sum(parts(made)[:2]) == 998


def test_waiting_for_a_cpu() -> None:
    made = life(on_rq=1, state=0, last_queued_ns=NOW - SECOND, run_delay_ns=SECOND)
    assert parts(made) == [0, 0, 2000, 8000, 0]


def test_asleep_on_the_run_queue() -> None:
    """Since 6.12: it could be taken for one that waits for a CPU."""
    made = life(on_rq=1, sched_delayed=1, state=0, last_queued_ns=NOW - SECOND)
    assert parts(made) == [0, 0, 0, 10_000, 0]


def test_queued_stamp_that_was_left_behind() -> None:
    """A migrated sleeper keeps last_queued; its state tells."""
    assert parts(life(last_queued_ns=NOW - SECOND)) == [0, 0, 0, 10_000, 0]


def test_bound_of_latency() -> None:
    assert life().latency_is_bound
    assert not life(without=("sched_delayed",)).latency_is_bound


def test_impossible_latency() -> None:
    """6.12 counts sleep as latency when a delayed task wakes up."""
    made = life(sum_exec_ns=4 * SECOND, run_delay_ns=9 * SECOND)
    assert parts(made) == [2000, 2000, 6000, 0, 0]
    assert made.impossible[0]
    assert made.missed_ns[0] == 3 * SECOND


def test_latency_within_the_bound() -> None:
    made = life(sum_exec_ns=9 * SECOND, run_delay_ns=SECOND + BOUND_NS)
    assert not made.impossible[0]
    assert made.missed_ns[0] == BOUND_NS


def test_zombie() -> None:
    made = life(
        exit_state=EXIT_ZOMBIE, exec_start_ns=NOW - 3 * SECOND, sum_exec_ns=SECOND
    )
    assert parts(made) == [500, 500, 0, 6000, 3000]


def test_kernel_thread_has_no_user_mode() -> None:
    made = life(flags=PF_KTHREAD, sum_exec_ns=SECOND, utime_ns=5, stime_ns=0)
    assert parts(made) == [0, 1000, 0, 9000, 0]


@pytest.mark.parametrize(
    ("utime", "stime", "user"), [(0, 0, 1000), (0, 7, 0), (7, 0, 1000)]
)
def test_few_ticks(utime: int, stime: int, user: int) -> None:
    made = life(sum_exec_ns=SECOND, utime_ns=utime, stime_ns=stime)
    assert parts(made)[0] == user


def test_clock_that_lags() -> None:
    """An idle CPU's clock may be older than a task's start."""
    made = life(start_ns=NOW + MS, sum_exec_ns=SECOND, run_delay_ns=SECOND)
    assert parts(made) == [0, 0, 0, 0, 0]
