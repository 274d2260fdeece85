# SPDX-License-Identifier: LGPL-2.1-or-later

"""States of threads: the letter of /proc (fs/proc/array.c), asleep, frozen."""

import numpy as np
import numpy.typing as npt

from msatools.errors import MissingError
from msatools.kernel.reader import Reader
from msatools.kernel.structs import Booleans, read_bits
from msatools.tasks.table import TaskTable
from msatools.tasks.text import kernel_symbol

LETTERS = "RSDTtZXIP"

Letters = npt.NDArray[np.str_]

# Bits of task_struct.__state and exit_state (include/linux/sched.h).
INTERRUPTIBLE = 0x1
UNINTERRUPTIBLE = 0x2
STOPPED = 0x4
TRACED = 0x8
WAKEKILL = 0x100
"""``TASK_WAKEKILL``: a fatal signal ends the sleep."""
WAKING = 0x200
_NOLOAD = 0x400
_RTLOCK_WAIT = 0x1000
FROZEN = 0x8000
"""``TASK_FROZEN``: a sleep that allows it is frozen without a wake-up (v6.1)."""

TRAP_FREEZE = 1 << 23
"""``JOBCTL_TRAP_FREEZE`` (include/linux/sched/jobctl.h)."""

_PF_FROZEN = 0x0001_0000
"""A bit of ``task_struct.flags``."""

_BY_BIT = "RSDTtXZP"
"""Of no bit, and of each from the lowest: the highest of a state tells, as in
__task_state_index()."""

_BY_STATE = np.array([_BY_BIT[state.bit_length()] for state in range(0x80)])


def letters(tasks: TaskTable) -> Letters:
    """Return the state of each thread: one of :data:`LETTERS`.

    Frozen tasks and waiters for a sleeping spin lock (PREEMPT_RT) are ``D``, as in
    /proc since v6.6; before, /proc showed R, which was a bug.
    """
    state = tasks["state"].astype(np.uint32)
    state = state | tasks["exit_state"].astype(np.uint32)
    state = np.where(state & (_RTLOCK_WAIT | FROZEN), UNINTERRUPTIBLE, state)
    result: Letters = _BY_STATE[state & (len(_BY_STATE) - 1)]
    idle = UNINTERRUPTIBLE | _NOLOAD
    result[(state & idle) == idle] = "I"
    return result


def asleep(tasks: TaskTable) -> Booleans:
    """Return which threads are neither on a CPU nor waiting for one, nor dead.

    Stopped and traced threads are asleep, too.
    """
    sleeps: Booleans = (tasks["state"] != 0) & (tasks["on_cpu"] == 0)
    sleeps &= tasks["exit_state"] == 0
    return sleeps


def loads(tasks: TaskTable) -> Booleans:
    """Return which threads sleep and count in the load average.

    task_contributes_to_load(): uninterruptible, except if frozen or idle (TASK_NOLOAD).
    """
    state = tasks["state"]
    counted: Booleans = (state & UNINTERRUPTIBLE) != 0
    counted &= (state & (_NOLOAD | FROZEN)) == 0
    return counted


def read_frozen(reader: Reader, tasks: TaskTable) -> Booleans:
    """Return which threads are frozen, by a control group or by a system suspend."""
    addresses = tasks["address"].astype(np.uint64)
    # By cgroup v2: do_freezer_trap(). The bit is also set while a task waits for its
    # child of vfork() or is stopped: for a group to be frozen these count as frozen.
    frozen: Booleans = (tasks["jobctl"] & TRAP_FREEZE) != 0
    frozen &= (tasks["state"] & INTERRUPTIBLE) != 0
    if frozen.any():
        frozen &= read_bits(reader, "struct task_struct", "frozen", addresses)
    frozen |= (tasks["state"] & FROZEN) != 0
    # PF_FROZEN before Linux kernel commit f5d39b020809 ("freezer,sched: Rewrite core
    # freezer logic") (in v6.1), which added freezer_active.
    flagged = (tasks["flags"] & _PF_FROZEN) != 0
    if flagged.any():
        try:
            kernel_symbol(reader.prog, "freezer_active")
        except MissingError:
            frozen |= flagged
    return frozen
