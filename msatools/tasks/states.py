# SPDX-License-Identifier: LGPL-2.1-or-later

"""The state of each thread by one letter, as /proc has it (fs/proc/array.c)."""

import numpy as np
import numpy.typing as npt

from msatools.tasks.table import TaskTable

LETTERS = "RSDTtZXIP"

Letters = npt.NDArray[np.str_]

# Bits of task_struct.__state and exit_state (include/linux/sched.h).
INTERRUPTIBLE = 0x1
UNINTERRUPTIBLE = 0x2
STOPPED = 0x4
TRACED = 0x8
WAKING = 0x200
_NOLOAD = 0x400
_RTLOCK_WAIT = 0x1000
_FROZEN = 0x8000

_BY_BIT = "RSDTtXZP"
"""Of no bit, and of each from the lowest: the highest of a state tells, as in
__task_state_index()."""

_BY_STATE = np.array([_BY_BIT[state.bit_length()] for state in range(0x80)])


def letters(tasks: TaskTable) -> Letters:
    """Tell the state of each thread: one of :data:`LETTERS`.

    Frozen tasks and those that wait for a lock of an RT kernel are ``D``, as they are
    since v6.6 (and R before, which was a mistake).
    """
    state = tasks["state"].astype(np.uint32)
    state = state | tasks["exit_state"].astype(np.uint32)
    state = np.where(state & (_RTLOCK_WAIT | _FROZEN), UNINTERRUPTIBLE, state)
    found: Letters = _BY_STATE[state & (len(_BY_STATE) - 1)]
    idle = UNINTERRUPTIBLE | _NOLOAD
    found[(state & idle) == idle] = "I"
    return found


def asleep(tasks: TaskTable) -> npt.NDArray[np.bool_]:
    """Tell which threads are neither on a CPU nor waiting for one, nor dead.

    Who is stopped or traced is asleep, too.
    """
    sleeps: npt.NDArray[np.bool_] = (tasks["state"] != 0) & (tasks["on_cpu"] == 0)
    sleeps &= tasks["exit_state"] == 0
    return sleeps


def loads(tasks: TaskTable) -> npt.NDArray[np.bool_]:
    """Tell which threads sleep and count in the load average.

    task_contributes_to_load(): uninterruptible, but for those that are frozen or that
    only wait for work.
    """
    state = tasks["state"]
    counted: npt.NDArray[np.bool_] = (state & UNINTERRUPTIBLE) != 0
    counted &= (state & (_NOLOAD | _FROZEN)) == 0
    return counted
