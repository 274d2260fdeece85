# SPDX-License-Identifier: LGPL-2.1-or-later

"""The breakdown of off-CPU time, for threads made by hand."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.prstat.states import SCHED_DEADLINE
from msatools.tasks.accounting import (
    EXIT_ZOMBIE,
    PF_KTHREAD,
)
from msatools.tasks.states import read_in_iowait
from msatools.tasks.table import TaskReader
from tests.prstat.dumps import by_drgn
from tests.prstat.made import (
    BLOCKED,
    MS,
    NOW,
    OFF,
    ON,
    SECOND,
    START,
    Made,
    Thread,
    shares,
)
from tests.support.dumps import TYPES, open_dump

STOPPED = 4
Split = list[int | None]


def split(made: Made, row: int = 0) -> Split:
    """Return interruptible, blocked, I/O and stopped time in ms, and the coverage.

    The coverage is the covered share of the off-CPU time in percent.
    """
    sleeps = made.parts.sleeps
    columns = (sleeps.sleep, sleeps.blocked, sleeps.iowait, made.parts.stopped)
    values = [column[row] for column in columns]
    share = made.parts.coverage[row]
    covered = None if np.isnan(share) else round(100 * share)
    return [*(None if value is None else value // MS for value in values), covered]


def asleep(seconds: int, **columns: Any) -> Thread:
    """Return a thread that has slept for some seconds."""
    return {"age_ns": seconds * SECOND, **columns}


PAST = {
    "sum_sleep_ns": 6 * SECOND,
    "sum_block_ns": 3 * SECOND,
    "iowait_sum_ns": SECOND,
}
"""Six seconds asleep, half of them blocked, and a third of that for a disk."""

PRESENT = {**PAST, **asleep(4)}
AWAKE = {**PRESENT, "exec_start_ns": NOW}
STOPPER = {**PAST, **asleep(3, state=STOPPED)}
"""A thread that slept for six seconds, and did something else for four."""


def witness(ns: int = 10 * SECOND, **columns: Any) -> Thread:
    """Return a sleeping thread with a stamp from schedstats."""
    stamp = {"sleep_start_ns": NOW - ns, "exec_start_ns": NOW - ns}
    return {"age_ns": ns, **stamp, **columns}


NONE: Split = [None] * 5
WHOLE: Split = [10_000, 0, 0, 0, 100]
SLEPT: Split = [3000, 2000, 1000, None, 60]
KEEPS_INTERRUPTS = replace(ON, irq_time=True)
"""Accounting that no stock kernel enables."""

NO_STATISTICS = ("sum_sleep_ns", "sum_block_ns", "iowait_sum_ns", "sleep_start_ns")
DELAYS: dict[str, Any] = {"without": ()}
"""Options for a kernel whose threads can sleep on the run queue."""

CASES: dict[str, tuple[list[Thread], dict[str, Any], list[Split]]] = {
    # Threads, options, and the split of each.
    "asleep": ([witness(4 * SECOND, **PAST)], {}, [[7000, 2000, 1000, 0, 100]]),
    "blocked": ([{**PRESENT, "state": BLOCKED}], {}, [[3000, 6000, 1000, 0, 100]]),
    "waits for a disk": (
        [{**PRESENT, "state": BLOCKED, "in_iowait": True}],
        *({}, [[3000, 2000, 5000, 0, 100]]),
    ),
    "killable": ([asleep(10, state=0x102)], {}, [[0, 10_000, 0, 0, 100]]),
    "idle": ([asleep(10, state=0x402)], {}, [[0, 10_000, 0, 0, 100]]),
    # The age is not that of a sleep.
    "awake": ([{**AWAKE, "state": 0, "on_cpu": 1}], {}, [SLEPT]),
    "about to sleep": ([{**AWAKE, "on_cpu": 1}], {}, [SLEPT]),
    "dead": ([{**AWAKE, "exit_state": EXIT_ZOMBIE}], {}, [SLEPT]),
    "statistics are off": ([asleep(4)], {"accounting": OFF}, [NONE]),
    "kernel has no statistics": (
        [asleep(1)],
        {
            "accounting": replace(OFF, schedstats=None),
            "without": (*NO_STATISTICS, "block_start_ns"),
        },
        [NONE],
    ),
    # Earlier statistics count, but say nothing about threads that did not sleep then.
    "statistics were on before": ([PAST, {}], {"accounting": OFF}, [SLEPT, NONE]),
    # The current sleep is always known. Sleeps before the statistics were switched on
    # are unknown.
    "statistics on midway": (
        *([asleep(4), asleep(10)], {}),
        [[4000, 0, 0, None, 40], WHOLE],
    ),
    # Another thread's stamp shows that they were on before it started.
    "stopped": ([STOPPER, witness()], {}, [[3000, 2000, 1000, 4000, 60], WHOLE]),
    "no witness": ([STOPPER, {}], {}, [SLEPT]),
    "late witness": ([STOPPER, witness(9 * SECOND)], {}, [SLEPT]),
    # The stamp is from an earlier time when they were on.
    "old witness": ([STOPPER, witness(exec_start_ns=START + SECOND)], {}, [SLEPT]),
    "awake witness": ([STOPPER, witness(state=0, on_cpu=1)], {}, [SLEPT]),
    "stopped, but its class has no statistics": (
        [{**STOPPER, "policy": SCHED_DEADLINE}, witness()],
        *({}, [SLEPT]),
    ),
    "kernel threads are never stopped": (
        [{**STOPPER, "flags": PF_KTHREAD}, witness(3 * SECOND)],
        *({}, [[3000, 2000, 1000, 0, 60]]),
    ),
    "slept on the run queue instead": ([STOPPER, witness()], DELAYS, [SLEPT, WHOLE]),
    # Interrupts are neither sleep nor stopped; if not accounted, they are user time.
    "interrupts": (
        [witness(9 * SECOND, delays={"irq": SECOND}), witness()],
        {"accounting": KEEPS_INTERRUPTS},
        [[9000, 0, 0, 0, 100]],
    ),
    "interrupts that are not kept": (
        [witness(9 * SECOND, delays={"irq": 0}), witness()],
        *({}, [[9000, 0, 0, 1000, 90]]),
    ),
    # Interrupts are an unknown part of the off-CPU time.
    "interrupts without delay accounting": (
        [witness(9 * SECOND), witness()],
        {"accounting": KEEPS_INTERRUPTS},
        [[9000, 0, 0, None, 90]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_time_off_the_cpu(case: str) -> None:
    threads, options, expected = CASES[case]
    made = Made(*threads, **options)
    assert [split(made, row) for row in range(len(expected))] == expected
    for row, (*_, covered) in enumerate(expected):
        assert made.parts.known[row] == (covered is not None)
        if covered == 100:
            assert made.parts.unexplained_ns[row] == 0


# --- impossible counters


@pytest.mark.parametrize(
    ("options", "refine", "latency_s", "slept"),
    # Eight seconds of sleep are in both counters (6.12); exact latency is kept.
    [(DELAYS, False, 9, None), (DELAYS, True, 1, 9000), ({}, True, 9, None)],
)
def test_sleep_counted_as_latency(
    options: dict[str, Any], refine: bool, latency_s: int, slept: int | None
) -> None:
    thread = {"sum_sleep_ns": 9 * SECOND, "run_delay_ns": 9 * SECOND}
    made = Made(thread, refine=refine, **options)
    assert made.parts.impossible[0] == (slept is None)
    assert split(made)[0] == slept
    assert shares(made.lives)[2] == 1000 * latency_s


HELD: dict[str, tuple[Thread, dict[str, Any], dict[str, int | None]]] = {
    # A thread with delays, options, and the accepted delays. Delays for work can
    # include time on the CPU; a wait for a disk cannot.
    "wait that is too long": (
        {"sum_exec_ns": 2 * SECOND, "delays": {"blkio": 9, "freepages": 9}},
        *({}, {"blkio": None, "freepages": 9}),
    ),
    "work that is too long": (
        {"sum_exec_ns": 2 * SECOND, "delays": {"blkio": 0, "freepages": 11}},
        *({}, {"blkio": 0, "freepages": None}),
    ),
    "wait": (witness(delays={"blkio": 2}), {}, {"blkio": 2}),
    # Delays counted at wrong times (6.12) contradict schedstats.
    "wait that was sleep": (witness(delays={"blkio": 2}), DELAYS, {"blkio": None}),
    # Schedstats that are incomplete cannot contradict.
    "statistics that lack it": (
        *(asleep(7, delays={"blkio": 2}), DELAYS),
        {"blkio": 2},
    ),
}


@pytest.mark.parametrize("case", HELD)
def test_delays(case: str) -> None:
    thread, options, expected = HELD[case]
    seconds = {kind: value * SECOND for kind, value in thread["delays"].items()}
    # The other thread was forked while delay accounting was off.
    made = Made({**thread, "delays": seconds}, {}, **options)
    found = {kind: column[0] for kind, column in made.parts.delays.items()}
    assert found == {
        kind: None if value is None else value * SECOND
        for kind, value in expected.items()
    }
    assert {column[1] for column in made.parts.delays.values()} == {None}
    assert made.parts.impossible[0] == (None in expected.values())


@pytest.mark.parametrize("types", TYPES)
def test_in_iowait(types: str) -> None:
    """in_iowait is that of the kernel's type; False for unreadable tasks."""
    reader, losses = Reader(open_dump("tasks-6.12", types)), LossLog()
    table = TaskReader(reader).read_all(losses)
    good = read_in_iowait(reader, table, losses)
    assert not losses.lost
    assert (table["state"][good] & BLOCKED != 0).all()
    assert good.tolist() == by_drgn(reader.prog, table, lambda t: t.in_iowait).tolist()
    assert np.count_nonzero(good) > 10
    lost = np.flatnonzero(good)[:3]
    table.records["address"][lost] = 0xFFFF_DEAD_0000_0000
    bad = read_in_iowait(reader, table, losses)
    assert losses.lost == {"task_struct_unreadable": 3}
    good[lost] = False
    assert np.array_equal(good, bad)
