# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a process has counted beside its living threads (``struct signal_struct``).

include/linux/sched/signal.h: a thread that ends adds its counts to its process
(__exit_signal()); a process that is waited for adds its own, and those of its children,
to its parent (wait_task_zombie()).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True)
class ProcessSums:
    """One value a thread of the table, the same for all threads of a process."""

    utime_ns: Nanoseconds
    stime_ns: Nanoseconds
    gtime_ns: Nanoseconds
    """Running a guest, which is in ``utime_ns`` as well."""

    nvcsw: Counts
    nivcsw: Counts
    min_flt: Counts
    maj_flt: Counts


@dataclass(frozen=True)
class Processes:
    """One value a thread of the table, the same for all threads of a process."""

    known: Booleans
    """Whether the process was there and could be read; all else is zero if not."""

    nr_threads: Counts
    """Threads that have not been reaped, a dead leader among them."""

    group_exit_code: Counts
    """What the whole process ends with, or was stopped by: as wait() encodes it."""

    dead: ProcessSums
    """Of threads that have ended; their user and system time in ticks, unscaled."""

    dead_sum_exec_ns: Nanoseconds
    """Time on the CPU of threads that have ended, exactly."""


def read_processes(reader: Reader, tasks: TaskTable, losses: LossLog) -> Processes:
    """Read each process once.

    What a table of a running kernel leads to may be of another process by now, or
    nothing at all: of those that have ended nothing is known, and they are counted.
    """
    signals = _there(
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
    """Read what children have used that were waited for, and theirs.

    Times are scaled to their time on the CPU. All is zero if unreadable, which
    :func:`read_processes` counts.
    """
    signals = read_structs(
        reader,
        "struct signal_struct",
        _REAPED,
        tasks["signal"].astype(np.uint64),
        LossLog(),
    )
    return _sums(_there(reader, tasks, signals, LossLog()), "c", losses)


def read_process(reader: Reader, signal: int) -> Mapping[str, Any]:
    """Read what one process has counted, without the cost of arrays.

    :param signal: address of its ``struct signal_struct``
    :return: Members by their names. Those with a ``c`` before are of children that were
        waited for, the others of threads that have ended.
    :raises drgn.FaultError: if it cannot be read
    """
    return read_struct(reader, "struct signal_struct", _MEMBERS | _REAPED, signal)


def _there(
    reader: Reader, tasks: TaskTable, signals: Structs, losses: LossLog
) -> Structs:
    """Leave only what was read while its process was there.

    A process keeps its ``struct signal_struct`` until its leader is freed. So it is
    enough that the leader has it afterwards: a new task, in the memory of one that has
    ended, has another PID.
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
    there = leaders.readable & signals.readable
    for name in _LEADER:
        there &= leaders[name] == tasks[name]
    if gone := int(np.count_nonzero(signals.readable & ~there & tasks.leaders)):
        losses.coverage["processes_gone"] += gone
    columns = {
        name: np.where(there, column, column.dtype.type(0))
        for name, column in signals.columns.items()
    }
    return Structs(columns, there)


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
