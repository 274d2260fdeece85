# SPDX-License-Identifier: LGPL-2.1-or-later

"""Involuntary switches and moves by CPU, which the kernel counts by task alone.

A task that ran on several CPUs counts for the one that it is on, or was on last; tasks
that have ended do not count.
"""

import numpy as np
import numpy.typing as npt

from msatools.cpus.counts import Counts, counts
from msatools.tasks.table import TaskTable

_IDENTITY = ("address", "pid", "start_ns")


def involuntary(
    tasks: TaskTable, cpus: npt.NDArray[np.int64], before: TaskTable | None = None
) -> Counts:
    """Count the switches of tasks that would have gone on running.

    :param cpus: the CPUs to tell of
    :param before: an earlier look; then those since that
    """
    return _by_cpu(tasks, "nivcsw", cpus, before)


def moves(
    tasks: TaskTable, cpus: npt.NDArray[np.int64], before: TaskTable | None = None
) -> Counts | None:
    """Count how often tasks were moved to another CPU; ``None`` if that is not kept.

    :param cpus: the CPUs to tell of
    :param before: an earlier look; then the moves since that
    """
    if not tasks.has("migrations"):
        return None
    return _by_cpu(tasks, "migrations", cpus, before)


def _by_cpu(
    tasks: TaskTable,
    column: str,
    cpus: npt.NDArray[np.int64],
    before: TaskTable | None,
) -> Counts:
    numbers = tasks[column].astype(np.int64)
    if before is not None:
        rows, rows_before = _same(tasks, before)
        # A task that is new counts with all that it has.
        numbers[rows] -= before[column].astype(np.int64)[rows_before]
        numbers = np.maximum(numbers, 0)
    here = np.isin(tasks["cpu"], cpus)
    places = np.searchsorted(cpus, tasks["cpu"][here])
    sums = np.zeros(len(cpus), np.int64)
    np.add.at(sums, places, numbers[here])
    return counts(sums, np.ones(len(cpus), np.bool_))


def _same(
    tasks: TaskTable, before: TaskTable
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Find the rows of the tasks that were there before, and those there."""
    now, then = (
        np.rec.fromarrays([table[name] for name in _IDENTITY])
        for table in (tasks, before)
    )
    _, rows, rows_before = np.intersect1d(now, then, return_indices=True)
    return rows, rows_before
