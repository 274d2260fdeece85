# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Time off the CPU as Solaris's prstat splits it: page faults, locks, stops, and sleep.

Pure. For an interval it is known from samples. Linux does not keep it for a whole life:
only the current wait is known.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from msatools.kernel.clocks import Nanoseconds
from msatools.kernel.structs import Booleans
from msatools.prstat.interval import ON_CODE, OffCpuByClass
from msatools.tasks.classes import RUNNABLE, TaskClass, are_any
from msatools.tasks.task_state import AgeBound, TaskState

WAITED = (
    *("code_faults_ns", "data_faults_ns", "locks_ns", "stopped_ns"),
    "untold_ns",
)
"""The columns; other time off the CPU is sleep."""

_FAULTS = (TaskClass.FLT, TaskClass.SWP)
_STOPS = (TaskClass.STP, TaskClass.TRC)
_AWAKE = (*RUNNABLE, TaskClass.WAK, TaskClass.ZMB)

Columns = dict[str, npt.NDArray[Any]]


def within(off: OffCpuByClass) -> Columns:
    """Return the split of each row's time off the CPU within an interval."""
    return {
        "code_faults_ns": off.ns[:, ON_CODE],
        "data_faults_ns": off.ns[:, _FAULTS].sum(1),
        "locks_ns": off.ns[:, TaskClass.LCK],
        "stopped_ns": off.ns[:, _STOPS].sum(1),
        "untold_ns": off.untold_ns,
        "is_estimate": (off.error_ns > 0).any(1),
    }


def lasting(now: TaskState, on_code: Booleans, off_cpu_ns: Nanoseconds) -> Columns:
    """Return the time of each thread's current wait."""
    classes = now.classes
    age = np.where(are_any(classes, _AWAKE), 0, np.minimum(now.age_ns, off_cpu_ns))
    faults = are_any(classes, _FAULTS)
    return {
        "code_faults_ns": np.where(faults & on_code, age, 0),
        "data_faults_ns": np.where(faults & ~on_code, age, 0),
        "locks_ns": np.where(classes == TaskClass.LCK, age, 0),
        "stopped_ns": np.where(are_any(classes, _STOPS), age, 0),
        "untold_ns": off_cpu_ns - age,
        "is_estimate": (now.age_bound != AgeBound.EXACT) & (age > 0),
    }
