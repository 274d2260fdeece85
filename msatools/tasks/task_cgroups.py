# SPDX-License-Identifier: LGPL-2.1-or-later

"""The control group of each thread, in the default hierarchy (v2) or of its cpuset."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msatools.kernel.cgroups import cgroup_paths
from msatools.kernel.enums import constant
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.tasks.table import TaskTable

UNKNOWN = -1

_CSS_SET = {"cgroup": ("dfl_cgrp",)}
_STATE = {"group": ("cgroup",)}


@dataclass(frozen=True)
class TaskCgroups:
    """One group a thread; threads of one group have one index."""

    paths: tuple[str, ...]
    """By index: what /proc/PID/cgroup has after ``0::``; those of removed groups
    need not differ."""

    index: npt.NDArray[np.int32]
    """By thread; :data:`UNKNOWN` if unreadable, or the kernel has no groups."""

    def path(self, row: int) -> str | None:
        """Return a thread's path."""
        at = int(self.index[row])
        return None if at == UNKNOWN else self.paths[at]


def read_cgroups(reader: Reader, tasks: TaskTable, losses: LossLog) -> TaskCgroups:
    """Read the control group of each thread, each group once."""
    index = np.full(len(tasks), UNKNOWN, np.int32)
    if not tasks.has("cgroups"):
        return TaskCgroups((), index)
    sets = read_structs(
        reader, "struct css_set", _CSS_SET, tasks["cgroups"].astype(np.uint64), losses
    )
    groups, group_of = np.unique(sets["cgroup"], return_inverse=True)
    found = cgroup_paths(reader, groups.astype(np.uint64), losses)
    known = np.array([path is not None for path in found], np.bool_)
    numbers = np.where(known, np.cumsum(known) - 1, UNKNOWN).astype(np.int32)
    index[sets.readable] = numbers[group_of[sets.readable]]
    return TaskCgroups(tuple(path for path in found if path is not None), index)


def read_cpuset_groups(
    reader: Reader, tasks: TaskTable, losses: LossLog
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
        {"cpuset": (f"subsys[{number}]",)},
        tasks["cgroups"].astype(np.uint64),
        losses,
    )
    cpusets, cpuset_of = np.unique(css_sets["cpuset"], return_inverse=True)
    states = read_structs(
        reader,
        "struct cgroup_subsys_state",
        _STATE,
        cpusets.astype(np.uint64),
        losses,
    )
    paths = cgroup_paths(reader, states["group"].astype(np.uint64), losses)
    has_path = np.array([path is not None for path in paths], np.bool_)
    known = css_sets.readable & has_path[cpuset_of]
    index[known] = cpuset_of[known]
    return TaskCgroups(tuple(path or "" for path in paths), index)
