# SPDX-License-Identifier: LGPL-2.1-or-later

"""The rows of CPUs, built from the data read of each.

The kernel counts involuntary switches and migrations only by task. They are added to
the CPU that the task is or was last on; those of dead tasks are not included.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.cpus.counts import Counts, counts
from msatools.cpus.masks import CpuMasks
from msatools.cpus.model import Cpu, Processor, Running, RunQueue, State
from msatools.tasks.table import TaskTable


class Parts(Struct, frozen=True, kw_only=True):
    """Data of the CPUs."""

    cpus: Sequence[int]
    masks: CpuMasks
    no_intr: Collection[int]
    """CPUs that no interrupt of a device may go to."""

    sets: Mapping[int, str]
    counters: Mapping[int, Mapping[str, int | None]]
    processors: Sequence[Processor]
    """Processors in the order of ``cpus``."""

    queues: Mapping[int, RunQueue]
    icsw: Counts | None
    migr: Counts | None


def cpu_rows(parts: Parts) -> tuple[Cpu, ...]:
    """Return the row of each CPU."""
    return tuple(_row(parts, index, cpu) for index, cpu in enumerate(parts.cpus))


def _row(parts: Parts, index: int, cpu: int) -> Cpu:
    processor, queue = parts.processors[index], parts.queues.get(cpu)
    return Cpu(
        cpu=cpu,
        online=cpu in parts.masks.online,
        set=parts.sets[cpu],
        state=_states(parts, cpu, processor, queue),
        icsw=None if parts.icsw is None else parts.icsw.at(index),
        migr=None if parts.migr is None else parts.migr.at(index),
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
        # stop_machine() and migrations run in the stop class.
        "stopped": current is not None and current.sched_class == "stop",
        "idle": current is not None and current.sched_class == "idle",
    }
    return tuple(state for state, does_hold in holds.items() if does_hold)


_IDENTITY = ("address", "pid", "start_ns")


def involuntary(
    tasks: TaskTable, cpus: npt.NDArray[np.int64], before: TaskTable | None = None
) -> Counts:
    """Count involuntary context switches by CPU.

    :param cpus: CPUs of the result
    :param before: an earlier table, to count the switches since then
    """
    return _by_cpu(tasks, "nivcsw", cpus, before)


def moves(
    tasks: TaskTable, cpus: npt.NDArray[np.int64], before: TaskTable | None = None
) -> Counts | None:
    """Count migrations by CPU; ``None`` if the kernel does not keep them.

    :param cpus: CPUs of the result
    :param before: an earlier table, to count the migrations since then
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
        # A new task counts with all its events.
        numbers[rows] -= before[column].astype(np.int64)[rows_before]
        numbers = np.maximum(numbers, 0)
    here = np.isin(tasks["cpu"], cpus)
    indices = np.searchsorted(cpus, tasks["cpu"][here])
    sums = np.zeros(len(cpus), np.int64)
    np.add.at(sums, indices, numbers[here])
    return counts(sums, np.ones(len(cpus), np.bool_))


def _same(
    tasks: TaskTable, before: TaskTable
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Find the tasks that are in both tables: their rows in each."""
    now, then = (
        np.rec.fromarrays([table[name] for name in _IDENTITY])
        for table in (tasks, before)
    )
    _, rows, rows_before = np.intersect1d(now, then, return_indices=True)
    return rows, rows_before
