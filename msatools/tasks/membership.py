# SPDX-License-Identifier: LGPL-2.1-or-later

"""Select threads by control group, container and namespace.

For the options ``--cgroup``, ``--container`` and ``--ns`` of all commands.
"""

import re
from fnmatch import fnmatchcase

import numpy as np
from msgspec import Struct

from msatools.kernel.cgroups import DELETED
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Booleans
from msatools.tasks.namespaces import TaskNamespaces, read_namespaces
from msatools.tasks.table import TaskTable
from msatools.tasks.task_cgroups import TaskCgroups, read_cgroups

_CONTAINER = re.compile(r"(?:^|[-_:.])([0-9a-f]{64})(?:$|\.)")
"""Container engines put the ID into the name of the container's control group."""


class Membership(Struct, frozen=True):
    """Where wanted threads are: in any of the given; ``None`` for anywhere."""

    cgroups: tuple[str, ...] | None = None
    """Paths, as in /proc/PID/cgroup, of groups, including all below them; ``*``, ``?``
    and ``[...]`` match as in the shell."""

    containers: tuple[str, ...] | None = None
    """Prefixes of IDs."""

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
    Select the wanted threads; read only what that needs.

    :param cgroups: The threads' control groups, if they have been read.
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
    Select the wanted threads. Pure.

    :param namespaces: The threads' namespaces; needed if *wanted* has some.
    :return: One value a thread.
    """
    fits = [is_in_path(wanted, path) for path in cgroups.paths]
    # The index of an unknown group is -1: the last value.
    keep = np.array([*fits, is_in_path(wanted, None)], np.bool_)[cgroups.index]
    if wanted.namespaces is not None:
        assert namespaces is not None, "namespaces have not been read"
        inside = [np.isin(i, wanted.namespaces) for i in namespaces.inodes.values()]
        keep &= np.logical_or.reduce(inside)
    return keep


def is_in_path(wanted: Membership, path: str | None) -> bool:
    """
    Return whether a control group is wanted, and in a wanted container.

    :param path: Path as in /proc/PID/cgroup. ``None``, for an unknown one, fits only
        if any group does.
    """
    cgroups, containers = wanted.cgroups, wanted.containers
    if path is None:
        return cgroups is None and containers is None
    return (cgroups is None or any(is_below(path, group) for group in cgroups)) and (
        containers is None
        or any(id_.startswith(containers) for id_ in container_ids(path))
    )


def is_below(path: str, pattern: str) -> bool:
    """
    Return whether a control group matches a pattern, or is below one that does.

    >>> is_below("/a/web-1/x", "/a/web-*"), is_below("/ab", "/a"), is_below("/a", "/")
    (True, False, True)
    """
    names = [name for name in path.removesuffix(DELETED).split("/") if name]
    wanted = [name for name in pattern.removesuffix(DELETED).split("/") if name]
    # A name may itself contain characters of patterns.
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
    matches = (_CONTAINER.search(name) for name in path.split("/"))
    return tuple(match[1] for match in matches if match)


def container_path(path: str) -> str:
    """
    Return the control group of the outermost container that a group is in.

    :return: *path* itself if the group is in no container.
    """
    names = path.split("/")
    for depth, name in enumerate(names, 1):
        if _CONTAINER.search(name):
            return "/".join(names[:depth])
    return path
