# SPDX-License-Identifier: LGPL-2.1-or-later

"""Time off the CPU, split by hand."""

from dataclasses import replace

import drgn
import numpy as np
import pytest

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.prstat.breakdown import SCHED_DEADLINE
from msatools.prstat.microstates import (
    BOUND_NS,
    EXIT_ZOMBIE,
    PF_KTHREAD,
    UNSTABLE_BOUND_NS,
    bound_of,
)
from msatools.tasks.iowait import read_in_iowait
from msatools.tasks.table import TaskReader
from tests.prstat.made import BLOCKED, MS, NOW, OFF, ON, SECOND, START, Made
from tests.support.dumps import TYPES, open_dump

STOPPED = 4


def told(made: Made, row: int = 0) -> list[int | None]:
    """Interruptible, blocked, waiting for input or output, stopped; in milliseconds."""
    sleeps = made.parts.sleeps
    columns = (sleeps.sleep, sleeps.blocked, sleeps.iowait, made.parts.stopped)
    values = [column[row] for column in columns]
    return [None if value is None else value // MS for value in values]


PAST = {
    "sum_sleep_ns": 6 * SECOND,
    "sum_block_ns": 3 * SECOND,
    "iowait_sum_ns": SECOND,
}
"""Six seconds asleep, half of them blocked, and a third of that for a disk."""


def test_past_and_present_sleep() -> None:
    made = Made({**PAST, "age_ns": 4 * SECOND, "sleep_start_ns": NOW - 4 * SECOND})
    assert told(made) == [7000, 2000, 1000, 0]
    assert made.parts.coverage[0] == 1
    assert made.parts.unexplained_ns[0] == 0


def test_blocked_now() -> None:
    made = Made({**PAST, "state": BLOCKED, "age_ns": 4 * SECOND})
    assert told(made) == [3000, 6000, 1000, 0]


def test_waiting_for_a_disk_now() -> None:
    thread = {**PAST, "state": BLOCKED, "age_ns": 4 * SECOND, "in_iowait": True}
    assert told(Made(thread)) == [3000, 2000, 5000, 0]


def test_killable_and_idle_are_blocked() -> None:
    for state in (0x102, 0x402):
        assert told(Made({"state": state, "age_ns": 10 * SECOND}))[1] == 10_000


@pytest.mark.parametrize(
    "runs",
    [{"state": 0, "on_cpu": 1}, {"on_cpu": 1}, {"exit_state": EXIT_ZOMBIE}],
)
def test_who_does_not_sleep_has_no_present_sleep(runs: dict[str, int]) -> None:
    """About to sleep, or dead: the age is not one of sleep."""
    made = Made({**PAST, "exec_start_ns": NOW, "age_ns": 4 * SECOND, **runs})
    assert told(made)[:3] == [3000, 2000, 1000]


def test_nothing_is_known_without_statistics() -> None:
    made = Made({"age_ns": 4 * SECOND}, accounting=OFF)
    assert told(made) == [None, None, None, None]
    assert np.isnan(made.parts.coverage[0])
    assert not made.parts.known[0]


def test_kernel_that_has_no_statistics() -> None:
    lacks = ("sum_sleep_ns", "sum_block_ns", "iowait_sum_ns", "sleep_start_ns")
    none = replace(OFF, schedstats=None)
    made = Made({"age_ns": SECOND}, accounting=none, without=(*lacks, "block_start_ns"))
    assert told(made) == [None, None, None, None]


def test_statistics_that_were_on_before() -> None:
    """They have what they have; they say nothing of those who did not sleep then."""
    made = Made(PAST, {}, accounting=OFF)
    assert told(made)[:3] == [3000, 2000, 1000]
    assert made.parts.coverage[0] == 0.6
    assert told(made, 1)[:3] == [None, None, None]


def test_switched_on_midway() -> None:
    """The sleep that lasts is known in any case, by what went before it."""
    made = Made({"age_ns": 4 * SECOND}, {"age_ns": 10 * SECOND})
    assert made.parts.coverage.tolist() == [0.4, 1]
    # It may have slept, too, before that was counted.
    assert told(made) == [4000, 0, 0, None]
    assert told(made, 1) == [10_000, 0, 0, 0]


def stopper(**columns: int) -> dict[str, int]:
    """Has slept for six seconds, and done something else for four."""
    return {**PAST, "state": STOPPED, "age_ns": 3 * SECOND, **columns}


def witness(slept_ns: int = 10 * SECOND, **columns: int) -> dict[str, int]:
    """Sleeps, with a stamp that the statistics made."""
    start = NOW - slept_ns
    stamp = {"sleep_start_ns": start, "exec_start_ns": start}
    return {"age_ns": slept_ns, **stamp, **columns}


def test_stopped() -> None:
    """The statistics were on before it started, as another's stamp tells."""
    made = Made(stopper(), witness())
    assert told(made) == [3000, 2000, 1000, 4000]
    assert told(made, 1) == [10_000, 0, 0, 0]


@pytest.mark.parametrize(
    "other",
    [
        {},
        witness(9 * SECOND),
        # From when they were on before, and off again: it has been awake since.
        witness(exec_start_ns=START + SECOND),
        # It is awake.
        witness(state=0, on_cpu=1),
    ],
)
def test_nobody_tells_that_statistics_were_on(other: dict[str, int]) -> None:
    assert told(Made(stopper(), other))[3] is None


def test_stopped_but_in_a_class_without_statistics() -> None:
    made = Made(stopper(policy=SCHED_DEADLINE), witness())
    assert told(made)[3] is None


def test_kernel_threads_are_never_stopped() -> None:
    made = Made(stopper(flags=PF_KTHREAD), witness(PAST["sum_block_ns"]))
    assert told(made)[3] == 0
    assert made.parts.unexplained_ns[0] == 4 * SECOND


def test_delayed_sleepers_may_have_been_asleep_instead() -> None:
    made = Made(stopper(), witness(), without=())
    assert told(made) == [3000, 2000, 1000, None]
    assert told(made, 1) == [10_000, 0, 0, 0]


def test_less_than_clocks_are_apart_is_no_stop() -> None:
    for left, stopped in ((BOUND_NS, 0), (BOUND_NS + MS, 11)):
        made = Made(witness(10 * SECOND - left), witness())
        assert told(made)[3] == stopped


def test_bound_of_clocks() -> None:
    unstable = replace(ON, stable_clock=False)
    assert (bound_of(ON), bound_of(unstable)) == (BOUND_NS, UNSTABLE_BOUND_NS)
    left = UNSTABLE_BOUND_NS
    made = Made(witness(10 * SECOND - left), witness(), accounting=unstable)
    assert told(made)[3] == 0


# --- counters that are too large


def test_more_sleep_than_there_was_time() -> None:
    made = Made({"sum_sleep_ns": 10 * SECOND + BOUND_NS + 1}, {"age_ns": SECOND})
    assert told(made) == [None, None, None, None]
    assert made.parts.impossible.tolist() == [True, False]
    assert made.parts.known.tolist() == [False, True]
    assert np.isnan(made.parts.coverage[0])


def test_as_much_more_as_clocks_are_apart() -> None:
    made = Made({"sum_sleep_ns": 10 * SECOND + BOUND_NS})
    assert not made.parts.impossible[0]
    assert made.parts.coverage[0] == 1
    assert made.parts.unexplained_ns[0] == -BOUND_NS
    assert told(made)[3] == 0


@pytest.mark.parametrize("refine", [False, True])
def test_sleep_that_counts_as_latency_too(refine: bool) -> None:
    """Eight seconds of sleep are in both (6.12)."""
    thread = {"sum_sleep_ns": 9 * SECOND, "run_delay_ns": 9 * SECOND}
    made = Made(thread, without=(), refine=refine)
    assert made.parts.impossible[0] == (not refine)
    assert told(made)[0] == (9000 if refine else None)
    assert made.lives.latency_ns[0] == (1 if refine else 9) * SECOND
    life = made.lives.user_ns + made.lives.system_ns + made.lives.off_cpu_ns
    assert life[0] + made.lives.latency_ns[0] == made.lives.lifetime_ns[0]


def test_latency_that_is_exact_stays() -> None:
    thread = {"sum_sleep_ns": 9 * SECOND, "run_delay_ns": 9 * SECOND}
    made = Made(thread, refine=True)
    assert made.lives.latency_ns[0] == 9 * SECOND
    assert made.parts.impossible[0]


def delay(made: Made, kind: str) -> int | None:
    return made.parts.delays[kind][0]


def test_delays() -> None:
    """Work that took its time may have been on the CPU; a wait for a disk is not."""
    nine = {"blkio": 9 * SECOND, "freepages": 9 * SECOND}
    made = Made({"sum_exec_ns": 2 * SECOND, "delays": nine})
    assert delay(made, "blkio") is None
    assert delay(made, "freepages") == 9 * SECOND
    assert made.parts.impossible[0]
    eleven = {"blkio": 0, "freepages": 11 * SECOND}
    made = Made({"sum_exec_ns": 2 * SECOND, "delays": eleven})
    assert delay(made, "blkio") == 0
    assert delay(made, "freepages") is None


def test_delays_that_are_not_kept() -> None:
    """Forked while they were off."""
    made = Made({"delays": {"blkio": SECOND}}, {})
    column = made.parts.delays["blkio"]
    assert column[0] == SECOND
    assert column[1] is None


@pytest.mark.parametrize(("new", "believed"), [(False, True), (True, False)])
def test_wait_for_a_disk_that_was_sleep(new: bool, believed: bool) -> None:
    """Where it is counted at wrong moments (6.12), the statistics contradict."""
    thread = {**witness(), "delays": {"blkio": 2 * SECOND}}
    made = Made(thread, without=() if new else ("sched_delayed",))
    assert (delay(made, "blkio") == 2 * SECOND) == believed
    assert made.parts.impossible[0] == (not believed)


def test_wait_for_a_disk_that_the_statistics_lack() -> None:
    thread = {"age_ns": 7 * SECOND, "delays": {"blkio": 2 * SECOND}}
    assert delay(Made(thread, without=()), "blkio") == 2 * SECOND


# --- interrupts: no stock kernel keeps them


KEEPS_INTERRUPTS = replace(ON, irq_time=True)


def test_interrupts() -> None:
    """They are no sleep, and no stop; where they are not kept, they are user time."""
    thread = {**witness(9 * SECOND), "delays": {"irq": SECOND}}
    made = Made(thread, witness(), accounting=KEEPS_INTERRUPTS)
    assert made.parts.interrupted[0] == SECOND
    assert told(made) == [9000, 0, 0, 0]
    assert made.parts.coverage[0] == 1


def test_interrupts_that_are_not_kept() -> None:
    thread = {**witness(9 * SECOND), "delays": {"irq": 0}}
    made = Made(thread, witness())
    assert made.parts.interrupted[0] is None
    assert told(made)[3] == 1000


def test_interrupts_without_delay_accounting() -> None:
    """They are in the time off the CPU, and nobody knows how much of it."""
    made = Made(witness(9 * SECOND), witness(), accounting=KEEPS_INTERRUPTS)
    assert made.parts.interrupted[0] is None
    assert told(made) == [9000, 0, 0, None]


def test_no_threads() -> None:
    made = Made()
    assert len(made.parts.coverage) == len(made.parts.stopped.ns) == 0


# --- who waits for input or output


@pytest.mark.parametrize("types", TYPES)
def test_in_iowait(types: str) -> None:
    """As the kernel's types have it, but for what cannot be read."""
    reader, findings = Reader(open_dump("tasks-6.12", types)), Findings()
    table = TaskReader(reader).read_all(findings)
    good = read_in_iowait(reader, table, findings)
    assert not findings.lost
    assert (table["state"][good] & BLOCKED != 0).all()
    objects = [
        drgn.Object(reader.prog, "struct task_struct *", int(address))
        for address in table["address"]
    ]
    assert good.tolist() == [bool(task.in_iowait) for task in objects]
    assert np.count_nonzero(good) > 10
    lost = np.flatnonzero(good)[:3]
    table.records["address"][lost] = 0xFFFF_DEAD_0000_0000
    bad = read_in_iowait(reader, table, findings)
    assert findings.lost == {"task_struct": 3}
    good[lost] = False
    assert np.array_equal(good, bad)
