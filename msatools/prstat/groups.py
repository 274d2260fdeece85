# SPDX-License-Identifier: LGPL-2.1-or-later

"""Processes summed up by user, and by control group or container. Pure."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from msatools.prstat.model import Group
from msatools.prstat.rows import UNKNOWN, Rows
from msatools.prstat.select import cpu_ns

_CONTAINER = re.compile(r"(?:^|[-_:.])[0-9a-f]{64}(?:$|\.)")
"""How engines name the group of a container: by its ID, with something around it."""

NO_NAME = "-"


def by_user(rows: Rows) -> tuple[Group, ...]:
    """Sum up processes by real user; the key is the user's number."""
    uids = rows.columns["uid"].tolist()
    return _groups(rows, [NO_NAME if uid == UNKNOWN else str(uid) for uid in uids])


def by_cgroup(rows: Rows) -> tuple[Group, ...]:
    """Sum up processes by control group; groups within a container are that one."""
    keys: dict[int, str] = {}
    for number in np.unique(rows.columns["cgroup"]).tolist():
        path = rows.path(number)
        keys[number] = NO_NAME if path is None else container(path)
    return _groups(rows, [keys[number] for number in rows.columns["cgroup"].tolist()])


def container(path: str) -> str:
    """
    Cut a path after the group of a container, if it leads into one.

    >>> container("/user.slice/session-1.scope")
    '/user.slice/session-1.scope'
    """
    names = path.split("/")
    for at, name in enumerate(names):
        if _CONTAINER.search(name):
            return "/".join(names[: at + 1])
    return path


def _groups(rows: Rows, keys: list[str]) -> tuple[Group, ...]:
    names, group = np.unique(np.array(keys, np.str_), return_inverse=True)
    columns = rows.columns
    first, end = columns["threads_of"].reshape(-1, 2).T
    # Of threads that each have a row, one stands for what is their process's.
    _, firsts, process = np.unique(
        columns["tgid"], return_index=True, return_inverse=True
    )
    once = np.zeros(len(rows), np.int64)
    once[firsts] = 1
    lifetime = columns["lifetime_ns"]
    share = np.zeros(len(rows))
    np.divide(cpu_ns(columns), lifetime, out=share, where=lifetime > 0)

    def total(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        sums = np.zeros(len(names), values.dtype)
        np.add.at(sums, group, values)
        return sums

    def known(name: str) -> npt.NDArray[Any]:
        # A dead leader has no memory any more, but its process may.
        most = np.zeros(len(firsts), np.int64)
        np.maximum.at(most, process, columns[name])
        of_first = np.zeros(len(rows), np.int64)
        of_first[firsts] = most
        return total(of_first)

    sums = zip(
        names.tolist(),
        total(once).tolist(),
        total((end - first).astype(np.int64)).tolist(),
        known("size_bytes").tolist(),
        known("rss_bytes").tolist(),
        total(cpu_ns(columns)).tolist(),
        total(share).tolist(),
        strict=True,
    )
    found = [Group(*values) for values in sums]
    found.sort(key=lambda group: (-group.cpu_share, -group.rss_bytes))
    return tuple(found)
