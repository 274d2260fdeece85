# SPDX-License-Identifier: LGPL-2.1-or-later

"""Paths of control groups of the default hierarchy, as /proc/PID/cgroup shows them.

kernel/cgroup/cgroup.c and fs/kernfs: a group is a kernfs directory, which stores its
name and a pointer to its parent.
"""

import drgn
import numpy as np

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.kernel.structs import read_structs
from msatools.selfdesc.find import find_constant

MAX_DEPTH = 2048
"""Maximum number of directories in a path, which has PATH_MAX bytes at most: a longer
walk is a loop."""

DELETED = " (deleted)"
"""Suffix of the path of a group that has been removed."""

_NAME_MAX = 255

_CGROUP = {"node": ("kn",), "flags": ("self.flags",)}
_NODE = {
    # Linux kernel commit 633488947ef6 ("kernfs: Use RCU to access
    # kernfs_node::parent.") (in v6.15)
    "parent": ("__parent", "parent"),
    "name": ("name",),
}

Nodes = dict[int, tuple[int, str]]
"""Maps the address of a ``struct kernfs_node`` to its parent's address and its name."""


def cgroup_paths(
    reader: Reader, cgroups: Addresses, losses: LossLog
) -> list[str | None]:
    """Return the path of each ``struct cgroup``; ``None`` if a part cannot be read.

    The path of a removed group ends with :data:`DELETED`, as the kernel writes it.
    Bytes that are not UTF-8 are escaped.
    """
    groups = read_structs(reader, "struct cgroup", _CGROUP, cgroups, losses)
    starts = groups["node"].astype(np.uint64)
    nodes = _read_nodes(reader, starts, losses)
    online = reader.once("CSS_ONLINE", lambda: _online(reader.prog))
    paths: list[str | None] = []
    for readable, start, flags in zip(
        groups.readable.tolist(), starts.tolist(), groups["flags"].tolist(), strict=True
    ):
        path = _path(nodes, start) if readable else None
        if readable and path is None:
            losses.lose(Loss.CGROUP_PATHS, "cannot read the path of a control group")
        if path is not None and not flags & online:
            path += DELETED
        paths.append(path)
    return paths


def _online(prog: drgn.Program) -> int:
    flag: int = find_constant(prog, "CSS_ONLINE").value_()
    return flag


def _read_nodes(reader: Reader, starts: Addresses, losses: LossLog) -> Nodes:
    """Read directories and all their ancestors, a level at a time."""
    nodes: Nodes = {}
    level = distinct(starts[starts != 0])
    for _ in range(MAX_DEPTH):
        if not len(level):
            break
        read = read_structs(reader, "struct kernfs_node", _NODE, level, losses)
        parents = read["parent"].astype(np.uint64)
        for row in np.flatnonzero(read.readable).tolist():
            name = _name(reader, int(read["name"][row]), losses)
            if name is not None:
                nodes[int(level[row])] = int(parents[row]), name
        above = {*parents[read.readable].tolist()} - {0, *nodes}
        level = np.array(sorted(above), np.uint64)
    return nodes


def _path(nodes: Nodes, node: int) -> str | None:
    names: list[str] = []
    while node in nodes and len(names) < MAX_DEPTH:
        node, name = nodes[node]
        if not node:
            return "/" + "/".join(reversed(names))
        names.append(name)
    return None


def _name(reader: Reader, address: int, losses: LossLog) -> str | None:
    try:
        return read_string(reader, address, _NAME_MAX)
    except UNREADABLE as error:
        losses.lose(Loss.CGROUP_NAMES, f"cannot read a control group's name: {error}")
        return None
