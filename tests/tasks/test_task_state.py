# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every task of the workload has its class, and an age within its bounds."""

import numpy as np
import pytest

from msatools.tasks.accounting import BOUND_NS
from msatools.tasks.sampler import AgeBound, ages
from msatools.tasks.states import asleep
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import TaskClass
from tests.prstat.dumps import MIDWAY, OFF, ON, Dump, long, read_dump

FEW = 5
"""Classes with fewer tasks are not compared: one stalled CPU could affect half."""


@pytest.fixture(scope="module", params=[*OFF, *ON, *long(*MIDWAY)])
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


def test_class_of_every_named_task(dump: Dump) -> None:
    wrong = {}
    for name, task in dump.tasks.items():
        row = dump.row(name)
        found = TaskClass(dump.now.classes[row]).name
        if found not in (task["class"], *task.get("also", ())):
            wrong[name] = found, dump.now.stacks.names(dump.now.stacks[row])
    assert wrong == {}
    assert len(dump.tasks) > 180
    assert len({task["class"] for task in dump.tasks.values()}) > 20
    assert TaskClass.OTH not in dump.now.classes


def test_class_of_kernel_threads(dump: Dump) -> None:
    """Threads that were idle and have not run since have class KTW."""
    compared = 0
    for thread in dump.run.workload["kernel_threads"]:
        tid = thread["tid"]
        if thread["class"] is None or tid not in dump.rows:
            continue
        row = dump.rows[tid]
        sched = dump.run.truth(f"proc/{tid}/task/{tid}/schedstat").split()
        # A thread that was just woken has not run either.
        if int(sched[2]) == dump.table["pcount"][row] and dump.table["state"][row]:
            compared += 1
            assert dump.now.classes[row] == TaskClass.KTW, thread
    # The number of busy ones varies.
    assert compared > 0


def test_age_of_every_steady_task(dump: Dump) -> None:
    """The wait began between its announcement and its first observation."""
    end = dump.clocks.monotonic_ns
    assert end is not None
    compared = bounds = 0
    for name, task in dump.tasks.items():
        if not task["steady"] or not task.get("start_ns"):
            continue
        row = dump.row(name)
        began = end - int(dump.now.age_ns[row])
        latest = task["in_place_ns"] + dump.bound_ns
        if dump.now.age_bound[row] == AgeBound.UPPER:
            # The stamp was overwritten (6.12): the age is since the task got the CPU.
            assert began <= latest, name
            bounds += 1
            continue
        compared += 1
        assert task["start_ns"] - dump.bound_ns <= began <= latest, name
    assert compared + bounds > 150
    # The number of overwritten stamps varies.
    assert compared > 0
    assert dump.table.has("sched_delayed") or not bounds


def test_ages_agree_with_the_statistics(dump: Dump) -> None:
    """With schedstats, the start of a sleep agrees with exec_start.

    Exception: a task that slept on the run queue (6.12) has a later stamp, from when it
    left the queue. An emulated CPU can also stall between the two stamps.
    """
    if dump.run.truth("proc/sys/kernel/sched_schedstats").strip() != b"1":
        assert not dump.table["sleep_start_ns"].any()
        return
    stamps = ("sleep_start_ns", "block_start_ns")
    without = TaskTable(dump.table.records, dump.table.columns - set(stamps))
    age, bound = ages(without, dump.clocks, dump.now.classes)
    stamp = np.maximum(*(dump.table[column] for column in stamps)).astype(np.int64)
    slept = (stamp != 0) & (bound == AgeBound.EXACT) & asleep(dump.table)
    assert np.count_nonzero(slept) > 1000
    longer = age - (dump.clocks.local_ns - stamp)
    kinds = [slept & (dump.now.classes == c) for c in np.unique(dump.now.classes)]
    # A wrong age would affect all tasks of a class, a stalled CPU only some.
    kinds = [kind for kind in kinds if np.count_nonzero(kind) >= FEW]
    # The stamps are of two clocks of the same run queue.
    assert min(np.median(longer[kind]) for kind in kinds) >= -BOUND_NS
    if dump.table.has("sched_delayed"):
        since_boot = dump.run.workload["times"]["switched_on_ns"] is None
        if not since_boot:
            return  # the time on the run queue is unknown
        # Only schedstats count sleep on the run queue as waiting for a CPU.
        longer -= np.clip(dump.delayed_ns, 0, np.maximum(longer, 0))
    assert max(np.median(longer[kind]) for kind in kinds) <= BOUND_NS


def test_cost(dump: Dump) -> None:
    """drgn is not used to unwind sleeping tasks."""
    assert dump.now.stacks.asked == 0
    assert not dump.losses.coverage["stacks_incomplete"]
