# SPDX-License-Identifier: LGPL-2.1-or-later

"""Processes and threads summed by user, control group and other keys."""

import numpy as np
from msgspec.structs import replace

from msatools.prstat.interval import ON_CODE, OffCpuByClass
from msatools.prstat.select import group_by, group_by_class
from msatools.tasks.waits import TaskClass
from tests.prstat.maderows import MIB, MadeThreads

ID = "0123456789abcdef" * 4


def test_threads_with_a_dead_or_unselected_leader() -> None:
    dead = {"has_mm": False, "size_bytes": 0, "rss_bytes": 0, "threads": 2}
    rows = MadeThreads({"pid": 2, **dead}, {"pid": 3, "tgid": 2}).by_thread()
    for some, threads in ((rows, 2), (rows[1:], 1)):
        (group,) = group_by("user", some)
        found = group.processes, group.threads, group.size_bytes
        assert found == (1, threads, 8 * MIB)


def test_control_groups() -> None:
    paths = ("/", f"/docker/{ID}/a", f"/docker/{ID}/b", "/user")
    threads = [
        {"pid": n, "cgroup": index} for n, index in enumerate((0, 1, 2, 2, 3, -1), 1)
    ]
    found = group_by("cgroup", MadeThreads(*threads, paths=paths).by_process())
    counts = {group.key: group.processes for group in found}
    assert counts == {"/": 1, f"/docker/{ID}": 3, "/user": 1, "-": 1}


CONTAINED = (
    *("/", f"/docker/{ID}/a", f"/docker/{ID}/docker/{ID[::-1]}", "/user"),
    f"/docker/{ID[::-1]}",
)


def test_containers() -> None:
    """Threads are grouped by the outermost container in their control group's path."""
    threads = [
        {"pid": n, "cgroup": index} for n, index in enumerate((0, 1, 2, 3, 4, -1), 1)
    ]
    found = group_by("container", MadeThreads(*threads, paths=CONTAINED).by_process())
    counts = {group.key: group.processes for group in found}
    assert counts == {"-": 3, ID: 2, ID[::-1]: 1}


WAITING = (
    {"pid": 1, "class": TaskClass.LCK, "age_ns": 5, "threads": 2},
    {"pid": 2, "tgid": 1, "class": TaskClass.POL, "age_ns": 7, "threads": 2},
    {"pid": 3, "class": TaskClass.LCK, "age_ns": 9},
)


def test_classes_of_an_interval() -> None:
    """Times include threads that are in another class at the end."""
    made = MadeThreads(*(thread | {"user_ns": 4} for thread in WAITING))
    ns = np.zeros((3, ON_CODE + 1), np.int64)
    ns[0, TaskClass.LCK] = 100
    ns[1, TaskClass.LCK], ns[1, TaskClass.FLT], ns[1, ON_CODE] = 50, 3, 4
    error = np.where(ns == 50, 6, 0)
    off = OffCpuByClass(ns, error, np.array([0, 0, 8]), np.array([True, False, False]))
    made.spent = replace(made.spent, off_cpu=off)
    for rows in (made.by_process(), made.by_thread()):
        found = {
            group.key: (group.ns, group.error_ns) for group in group_by_class(rows)
        }
        assert found == {
            "LCK": (150, 6),
            "USR": (12, 0),
            "-": (8, 0),
            "FLT": (7, 0),
            "POL": (0, 0),
        }
