# SPDX-License-Identifier: LGPL-2.1-or-later

"""Times computed for one thread equal, to the nanosecond, those computed by arrays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msatools.kernel.clocks import Accounting, Clocks
from msatools.prstat.states import breakdown, sleeps, sums
from msatools.query.life import LifeMoment, LifeSeen, age, covered_since, life, summed
from msatools.query.life import state_class as class_of
from msatools.tasks.accounting import Delays, bound_of, microstates, without_sleep
from msatools.tasks.sampler import TaskState, ages
from msatools.tasks.stacks import Stacks
from msatools.tasks.table import PF_KTHREAD, TaskTable
from msatools.tasks.waits import TaskClass
from tests.prstat.made import COLUMNS, MS, NEW, NOW, SECOND

TIMES = st.one_of(st.sampled_from([0, SECOND]), st.integers(0, 20 * SECOND))
SMALL = st.one_of(st.just(0), st.integers(0, 2 * SECOND))
STARTS = st.one_of(st.sampled_from([2 * SECOND, 5 * SECOND]), st.integers(0, NOW))
"""Often later than the first time at which statistics were on."""
STATISTICS = tuple(n for n in COLUMNS if n.startswith(("sum_s", "sum_b", "iow")))
THREAD = st.fixed_dictionaries(
    {
        "cpu": st.integers(0, 2),
        "exit_state": st.sampled_from([0, 0, 0, 0x20]),
        "on_cpu": st.integers(0, 1),
        "on_rq": st.integers(0, 1),
        "sched_delayed": st.integers(0, 1),
        "state": st.sampled_from([0, 1, 2, 0x402, 0x102, 4, 8, 0x200, 0x2000]),
        "flags": st.sampled_from([0, 0, 0, PF_KTHREAD]),
        "policy": st.sampled_from([0, 1, 6]),
        "start_ns": STARTS,
        "sum_sleep_ns": SMALL,
        "sum_exec_ns": SMALL,
        "run_delay_ns": SMALL,
        "sum_block_ns": SMALL,
        "iowait_sum_ns": SMALL,
        "utime_ns": TIMES,
        "stime_ns": TIMES,
        "exec_start_ns": TIMES,
        "last_queued_ns": TIMES,
        "last_arrival_ns": TIMES,
        "sleep_start_ns": TIMES,
        "block_start_ns": TIMES,
        "in_iowait": st.booleans(),
        "irq_ns": st.one_of(st.none(), SMALL),
        "swapin_ns": TIMES,
    }
)
ASIDE = ("in_iowait", "irq_ns", "swapin_ns")
OFTEN = st.sampled_from([True, True, False])
ACCOUNTING = st.builds(
    Accounting, OFTEN, st.booleans(), st.booleans(), st.booleans(), OFTEN
)
CLOCKS = st.builds(
    Clocks,
    st.just(NOW),
    st.sampled_from([None, 0, 5 * MS, -SECOND]),
    st.just(np.array([0, 2 * MS])),
)
Thread = dict[str, Any]


@pytest.mark.parametrize("without", [(), NEW, (*NEW, *STATISTICS)])
@settings(max_examples=100)
@given(
    threads=st.lists(THREAD, min_size=1, max_size=3),
    accounting=ACCOUNTING,
    clocks=CLOCKS,
)
def test_as_by_arrays(
    without: tuple[str, ...],
    threads: list[Thread],
    accounting: Accounting,
    clocks: Clocks,
) -> None:
    """Threads of all kinds, also impossible ones, on old and new kernels."""
    compare(without, threads, accounting, clocks)


def compare(
    without: tuple[str, ...],
    threads: list[Thread],
    accounting: Accounting,
    clocks: Clocks,
) -> None:
    """Compare the times computed for each thread with those computed by arrays."""
    if STATISTICS[0] in without and accounting.schedstats:
        return  # there is nothing to switch on
    kept = [n for n in threads[0] if n not in (*without, *ASIDE)]
    moment = LifeMoment(clocks, accounting)
    all_seen = [
        LifeSeen(
            0,
            {name: thread[name] for name in kept},
            thread["in_iowait"] and bool(thread["state"] & 2),
            None
            if thread["irq_ns"] is None
            else {name: thread[name] for name in ("irq_ns", "swapin_ns")},
        )
        for thread in threads
    ]
    records = np.zeros(len(threads), [(name, "u8") for name in kept])
    for name in kept:
        records[name] = [thread[name] for thread in threads]
    tasks = TaskTable(records, frozenset(kept))
    classes = [class_of(seen.task) for seen in all_seen]
    now = now_of(tasks, clocks, classes)
    in_iowait = np.array([seen.in_iowait for seen in all_seen])
    slept = sleeps(tasks, accounting, now, in_iowait)
    lives = microstates(tasks, clocks, bound_of(accounting))
    lives = without_sleep(lives, slept.total_ns)
    parts = breakdown(tasks, clocks, lives, slept, delays_of(threads), accounting)

    for row, seen in enumerate(all_seen):
        found = age(seen.task, moment)
        assert found == (now.age_ns[row], now.age_bound[row])
    since_ns = covered_since([seen.task for seen in all_seen], moment)
    ones = [life(seen, moment, since_ns) for seen in all_seen]
    assert [one.lifetime_ns for one in ones] == lives.lifetime_ns.tolist()
    for row in range(len(threads)):
        selected = np.arange(len(threads)) == row
        expected = sums(lives, parts, accounting, selected)
        assert summed(ones[row : row + 1], moment, lives.latency_is_bound) == expected
    every = np.ones(len(threads), np.bool_)
    expected = sums(lives, parts, accounting, every)
    assert summed(ones, moment, lives.latency_is_bound) == expected


def now_of(
    tasks: TaskTable, clocks: Clocks, classes: list[TaskClass | None]
) -> TaskState:
    known = [TaskClass.TMR if found is None else found for found in classes]
    codes = np.array(known, np.uint8)
    return TaskState(codes, *ages(tasks, clocks, codes), Stacks(None), ())


def delays_of(threads: list[Thread]) -> Delays:
    has = np.array([thread["irq_ns"] is not None for thread in threads])
    kinds = {
        kind: np.array([thread[f"{kind}_ns"] or 0 for thread in threads])
        for kind in ("irq", "swapin")
    }
    known = {kind: np.where(has, ns, 0) for kind, ns in kinds.items()}
    return Delays(has, known, {})
