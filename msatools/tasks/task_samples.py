# SPDX-License-Identifier: LGPL-2.1-or-later

"""Samples of all threads; match the threads of two samples. Pure."""

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.clocks import Clocks, Nanoseconds
from msatools.kernel.rows import NOT_FOUND, find_rows
from msatools.kernel.structs import Booleans
from msatools.tasks.microstates import Microstates
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState

NOBODY = NOT_FOUND

Rows = npt.NDArray[np.intp]
Counts = npt.NDArray[np.int64]
Values = npt.NDArray[Any]


class TaskSample(Struct, frozen=True):
    """All threads at one moment."""

    tasks: TaskTable
    clocks: Clocks
    states: Microstates
    now: TaskState
    class_known: Booleans
    """Whether each thread's class is known: not if it ran while it was read."""

    on_code: Booleans
    """Whether each thread is in a page fault on code."""

    took_ns: int
    """Time from the start of the sample until its clocks were read, by this program's
    clock: threads born meanwhile may be missing."""


def match(before: TaskTable, after: TaskTable) -> Rows:
    """Find each thread of one table in an earlier one: its row, or :data:`NOBODY`."""
    row = find_rows(before["address"], after["address"])
    if not len(before):
        return row
    same = (before["pid"][row] == after["pid"]) & (
        before["start_ns"][row] == after["start_ns"]
    )
    # A thread that calls exec() takes the leader's position (de_thread()).
    follows = ~before.leaders[row] & after.leaders
    same |= follows & (before["tgid"][row] == after["tgid"])
    return np.where(same, row, NOBODY)


def cpu_of(sample: TaskSample) -> Nanoseconds:
    """Return each thread's CPU time."""
    return sample.states.user_ns + sample.states.system_ns
