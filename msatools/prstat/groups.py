# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sum up processes by user, control group, container, PID namespace, name or class.

Pure: rows in, groups out. ``-a`` and ``-Z`` are ``--by user`` and ``--by cgroup``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import distinct
from msatools.prstat.interval import ON_CODE
from msatools.prstat.model import ClassGroup, TaskGroup
from msatools.prstat.rows import UNKNOWN, TaskRows
from msatools.prstat.select import cpu_ns
from msatools.tasks.classes import TaskClass
from msatools.tasks.identity import comm_text
from msatools.tasks.membership import container_ids, container_path

NO_NAME = "-"
"""Key of rows in no such group, or in an unknown one."""

_RAN = {"USR": "user_ns", "SYS": "system_ns", "LAT": "latency_ns", "ZMB": "zombie_ns"}
"""Classes whose time is a column of the rows."""


def group_by(kind: str, rows: TaskRows) -> tuple[TaskGroup, ...]:
    """
    Sum up rows of processes or threads by a common property.

    :param kind: One of :data:`msatools.prstat.options.GROUPS`, except ``class``.
    :return: Groups, the largest share of a CPU first.
    """
    return _groups(rows, _KEYS[kind](rows))


# --- what rows have in common


def _users(rows: TaskRows) -> list[str]:
    """Return each row's real user, by number."""
    uids = rows.columns["uid"].tolist()
    return [NO_NAME if uid == UNKNOWN else str(uid) for uid in uids]


def _by_path(key: Callable[[str], str]) -> Callable[[TaskRows], list[str]]:
    """Return a function that derives keys from control groups, each path once."""

    def keys(rows: TaskRows) -> list[str]:
        numbers = rows.columns["cgroup"]
        known = {number: rows.path(number) for number in distinct(numbers).tolist()}
        by_number = {
            number: NO_NAME if path is None else key(path)
            for number, path in known.items()
        }
        return [by_number[number] for number in numbers.tolist()]

    return keys


def _container(path: str) -> str:
    """Return the ID of the outermost container that a control group is in."""
    return next(iter(container_ids(path)), NO_NAME)


def _namespaces(rows: TaskRows) -> list[str]:
    """Return each row's PID namespace, by inode number."""
    assert rows.kept.namespaces is not None, "namespaces have not been read"
    inodes = rows.kept.namespaces.inodes["pid"][rows.columns["thread"]]
    return [str(inode) if inode > 0 else NO_NAME for inode in inodes.tolist()]


def _comms(rows: TaskRows) -> list[str]:
    return [comm_text(comm) for comm in rows.columns["comm"].tolist()]


_KEYS: Mapping[str, Callable[[TaskRows], list[str]]] = {
    "user": _users,
    "cgroup": _by_path(container_path),
    "container": _by_path(_container),
    "ns": _namespaces,
    "comm": _comms,
}


# --- sums


def _groups(rows: TaskRows, keys: list[str]) -> tuple[TaskGroup, ...]:
    names, group = _numbered(keys)
    columns = rows.columns
    first, end = columns["threads_of"].reshape(-1, 2).T
    # If each thread has a row, count values of the process once.
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
        # A dead leader has no address space, but other threads may.
        most = np.zeros(len(firsts), np.int64)
        np.maximum.at(most, process, columns[name])
        of_first = np.zeros(len(rows), np.int64)
        of_first[firsts] = most
        return total(of_first)

    sums = zip(
        names,
        total(once).tolist(),
        total((end - first).astype(np.int64)).tolist(),
        known("size_bytes").tolist(),
        known("rss_bytes").tolist(),
        total(cpu_ns(columns)).tolist(),
        total(share).tolist(),
        strict=True,
    )
    found = [TaskGroup(*values) for values in sums]
    found.sort(key=lambda group: (-group.cpu_share, -group.rss_bytes))
    return tuple(found)


def group_by_class(rows: TaskRows) -> tuple[ClassGroup, ...]:
    """
    Sum up threads by what they are doing now.

    :return: Groups with the time of each class within the interval, if there is one;
        the longest time first, then the most threads.
    """
    threads = _threads_of(rows)
    of_thread = rows.kept.columns
    classes = of_thread["class"][threads]
    times = _class_times(rows)
    names = {*map(int, distinct(classes)), *(times or ())}
    found = []
    for number in sorted(names):
        there = threads[classes == number]
        ages = of_thread["class_age_ns"][there]
        ns, error_ns = (None, None) if times is None else times.get(number, (0, 0))
        found.append(
            ClassGroup(
                key=NO_NAME if number == _UNTOLD else TaskClass(number).name,
                processes=len(distinct(of_thread["tgid"][there])),
                threads=len(there),
                age_ns=int(ages.sum()),
                max_age_ns=int(ages.max()) if len(ages) else 0,
                ns=ns,
                error_ns=error_ns,
            )
        )
    return tuple(sorted(found, key=_weight))


_UNTOLD = -1
"""Key instead of a class for time that no sample shows."""


def _weight(group: ClassGroup) -> tuple[int, int, str]:
    return -(group.ns or 0), -group.threads, group.key


def _threads_of(rows: TaskRows) -> npt.NDArray[np.intp]:
    """Return the indices of all threads of some rows."""
    ranges = [np.arange(*bounds) for bounds in rows.columns["threads_of"].tolist()]
    return np.concatenate([np.zeros(0, np.intp), *ranges])


def _class_times(rows: TaskRows) -> dict[int, tuple[int, int]] | None:
    """Return the time of rows in each class within an interval, and its error in ns."""
    off = rows.off_cpu
    if off is None:
        return None
    at = rows.columns["row"]
    ns, errors = off.ns[at].sum(0), off.error_ns[at].sum(0)
    # Page faults on code have a column of their own.
    for sums in (ns, errors):
        sums[TaskClass.FLT] += sums[ON_CODE]
    times = {
        number: (int(ns[number]), int(errors[number]))
        for number in np.flatnonzero(ns[:ON_CODE]).tolist()
    }
    exact = {TaskClass[name]: rows.columns[key].sum() for name, key in _RAN.items()}
    times |= {int(known): (int(spent), 0) for known, spent in exact.items() if spent}
    untold = int(off.untold_ns[at].sum())
    return times | ({_UNTOLD: (untold, 0)} if untold else {})


def _numbered(keys: Sequence[str]) -> tuple[list[str], npt.NDArray[np.intp]]:
    """Return each different key, and the index of each row's key."""
    names = sorted(set(keys))
    index = {name: position for position, name in enumerate(names)}
    return names, np.array([index[key] for key in keys], np.intp)
