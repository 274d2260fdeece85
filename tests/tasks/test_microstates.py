# SPDX-License-Identifier: LGPL-2.1-or-later

"""Microstates over the lives of tasks made by hand."""

import pytest

from msatools.tasks.accounting import BOUND_NS, EXIT_ZOMBIE, PF_KTHREAD, Microstates
from tests.prstat.made import MS, NOW, SECOND, Made, shares

AGO = NOW - SECOND
RUNS = {"exec_start_ns": AGO, "on_cpu": 1, "state": 0}
WAITS = {"last_queued_ns": AGO, "on_rq": 1, "state": 0}


def life(*, without: tuple[str, ...] = (), **columns: int) -> Microstates:
    return Made(columns, without=without).lives


DIED = {"exit_state": EXIT_ZOMBIE, "exec_start_ns": NOW - 3 * SECOND}
LIVES: dict[str, tuple[dict[str, int], list[int]]] = {
    "asleep": (
        {"sum_exec_ns": 2 * SECOND, "run_delay_ns": SECOND, "utime_ns": 3},
        [1500, 500, 1000, 7000, 0],
    ),
    # It has run since its time was last accounted.
    "runs": ({**RUNS, "sum_exec_ns": SECOND}, [1000, 1000, 0, 8000, 0]),
    "runs where the task clock is behind": ({**RUNS, "cpu": 1}, [499, 499, 0, 9002, 0]),
    "waits": ({**WAITS, "run_delay_ns": SECOND}, [0, 0, 2000, 8000, 0]),
    # Since 6.12: it could be mistaken for a task that waits for a CPU.
    "asleep on the run queue": ({**WAITS, "sched_delayed": 1}, [0, 0, 0, 10_000, 0]),
    # A migrated sleeper keeps last_queued; its state shows that it sleeps.
    "queued stamp left behind": ({"last_queued_ns": AGO}, [0, 0, 0, 10_000, 0]),
    "zombie": ({**DIED, "sum_exec_ns": SECOND}, [500, 500, 0, 6000, 3000]),
    # It died on a CPU with another clock: counted time is kept.
    "zombie that ran to the end": (
        {**DIED, "sum_exec_ns": 7 * SECOND + 2 * MS},
        [3501, 3501, 0, 0, 2998],
    ),
    "kernel thread has no user mode": (
        {"flags": PF_KTHREAD, "sum_exec_ns": SECOND, "utime_ns": 5, "stime_ns": 0},
        [0, 1000, 0, 9000, 0],
    ),
    # The clock of an idle CPU can be before a task's start.
    "clock that lags": (
        {"start_ns": NOW + MS, "sum_exec_ns": SECOND, "run_delay_ns": SECOND},
        [0, 0, 0, 0, 0],
    ),
}


@pytest.mark.parametrize("case", LIVES)
def test_parts_of_a_life(case: str) -> None:
    columns, parts = LIVES[case]
    made = life(**columns)
    assert shares(made) == parts
    assert made.lifetime_ns[0] == sum(parts) * MS


def test_impossible_latency() -> None:
    """6.12 counts sleep as latency when a delayed task wakes up."""
    made = life(sum_exec_ns=4 * SECOND, run_delay_ns=9 * SECOND)
    assert shares(made) == [2000, 2000, 6000, 0, 0]
    assert (made.impossible[0], made.missed_ns[0]) == (True, 3 * SECOND)
    made = life(sum_exec_ns=9 * SECOND, run_delay_ns=SECOND + BOUND_NS)
    assert (made.impossible[0], made.missed_ns[0]) == (False, BOUND_NS)
