# SPDX-License-Identifier: LGPL-2.1-or-later

"""Time off the CPU, split by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from msatools.kernel.accounting import Accounting
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.prstat.breakdown import SCHED_DEADLINE
from msatools.tasks.iowait import read_in_iowait
from msatools.tasks.microstates import (
    BOUND_NS,
    EXIT_ZOMBIE,
    PF_KTHREAD,
    UNSTABLE_BOUND_NS,
    bound_of,
)
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
Told = list[int | None]


def told(made: Made, row: int = 0) -> Told:
    """Interruptible, blocked, waiting for input or output, stopped; in milliseconds.

    And how much of the time off the CPU is covered, in hundredths.
    """
    sleeps = made.parts.sleeps
    columns = (sleeps.sleep, sleeps.blocked, sleeps.iowait, made.parts.stopped)
    values = [column[row] for column in columns]
    share = made.parts.coverage[row]
    covered = None if np.isnan(share) else round(100 * share)
    return [*(None if value is None else value // MS for value in values), covered]


def asleep(seconds: int, **columns: Any) -> Thread:
    """Sleeps since so many seconds."""
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
"""Has slept for six seconds, and done something else for four."""


def witness(ns: int = 10 * SECOND, **columns: Any) -> Thread:
    """Sleeps, with a stamp that the statistics made."""
    stamp = {"sleep_start_ns": NOW - ns, "exec_start_ns": NOW - ns}
    return {"age_ns": ns, **stamp, **columns}


NONE: Told = [None] * 5
WHOLE: Told = [10_000, 0, 0, 0, 100]
SLEPT: Told = [3000, 2000, 1000, None, 60]
UNSTABLE = replace(ON, stable_clock=False)
KEEPS_INTERRUPTS = replace(ON, irq_time=True)
"""As no stock kernel does."""

NO_STATISTICS = ("sum_sleep_ns", "sum_block_ns", "iowait_sum_ns", "sleep_start_ns")
DELAYS: dict[str, Any] = {"without": ()}
"""A kernel where threads may sleep on the run queue."""

CASES: dict[str, tuple[list[Thread], dict[str, Any], list[Told]]] = {
    # Threads, options, and what is told of each.
    "asleep": ([witness(4 * SECOND, **PAST)], {}, [[7000, 2000, 1000, 0, 100]]),
    "blocked": ([{**PRESENT, "state": BLOCKED}], {}, [[3000, 6000, 1000, 0, 100]]),
    "waits for a disk": (
        [{**PRESENT, "state": BLOCKED, "in_iowait": True}],
        *({}, [[3000, 2000, 5000, 0, 100]]),
    ),
    "killable": ([asleep(10, state=0x102)], {}, [[0, 10_000, 0, 0, 100]]),
    "idle": ([asleep(10, state=0x402)], {}, [[0, 10_000, 0, 0, 100]]),
    # The age is not one of sleep.
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
    # They have what they have; they say nothing of those who did not sleep then.
    "statistics were on before": ([PAST, {}], {"accounting": OFF}, [SLEPT, NONE]),
    # The sleep that lasts is known in any case, by what went before it; but a thread
    # may have slept, too, before that was counted.
    "statistics on midway": (
        *([asleep(4), asleep(10)], {}),
        [[4000, 0, 0, None, 40], WHOLE],
    ),
    # They were on before it started, as another's stamp tells.
    "stopped": ([STOPPER, witness()], {}, [[3000, 2000, 1000, 4000, 60], WHOLE]),
    "no witness": ([STOPPER, {}], {}, [SLEPT]),
    "late witness": ([STOPPER, witness(9 * SECOND)], {}, [SLEPT]),
    # From when they were on before, and off again: it has been awake since.
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
    # Interrupts are no sleep, and no stop; where they are not kept, they are user time.
    "interrupts": (
        [witness(9 * SECOND, delays={"irq": SECOND}), witness()],
        {"accounting": KEEPS_INTERRUPTS},
        [[9000, 0, 0, 0, 100]],
    ),
    "interrupts that are not kept": (
        [witness(9 * SECOND, delays={"irq": 0}), witness()],
        *({}, [[9000, 0, 0, 1000, 90]]),
    ),
    # They are in the time off the CPU, and nobody knows how much of it.
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
    assert [told(made, row) for row in range(len(expected))] == expected
    for row, (*_, covered) in enumerate(expected):
        assert made.parts.known[row] == (covered is not None)
        if covered == 100:
            assert made.parts.unexplained_ns[row] == 0


@pytest.mark.parametrize(
    ("accounting", "bound"), [(ON, BOUND_NS), (UNSTABLE, UNSTABLE_BOUND_NS)]
)
def test_less_than_clocks_are_apart_is_no_stop(
    accounting: Accounting, bound: int
) -> None:
    assert bound_of(accounting) == bound
    for left, stopped in ((bound, 0), (bound + MS, (bound + MS) // MS)):
        thread = witness(10 * SECOND - left)
        made = Made(thread, witness(), accounting=accounting)
        assert made.parts.stopped[0] == stopped * MS


# --- counters that are too large


def test_more_sleep_than_there_was_time() -> None:
    most = 10 * SECOND + BOUND_NS
    made = Made({"sum_sleep_ns": most + 1}, {"age_ns": SECOND}, {"sum_sleep_ns": most})
    assert told(made) == NONE
    assert made.parts.impossible.tolist() == [True, False, False]
    assert made.parts.known.tolist() == [False, True, True]
    assert told(made, 2)[3:] == [0, 100]
    assert made.parts.unexplained_ns[2] == -BOUND_NS


@pytest.mark.parametrize(
    ("options", "refine", "latency_s", "slept"),
    # Eight seconds of sleep are in both (6.12); latency that is exact stays.
    [(DELAYS, False, 9, None), (DELAYS, True, 1, 9000), ({}, True, 9, None)],
)
def test_sleep_that_counts_as_latency_too(
    options: dict[str, Any], refine: bool, latency_s: int, slept: int | None
) -> None:
    thread = {"sum_sleep_ns": 9 * SECOND, "run_delay_ns": 9 * SECOND}
    made = Made(thread, refine=refine, **options)
    assert made.parts.impossible[0] == (slept is None)
    assert told(made)[0] == slept
    assert shares(made.lives)[2] == 1000 * latency_s


HELD: dict[str, tuple[Thread, dict[str, Any], dict[str, int | None]]] = {
    # A thread that was held up, options, and the delays that are believed. Work that
    # took its time may have been on the CPU; a wait for a disk is not.
    "wait that is too long": (
        {"sum_exec_ns": 2 * SECOND, "delays": {"blkio": 9, "freepages": 9}},
        *({}, {"blkio": None, "freepages": 9}),
    ),
    "work that is too long": (
        {"sum_exec_ns": 2 * SECOND, "delays": {"blkio": 0, "freepages": 11}},
        *({}, {"blkio": 0, "freepages": None}),
    ),
    "wait": (witness(delays={"blkio": 2}), {}, {"blkio": 2}),
    # Where it is counted at wrong moments (6.12), the statistics contradict.
    "wait that was sleep": (witness(delays={"blkio": 2}), DELAYS, {"blkio": None}),
    # Unless they lack some themselves.
    "statistics that lack it": (
        *(asleep(7, delays={"blkio": 2}), DELAYS),
        {"blkio": 2},
    ),
}


@pytest.mark.parametrize("case", HELD)
def test_delays(case: str) -> None:
    thread, options, expected = HELD[case]
    seconds = {kind: value * SECOND for kind, value in thread["delays"].items()}
    # Another was forked while they were off.
    made = Made({**thread, "delays": seconds}, {}, **options)
    found = {kind: column[0] for kind, column in made.parts.delays.items()}
    assert found == {
        kind: None if value is None else value * SECOND
        for kind, value in expected.items()
    }
    assert {column[1] for column in made.parts.delays.values()} == {None}
    assert made.parts.impossible[0] == (None in expected.values())


def test_no_threads() -> None:
    made = Made()
    assert len(made.parts.coverage) == len(made.parts.stopped.ns) == 0


@pytest.mark.parametrize("types", TYPES)
def test_in_iowait(types: str) -> None:
    """As the kernel's types have it, but for what cannot be read."""
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
