# SPDX-License-Identifier: LGPL-2.1-or-later

"""The rows of CPUs, made from what was read of each.

The kernel counts involuntary switches and moves by task alone. Those of a task that ran
on several CPUs count for the CPU that it is on, or was on last; those of tasks that
have ended do not count.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msatools.cpus.counts import Counts, counts
from msatools.cpus.masks import CpuMasks
from msatools.cpus.model import Cpu, Processor, Running, RunQueue, State
from msatools.tasks.table import TaskTable


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is known of the CPUs."""

    cpus: Sequence[int]
    masks: CpuMasks
    no_intr: Collection[int]
    """Those that no interrupt of a device may go to."""

    sets: Mapping[int, str]
    counters: Mapping[int, Mapping[str, int | None]]
    processors: Sequence[Processor]
    """One a CPU, in the order of ``cpus``."""

    queues: Mapping[int, RunQueue]
    icsw: Counts | None
    migr: Counts | None


def cpu_rows(parts: Parts) -> tuple[Cpu, ...]:
    """Make the row of each CPU."""
    return tuple(_row(parts, place, cpu) for place, cpu in enumerate(parts.cpus))


def _row(parts: Parts, place: int, cpu: int) -> Cpu:
    processor, queue = parts.processors[place], parts.queues.get(cpu)
    return Cpu(
        cpu=cpu,
        online=cpu in parts.masks.online,
        set=parts.sets[cpu],
        state=_states(parts, cpu, processor, queue),
        icsw=None if parts.icsw is None else parts.icsw.at(place),
        migr=None if parts.migr is None else parts.migr.at(place),
        current=_running(queue),
        processor=processor,
        **parts.counters[cpu],  # type: ignore[arg-type]
    )


def _running(queue: RunQueue | None) -> Running | None:
    if queue is None or queue.current is None:
        return None
    task = queue.current
    return Running(pid=task.pid, comm=task.comm, sched_class=task.sched_class)


def _states(
    parts: Parts, cpu: int, processor: Processor, queue: RunQueue | None
) -> tuple[State, ...]:
    masks = parts.masks
    online = cpu in masks.online
    current = queue.current if queue else None
    holds: Mapping[State, bool] = {
        "on": online,
        "off": not online,
        "no-intr": online and cpu in parts.no_intr,
        "isolated": cpu in (masks.isolated or ()),
        "nohz_full": cpu in (masks.nohz_full or ()),
        "rcu_nocb": cpu in (masks.rcu_nocb or ()),
        "inactive": online and processor.active is False,
        # stop_machine() and moves of tasks run in the class that nothing preempts.
        "stopped": current is not None and current.sched_class == "stop",
        "idle": current is not None and current.sched_class == "idle",
    }
    return tuple(state for state, does_hold in holds.items() if does_hold)


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
