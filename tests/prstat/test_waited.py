# SPDX-License-Identifier: LGPL-2.1-or-later

"""Off-CPU time in Solaris's categories, for threads made by hand."""

from typing import Any

import numpy as np

from msatools.prstat.interval import ON_CODE, OffCpuByClass, lasting, within
from msatools.tasks.sampler import AgeBound, TaskState
from msatools.tasks.waits import TaskClass


def row_of(columns: dict[str, Any], row: int) -> dict[str, int]:
    """Return a row's values that are not 0."""
    return {name: int(values[row]) for name, values in columns.items() if values[row]}


def test_within_an_interval() -> None:
    ns, error = np.zeros((2, 2, len(TaskClass) + 1), np.int64)
    ns[0, [TaskClass.LCK, TaskClass.FLT, TaskClass.SWP, ON_CODE]] = 5, 2, 1, 7
    ns[0, [TaskClass.STP, TaskClass.TRC, TaskClass.TMR]] = 3, 1, 90
    error[1, TaskClass.TMR] = 1
    ns[1, TaskClass.TMR] = 40
    made = within(OffCpuByClass(ns, error, np.array([0, 6]), np.zeros(2, np.bool_)))
    assert row_of(made, 0) == {
        "code_faults_ns": 7,
        "data_faults_ns": 3,
        "locks_ns": 5,
        "stopped_ns": 4,
    }
    assert row_of(made, 1) == {"untold_ns": 6, "is_estimate": 1}


def test_over_a_life_only_the_current_wait() -> None:
    classes = [TaskClass.LCK, TaskClass.FLT, TaskClass.SWP, TaskClass.STP]
    classes += [TaskClass.LAT, TaskClass.CPU, TaskClass.ZMB, TaskClass.WAK]
    count = len(classes)
    bound = np.full(count, AgeBound.EXACT, np.uint8)
    bound[3] = bound[4] = AgeBound.UPPER
    nothing: Any = None
    now = TaskState(
        np.array(classes, np.uint8), np.arange(10, 10 + count), bound, nothing, ()
    )
    on_code = np.arange(count) == 1
    made = lasting(now, on_code, np.full(count, 12, np.int64))
    assert row_of(made, 0) == {"locks_ns": 10, "untold_ns": 2}
    assert row_of(made, 1) == {"code_faults_ns": 11, "untold_ns": 1}
    assert row_of(made, 2) == {"data_faults_ns": 12}
    # It is older than the total off-CPU time, because clocks differ.
    assert row_of(made, 3) == {"stopped_ns": 12, "is_estimate": 1}
    for row in range(4, count):
        assert row_of(made, row) == {"untold_ns": 12}
