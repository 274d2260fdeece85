# SPDX-License-Identifier: LGPL-2.1-or-later

"""Classes of what a task is doing now."""

from collections.abc import Sequence
from enum import IntEnum
from functools import cache

import numpy as np
import numpy.typing as npt


class TaskClass(IntEnum):
    """What a task is doing now; the names appear in the output."""

    CPU = 0
    """It runs; on a live kernel its mode is unknown."""
    USR = 1
    """It runs in user mode."""
    SYS = 2
    """It runs in the kernel."""
    INT = 3
    """Its CPU handles an interrupt."""
    LAT = 4
    """It waits for a CPU."""
    LCK = 5
    """A futex."""
    KLK = 6
    """A lock, or another thread's work, within the kernel."""
    FLK = 7
    """A lock on a file."""
    POL = 8
    """Events: poll, select, epoll; a virtual CPU that is halted."""
    FLT = 9
    """A page fault."""
    SWP = 10
    """A page that was swapped out."""
    RCL = 11
    """Memory reclaim, or the limit of its memory cgroup."""
    DSK = 12
    """A disk, a local or network file system, or another device."""
    PIP = 13
    """Data of a pipe or of a pipe-like file."""
    NET = 14
    """A socket."""
    TMR = 15
    """Time."""
    WAI = 16
    """Another process."""
    SIG = 17
    """A signal."""
    IPC = 18
    """A message queue or semaphore of System V or POSIX, or Binder."""
    TTY = 19
    """A terminal."""
    URG = 20
    """io_uring."""
    KTW = 21
    """A kernel thread that waits for work."""
    STP = 22
    """It is stopped or frozen."""
    TRC = 23
    """Its tracer."""
    ZMB = 24
    """It is dead."""
    OTH = 25
    """Something else."""
    WAK = 26
    """It is being woken and is not on a run queue yet."""


RUNNABLE = (
    *(TaskClass.CPU, TaskClass.USR, TaskClass.SYS, TaskClass.INT),
    TaskClass.LAT,
)
"""Classes of threads that run or could run."""


def are_any(
    classes: npt.NDArray[np.uint8], wanted: Sequence[TaskClass]
) -> npt.NDArray[np.bool_]:
    """Return whether each class is one of the wanted ones.

    np.isin() takes ten times as long for some hundred tasks, and each sample of a
    running kernel calls this a dozen times.
    """
    matches: npt.NDArray[np.bool_] = _wanted(tuple(wanted))[classes]
    return matches


@cache
def _wanted(classes: tuple[TaskClass, ...]) -> npt.NDArray[np.bool_]:
    wanted = np.zeros(np.iinfo(np.uint8).max + 1, np.bool_)
    wanted[list(classes)] = True
    return wanted
