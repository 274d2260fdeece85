# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which CPUs each thread may run on, and the cpuset that it is in."""

from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.cgroups import cgroup_paths
from msatools.kernel.cpumask import Cpus, Masks, cpus_of, different_masks
from msatools.kernel.enums import constant
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.tasks.table import TaskTable
from msatools.tasks.task_cgroups import UNKNOWN, TaskCgroups

_STATE = {"group": ("u8", ("cgroup",))}


@dataclass(frozen=True)
class Affinities:
    """Which CPUs each thread may run on."""

    masks: Masks
    """Each different mask once: shape ``(masks, nr_cpu_ids)``."""

    index: npt.NDArray[np.intp]
    """By thread: which of the masks is its own."""

    def cpus(self, row: int) -> Cpus:
        """List the CPUs of a thread: ``Cpus_allowed_list`` of /proc/PID/status."""
        return cpus_of(self.masks[self.index[row]])


def affinities(tasks: TaskTable, prog: drgn.Program) -> Affinities:
    """Tell where all threads may run.

    :raises KeyError: if the number of CPUs is lost
    """
    return Affinities(*different_masks(tasks["cpus_mask"], prog))


def read_cpuset_groups(
    reader: Reader, tasks: TaskTable, findings: LossLog
) -> TaskCgroups:
    """Read the group that each thread has its cpuset from.

    In cgroup v1 that is one of an own hierarchy, in v2 the nearest above the thread's
    own where the controller is on. Unknown for all if there are no cpusets.
    """
    index = np.full(len(tasks), UNKNOWN, np.int32)
    try:
        number = constant(reader.prog, "cpuset_cgrp_id")
    except LookupError:
        return TaskCgroups((), index)
    css_sets = read_structs(
        reader,
        "struct css_set",
        {"cpuset": ("u8", (f"subsys[{number}]",))},
        tasks["cgroups"].astype(np.uint64),
        findings,
    )
    cpusets, cpuset_of = np.unique(css_sets["cpuset"], return_inverse=True)
    states = read_structs(
        reader,
        "struct cgroup_subsys_state",
        _STATE,
        cpusets.astype(np.uint64),
        findings,
    )
    paths = cgroup_paths(reader, states["group"].astype(np.uint64), findings)
    has_path = np.array([path is not None for path in paths], np.bool_)
    known = css_sets.readable & has_path[cpuset_of]
    index[known] = cpuset_of[known]
    return TaskCgroups(tuple(path or "" for path in paths), index)
