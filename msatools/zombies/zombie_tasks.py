# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find dead tasks that are not reaped, and read what the kernel still has of them.

kernel/exit.c. A leader stays until its parent reaps it. Another thread is released at
once, unless it is traced: then it stays until its tracer reaps it.
"""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.clocks import Clocks, Nanoseconds
from msatools.kernel.pidnamespaces import innermost_numbers
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans, read_structs
from msatools.model import values
from msatools.tasks.classes import TaskClass
from msatools.tasks.stackmemory import Rows
from msatools.tasks.states import asleep
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import ages

UNKNOWN = -1

Numbers = npt.NDArray[np.int64]

# Bits of task_struct.exit_state (include/linux/sched.h); both while a tracer reaps it.
_DEAD = 0x10
_ZOMBIE = 0x20

_GROUP_EXIT = 0x4
"""``SIGNAL_GROUP_EXIT``, a bit of ``signal_struct.flags``."""

_PROCESS = {
    "live": ("live.counter",),
    "nr_threads": ("nr_threads",),
    "flags": ("flags",),
    "exit_code": ("group_exit_code",),
}
_SPACE = {"inode": ("ns.inum",)}


class Aged(Struct, frozen=True):
    """Time that each task of a table has been in its state."""

    age_ns: Nanoseconds
    age_bound: npt.NDArray[np.uint8]
    """Members of :class:`msatools.tasks.task_state.AgeBound`."""


def read_ages(tasks: TaskTable, clocks: Clocks) -> Aged:
    """Return the time that each task has been dead, asleep, running or runnable."""
    classes = np.where(asleep(tasks), TaskClass.OTH.value, TaskClass.LAT.value)
    classes[tasks["exit_state"] != 0] = TaskClass.ZMB.value
    return Aged(*ages(tasks, clocks, classes.astype(np.uint8)))


class Dead(Struct, frozen=True):
    """One value for each dead task that is not reaped, in the order of the table."""

    row: Rows
    """Row in the table of tasks."""

    leads: Booleans
    """Whether it is the leader of its process."""

    reaped: Booleans
    """Whether it is being reaped right now."""

    exit_code: Numbers
    """Status as of wait()."""

    exit_signal: Numbers
    """Signal sent to the parent; -1 for a thread that is not a leader."""

    ptraced: Booleans
    real_parent: Addresses
    """Address of the parent's ``struct task_struct``."""

    parent: Addresses
    """Address of the tracer's if it is traced, else the same."""

    process: Addresses
    """Address of its ``struct signal_struct``."""

    thread_pid: Addresses
    """Address of its ``struct pid``; 0 if already detached."""

    threads: Numbers
    """Number of living threads of its process; :data:`UNKNOWN` if unreadable."""

    others: Numbers
    """Number of other threads of its process that are not reaped; :data:`UNKNOWN` if
    unreadable."""

    namespace: Numbers
    """Inode number of its PID namespace; :data:`UNKNOWN` if unreadable."""

    ns_pid: Numbers
    """Its PID there; 0 in the initial namespace."""

    age_ns: Nanoseconds
    age_bound: npt.NDArray[np.uint8]
    """Members of :class:`msatools.tasks.task_state.AgeBound`."""

    def __len__(self) -> int:
        return len(self.row)

    def only(self, wanted: Booleans | Rows) -> "Dead":
        """Return some of them."""
        return Dead(*(column[wanted] for column in values(self).values()))


def zombie_rows(tasks: TaskTable) -> Rows:
    """Return the rows of dead tasks that are not reaped, or just being reaped."""
    exits = tasks["exit_state"]
    stays = (exits == _ZOMBIE) & (tasks["ptrace"] != 0)
    return np.flatnonzero((exits != 0) & (tasks.leaders | stays))


def read_dead(reader: Reader, tasks: TaskTable, aged: Aged, losses: LossLog) -> Dead:
    """Read the data of each dead task, with four bulk reads in total."""
    row = zombie_rows(tasks)
    part = TaskTable(tasks.records[row], tasks.columns)
    process = part["signal"].astype(np.uint64)
    counts = read_structs(reader, "struct signal_struct", _PROCESS, process, losses)
    whole = counts.readable & ((counts["flags"] & _GROUP_EXIT) != 0)
    thread_pid = part["thread_pid"].astype(np.uint64)
    namespace, ns_pid = read_numbers(reader, thread_pid, losses)
    known = counts.readable
    return Dead(
        row=row,
        leads=part.leaders,
        reaped=(part["exit_state"] & _DEAD) != 0,
        # wait_task_zombie()
        exit_code=np.where(whole, counts["exit_code"], part["exit_code"]).astype("i8"),
        exit_signal=part["exit_signal"].astype(np.int64),
        ptraced=part["ptrace"] != 0,
        real_parent=part["real_parent"].astype(np.uint64),
        parent=part["parent"].astype(np.uint64),
        process=process,
        thread_pid=thread_pid,
        threads=np.where(known, counts["live"], UNKNOWN).astype(np.int64),
        others=np.where(known, counts["nr_threads"] - 1, UNKNOWN).astype(np.int64),
        namespace=namespace,
        ns_pid=ns_pid,
        age_ns=aged.age_ns[row],
        age_bound=aged.age_bound[row],
    )


def read_numbers(
    reader: Reader, pids: Addresses, losses: LossLog
) -> tuple[Numbers, Numbers]:
    """Return the PID namespace of each ``struct pid``, and its PID there.

    :return: The inode numbers, :data:`UNKNOWN` if unreadable; and the PIDs, 0 in the
        initial namespace.
    """
    space, numbers = innermost_numbers(reader, pids, losses)
    inodes = read_structs(reader, "struct pid_namespace", _SPACE, space, losses)
    found = np.where(inodes.readable, inodes["inode"].astype(np.int64), UNKNOWN)
    return found, numbers
