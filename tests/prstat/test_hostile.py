# SPDX-License-Identifier: LGPL-2.1-or-later

"""Impossible values in records of tasks are dropped, cut or noted."""

from typing import Any

import numpy as np
import pytest
from drgn import sizeof

from fixtures.demo import DEMOS
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.prstat.prstat import collect_prstat
from msatools.tasks.sampler import ages
from msatools.tasks.table import PID_MAX_LIMIT, TaskTable, believable
from msatools.tasks.waits import TaskClass
from tests.prstat.made import ASLEEP, CLOCKS, NOW, SECOND, START, Made
from tests.support.overlay import lose
from tests.support.tiers import KERNEL

HUGE = (1 << 64) - 1


def record(**columns: int) -> Any:
    counts = ("nvcsw", "sum_exec_ns", "mm")
    kinds = {"pid": "i4", "tgid": "i4", **dict.fromkeys(counts, "u8")}
    return np.array(
        [tuple(columns.get(name, 1) for name in kinds)], list(kinds.items())
    )


@pytest.mark.parametrize("pid", [0, -5, PID_MAX_LIMIT + 1])
@pytest.mark.parametrize("column", ["pid", "tgid"])
def test_record_without_a_valid_pid_is_dropped(column: str, pid: int) -> None:
    losses = LossLog()
    assert len(believable(record(**{column: pid}), losses)) == 0
    assert losses.coverage["tasks_unreadable"] == 1
    assert losses.notes


def test_invalid_record_of_a_running_kernel_is_not_a_loss() -> None:
    losses = LossLog()
    assert len(believable(record(pid=0), losses, may_be_gone=True)) == 0
    assert losses.coverage == {"tasks_gone": 1}
    assert not losses.notes


@pytest.mark.parametrize("column", ["nvcsw", "sum_exec_ns"])
@pytest.mark.parametrize("value", [HUGE, 1 << 63, 1 << 61])
def test_impossible_counts_are_cut(column: str, value: int) -> None:
    losses = LossLog()
    found = believable(record(**{column: value}), losses)
    assert 0 < int(found[column][0]) < value
    assert losses.coverage["counts_broken"] == 1
    assert losses.notes


@pytest.mark.parametrize(
    "sums",
    [
        {"sum_sleep_ns": SECOND, "sum_block_ns": 2 * SECOND},
        {"sum_sleep_ns": SECOND, "sum_block_ns": 0, "iowait_sum_ns": SECOND},
    ],
)
def test_part_of_sleep_larger_than_the_sum(sums: dict[str, int]) -> None:
    made = Made(sums)
    assert made.parts.impossible[0]
    assert not made.parts.known[0]
    assert made.parts.sleeps.sleep[0] is None


@pytest.mark.parametrize("start", [START, NOW + SECOND])
def test_ages_are_at_most_the_lifetime(start: int) -> None:
    values = {
        **dict.fromkeys(("cpu", "on_cpu", "exit_state", "last_queued_ns"), 0),
        **dict.fromkeys(("exec_start_ns", "last_arrival_ns"), SECOND),
        "state": ASLEEP,
        "start_ns": start,
    }
    records = np.array([tuple(values.values())], [(name, "u8") for name in values])
    tasks = TaskTable(records, frozenset(values))
    age, _ = ages(tasks, CLOCKS, np.array([TaskClass.TMR], np.uint8))
    assert age.tolist() == [max(NOW - start, 0)]


def test_unreadable_online_mask() -> None:
    """The present CPUs are used instead, and ages are unchanged."""
    core = TargetSpec(path=str(DEMOS[KERNEL].core), types="btf")
    whole = collect_prstat(open_target(core).prog)
    prog = open_target(core).prog
    mask = prog["__cpu_online_mask"]
    lose(prog, mask.address_, sizeof(mask))
    found = collect_prstat(prog)
    assert found.totals.cpus == whole.totals.cpus
    ages = [[task.class_age_ns for task in report.tasks] for report in (whole, found)]
    assert ages[0] == ages[1]
    assert found.coverage["cpumasks_unreadable"]
    assert "cpumasks_unreadable" not in whole.coverage
