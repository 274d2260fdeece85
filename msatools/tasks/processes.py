# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts of dead threads and reaped children of a process (``struct signal_struct``).

include/linux/sched/signal.h: a thread that exits adds its counts to its process
(__exit_signal()). A process that is reaped adds its own counts, and those of its
children, to its parent's (wait_task_zombie()).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, Structs, read_struct, read_structs
from msatools.tasks.table import TaskTable, cut

Counts = npt.NDArray[np.int64]

_SUMS = ("utime", "stime", "gtime", "nvcsw", "nivcsw", "min_flt", "maj_flt")
_MEMBERS = {
    "nr_threads": ("nr_threads",),
    "group_exit_code": ("group_exit_code",),
    "sum_exec": ("sum_sched_runtime",),
    **{name: (name,) for name in _SUMS},
}
_LEADER = {"tgid": ("tgid",), "signal": ("signal",)}
_REAPED = {f"c{name}": (f"c{name}",) for name in _SUMS}


class ProcessSums(Struct, frozen=True):
    """One value a thread of the table, the same for all threads of a process."""

    utime_ns: Nanoseconds
    stime_ns: Nanoseconds
    gtime_ns: Nanoseconds
    """Time running a guest, included in ``utime_ns``."""

    nvcsw: Counts
    nivcsw: Counts
    min_flt: Counts
    maj_flt: Counts


class Processes(Struct, frozen=True):
    """One value a thread of the table, the same for all threads of a process."""

    known: Booleans
    """Whether the process existed and could be read; other values are zero if not."""

    nr_threads: Counts
    """Number of threads that have not been reaped, including a dead leader."""

    group_exit_code: Counts
    """Exit code of the process, or the signal that stopped it, as wait() encodes it."""

    dead: ProcessSums
    """Sums over dead threads; user and system time by ticks, unscaled."""

    dead_sum_exec_ns: Nanoseconds
    """Exact CPU time of dead threads."""


def read_processes(reader: Reader, tasks: TaskTable, losses: LossLog) -> Processes:
    """Read each process once.

    On a running kernel a process of the table may have ended since, and its memory may
    have been freed or reused: such processes are unknown, and counted.
    """
    signals = _keep_existing(
        reader,
        tasks,
        read_structs(
            reader,
            "struct signal_struct",
            _MEMBERS,
            tasks["signal"].astype(np.uint64),
            losses,
        ),
        losses,
    )
    return Processes(
        known=signals.readable,
        nr_threads=signals["nr_threads"].astype(np.int64).clip(0),
        group_exit_code=signals["group_exit_code"].astype(np.int64),
        dead=_sums(signals, "", losses),
        dead_sum_exec_ns=cut(signals["sum_exec"], losses),
    )


def read_reaped(reader: Reader, tasks: TaskTable, losses: LossLog) -> ProcessSums:
    """Read the sums over reaped children, including those that they reaped.

    Times are scaled to the CPU time. All is zero if unreadable, which
    :func:`read_processes` counts.
    """
    signals = read_structs(
        reader,
        "struct signal_struct",
        _REAPED,
        tasks["signal"].astype(np.uint64),
        LossLog(),
    )
    return _sums(_keep_existing(reader, tasks, signals, LossLog()), "c", losses)


def read_process(reader: Reader, signal: int) -> Mapping[str, Any]:
    """Read the counts of one process, without the cost of arrays.

    :param signal: address of its ``struct signal_struct``
    :return: Members by name. Names with a leading ``c`` are of reaped children, the
        others of dead threads.
    :raises drgn.FaultError: if it cannot be read
    """
    return read_struct(reader, "struct signal_struct", _MEMBERS | _REAPED, signal)


def _keep_existing(
    reader: Reader, tasks: TaskTable, signals: Structs, losses: LossLog
) -> Structs:
    """Drop what was read after its process ended.

    A process keeps its ``struct signal_struct`` until its leader is freed. So it is
    enough that the leader still has it afterwards: a new task in reused memory has
    another PID.
    """
    if not reader.is_live:
        return signals
    leaders = read_structs(
        reader,
        "struct task_struct",
        _LEADER,
        tasks["group_leader"].astype(np.uint64),
        LossLog(),
    )
    exists = leaders.readable & signals.readable
    for name in _LEADER:
        exists &= leaders[name] == tasks[name]
    if gone := int(np.count_nonzero(signals.readable & ~exists & tasks.leaders)):
        losses.coverage["processes_gone"] += gone
    columns = {
        name: np.where(exists, column, column.dtype.type(0))
        for name, column in signals.columns.items()
    }
    return Structs(columns, exists)


def _sums(signals: Structs, prefix: str, losses: LossLog) -> ProcessSums:
    column = {name: cut(signals[prefix + name], losses) for name in _SUMS}
    return ProcessSums(
        utime_ns=column["utime"],
        stime_ns=column["stime"],
        gtime_ns=column["gtime"],
        nvcsw=column["nvcsw"],
        nivcsw=column["nivcsw"],
        min_flt=column["min_flt"],
        maj_flt=column["maj_flt"],
    )
