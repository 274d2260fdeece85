# SPDX-License-Identifier: LGPL-2.1-or-later

"""Select threads by the control groups, containers and namespaces they are in.

For all commands with rows of tasks: ``--cgroup``, ``--container`` and ``--ns``.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from msatools.kernel.cgroups import DELETED
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans
from msatools.tasks.namespaces import TaskNamespaces, read_namespaces
from msatools.tasks.table import TaskTable
from msatools.tasks.task_cgroups import TaskCgroups, read_cgroups

_CONTAINER = re.compile(r"(?:^|[-_:.])([0-9a-f]{64})(?:$|\.)")
"""How engines name the group of a container: by its ID, with something around it."""


@dataclass(frozen=True)
class Membership:
    """What wanted threads are in; ``None`` is anything, several are any of them."""

    cgroups: tuple[str, ...] | None = None
    """Paths, as in /proc/PID/cgroup, of the groups and all below them; ``*``, ``?`` and
    ``[...]`` stand for parts of a name."""

    containers: tuple[str, ...] | None = None
    """Beginnings of IDs."""

    namespaces: tuple[int, ...] | None = None
    """Inode numbers of namespaces of any kind."""

    @property
    def is_any(self) -> bool:
        """Whether all threads are wanted."""
        return self == Membership()


ANY = Membership()


def read_members(
    reader: Reader,
    tasks: TaskTable,
    wanted: Membership,
    losses: LossLog,
    cgroups: TaskCgroups | None = None,
) -> Booleans:
    """
    Select the threads that are in what is wanted; read no more than that takes.

    :param cgroups: Those of the threads, if they have been read.
    :return: One value a thread.
    """
    if wanted.is_any:
        return np.ones(len(tasks), np.bool_)
    namespaces = None
    if wanted.namespaces is not None:
        namespaces = read_namespaces(reader, tasks, losses)
    return members(wanted, cgroups or read_cgroups(reader, tasks, losses), namespaces)


def members(
    wanted: Membership, cgroups: TaskCgroups, namespaces: TaskNamespaces | None
) -> Booleans:
    """
    Select the threads that are in what is wanted. Pure.

    :param namespaces: Read if *wanted* names some.
    :return: One value a thread.
    """
    fits = [is_in_path(wanted, path) for path in cgroups.paths]
    # What is unknown has the last place.
    keep = np.array([*fits, is_in_path(wanted, None)], np.bool_)[cgroups.index]
    if wanted.namespaces is not None:
        assert namespaces is not None, "namespaces have not been read"
        found = [np.isin(i, wanted.namespaces) for i in namespaces.inodes.values()]
        keep &= np.logical_or.reduce(found)
    return keep


def is_in_path(wanted: Membership, path: str | None) -> bool:
    """
    Return whether a control group is one that is wanted, in a wanted container.

    :param path: As in /proc/PID/cgroup; ``None``, which is unknown, fits only if any
        does.
    """
    cgroups, containers = wanted.cgroups, wanted.containers
    if path is None:
        return cgroups is None and containers is None
    return (cgroups is None or any(is_below(path, each) for each in cgroups)) and (
        containers is None
        or any(each.startswith(containers) for each in container_ids(path))
    )


def is_below(path: str, pattern: str) -> bool:
    """
    Return whether a control group is one that a pattern names, or below it.

    >>> is_below("/a/web-1/x", "/a/web-*"), is_below("/ab", "/a"), is_below("/a", "/")
    (True, False, True)
    """
    names = [name for name in path.removesuffix(DELETED).split("/") if name]
    wanted = [name for name in pattern.removesuffix(DELETED).split("/") if name]
    # A name may itself have what stands for parts of a name.
    return len(wanted) <= len(names) and all(
        name == part or fnmatchcase(name, part)
        for name, part in zip(names, wanted, strict=False)
    )


def container_ids(path: str) -> tuple[str, ...]:
    """
    Return the IDs of the containers that a control group is in, outermost first.

    >>> container_ids("/user.slice/session-1.scope")
    ()
    """
    found = (_CONTAINER.search(name) for name in path.split("/"))
    return tuple(match[1] for match in found if match)


def container_path(path: str) -> str:
    """
    Return the control group of the outermost container that a group is in.

    :return: *path* itself if it leads into none.
    """
    names = path.split("/")
    for at, name in enumerate(names):
        if _CONTAINER.search(name):
            return "/".join(names[: at + 1])
    return path
