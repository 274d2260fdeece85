# SPDX-License-Identifier: LGPL-2.1-or-later

"""The control group of each thread: in the default hierarchy (v2), or its cpuset."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import MissingError
from msatools.kernel.cgroups import cgroup_paths
from msatools.kernel.enums import constant
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import read_structs
from msatools.tasks.table import TaskTable

UNKNOWN = -1

_CSS_SET = {"cgroup": ("dfl_cgrp",)}
_STATE = {"group": ("cgroup",)}


class TaskCgroups(Struct, frozen=True):
    """One group a thread; threads of the same group have the same index."""

    paths: tuple[str, ...]
    """Paths by index, as after ``0::`` in /proc/PID/cgroup; removed groups may have the
    same path."""

    index: npt.NDArray[np.int32]
    """Index by thread; :data:`UNKNOWN` if unreadable or without control groups."""

    def path(self, row: int) -> str | None:
        """Return a thread's path; ``None`` if unknown."""
        index = int(self.index[row])
        return None if index == UNKNOWN else self.paths[index]


def read_cgroups(reader: Reader, tasks: TaskTable, losses: LossLog) -> TaskCgroups:
    """Read the control group of each thread, each group once."""
    index = np.full(len(tasks), UNKNOWN, np.int32)
    if not tasks.has("cgroups"):
        return TaskCgroups((), index)
    sets = read_structs(
        reader, "struct css_set", _CSS_SET, tasks["cgroups"].astype(np.uint64), losses
    )
    groups = distinct(sets["cgroup"])
    group_of = np.searchsorted(groups, sets["cgroup"])
    paths = cgroup_paths(reader, groups.astype(np.uint64), losses)
    known = np.array([path is not None for path in paths], np.bool_)
    indices = np.where(known, np.cumsum(known) - 1, UNKNOWN).astype(np.int32)
    index[sets.readable] = indices[group_of[sets.readable]]
    return TaskCgroups(tuple(path for path in paths if path is not None), index)


def read_cpuset_groups(
    reader: Reader, tasks: TaskTable, losses: LossLog
) -> TaskCgroups:
    """Read the control group of each thread's cpuset.

    In cgroup v1 it is in the hierarchy of the cpuset controller; in v2 it is the
    thread's own group, or the nearest ancestor with the controller enabled. Unknown for
    all threads if the kernel has no cpusets.
    """
    index = np.full(len(tasks), UNKNOWN, np.int32)
    try:
        subsystem = constant(reader.prog, "cpuset_cgrp_id")
    except MissingError:
        return TaskCgroups((), index)
    css_sets = read_structs(
        reader,
        "struct css_set",
        {"cpuset": (f"subsys[{subsystem}]",)},
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
