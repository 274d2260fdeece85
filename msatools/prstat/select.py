# SPDX-License-Identifier: LGPL-2.1-or-later

"""Select and sort rows. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.structs import Booleans
from msatools.prstat.breakdown import Breakdown, SplitColumn
from msatools.prstat.rows import Columns, TaskRows
from msatools.prstat.waited import WAITED
from msatools.tasks.classes import TaskClass
from msatools.tasks.membership import ANY, Membership, members
from msatools.tasks.task_cgroups import TaskCgroups

Indices = npt.NDArray[np.intp]
_Key = Callable[[TaskRows], npt.NDArray[Any]]

DELAY_OF = {
    "BIO": "blkio",
    "SWP": "swapin",
    "RCL": "freepages",
    "THR": "thrashing",
    "CMP": "compact",
    "COW": "wpcopy",
    "IRQ": "irq",
}
"""Columns of delays, and the kernel's names of them."""


class Selection(Struct, frozen=True):
    """Conditions of wanted rows; ``None`` for any."""

    pids: tuple[int, ...] | None = None
    uids: tuple[int, ...] | None = None
    kernel: bool | None = None
    """``True`` for kernel threads only, ``False`` for all others."""

    cpus: frozenset[int] | None = None
    states: frozenset[str] | None = None
    classes: frozenset[TaskClass] | None = None
    min_age_ns: int = 0
    max_age_ns: int | None = None
    """Range of the time for which a task has been doing what it does."""

    membership: Membership = ANY
    """Groups and namespaces; a process matches if any of its threads does."""

    @property
    def is_all(self) -> bool:
        """Whether all rows are wanted."""
        return self == Selection()


class SortKey(Struct, frozen=True):
    """A column to sort by."""

    name: str
    """One of :data:`KEYS`."""

    largest_first: bool


def parse_sort(word: str) -> SortKey:
    """
    Parse the name of a column, with a leading ``+`` for the least first or ``-`` for
    the largest first.

    :raises ValueError: if there is no such column
    """
    name = word.lstrip("+-").upper()
    if name not in KEYS or len(word) - len(name) > 1:
        raise ValueError(f"cannot sort by {word!r}; choose from {', '.join(KEYS)}")
    sign = word[: len(word) - len(name)]
    largest_first = sign == "-" or (not sign and name not in _LEAST_FIRST)
    return SortKey(name, largest_first)


def selected(rows: TaskRows, wanted: Selection) -> Booleans:
    """Return which rows are wanted, but for their PIDs."""
    columns = rows.columns
    keep = np.ones(len(rows), np.bool_)
    if wanted.uids is not None:
        keep &= np.isin(columns["uid"], wanted.uids)
    if wanted.kernel is not None:
        keep &= columns["kthread"] == wanted.kernel
    if wanted.cpus is not None:
        keep &= np.isin(columns["cpu"], list(wanted.cpus))
    if wanted.states is not None:
        keep &= _any_thread(rows, _isin(rows, "state", wanted.states))
    if wanted.classes is not None:
        keep &= _any_thread(rows, _isin(rows, "class", wanted.classes))
    if not wanted.membership.is_any:
        kept = rows.kept
        cgroups = TaskCgroups(kept.paths, kept.columns["cgroup"])
        found = members(wanted.membership, cgroups, kept.namespaces)
        keep &= _any_thread(rows, found)
    keep &= columns["class_age_ns"] >= wanted.min_age_ns
    if wanted.max_age_ns is not None:
        keep &= columns["class_age_ns"] <= wanted.max_age_ns
    return keep


def _isin(rows: TaskRows, name: str, wanted: Iterable[Any]) -> Booleans:
    return np.isin(rows.kept.columns[name], list(wanted))


def _any_thread(rows: TaskRows, wanted: Booleans) -> Booleans:
    """Return which rows have a wanted thread."""
    found = np.append(0, np.cumsum(wanted))
    first, end = rows.columns["threads_of"].T
    has: Booleans = found[end] > found[first]
    return has


def order(
    rows: TaskRows, keys: Sequence[SortKey], *, stuck_first: bool = False
) -> Indices:
    """Return the indices of rows in their order; equal rows are sorted by PID.

    :param stuck_first: Whether rows with a thread in state D come first.
    """
    found: Indices = np.argsort(rows.columns["pid"], kind="stable")
    for key in reversed(keys):
        values = KEYS[key.name](rows)[found]
        _, ranks = np.unique(values, return_inverse=True)
        ranks = -ranks if key.largest_first else ranks
        found = found[np.argsort(ranks, kind="stable")]
    if stuck_first:
        found = found[np.argsort(-_stuck_ns(rows)[found], kind="stable")]
    return found


def _stuck_ns(rows: TaskRows) -> npt.NDArray[np.int64]:
    """Return the longest time that a thread of each row has been in state D, or 0."""
    columns = rows.kept.columns
    ages = np.maximum(columns["class_age_ns"].astype(np.int64), 1)
    ages = np.append(np.where(columns["state"] == "D", ages, 0), 0)
    threads = rows.columns["threads_of"]
    if not len(threads):
        return np.zeros(0, np.int64)
    longest: npt.NDArray[np.int64] = np.maximum.reduceat(ages, threads.ravel())[::2]
    return np.where(threads[:, 1] > threads[:, 0], longest, 0)


def cpu_ns(columns: Columns) -> npt.NDArray[np.int64]:
    """Return each row's time on the CPU."""
    time: npt.NDArray[np.int64] = columns["user_ns"] + columns["system_ns"]
    return time


def _ratio(values: npt.NDArray[Any], of: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    found = np.zeros(len(of))
    np.divide(values, of, out=found, where=of > 0)
    return found


def _share(values: npt.NDArray[Any], columns: Columns) -> npt.NDArray[np.float64]:
    """Return values as shares of the total lifetime of each row's threads."""
    return _ratio(values, np.sum([columns[name] for name in _PARTS], axis=0))


_PARTS = ("user_ns", "system_ns", "latency_ns", "off_cpu_ns", "zombie_ns")


def _column(name: str) -> _Key:
    return lambda rows: rows.columns[name]


def _share_of(name: str) -> _Key:
    return lambda rows: _share(rows.columns[name], rows.columns)


def _off_per_switch(rows: TaskRows) -> npt.NDArray[Any]:
    return _ratio(rows.columns["off_cpu_ns"], rows.columns["sleeps"])


def _sleep(rows: TaskRows) -> npt.NDArray[Any]:
    columns = rows.columns
    others = [columns[name] for name in WAITED if name != "untold_ns"]
    return _share(columns["off_cpu_ns"] - np.sum(others, axis=0), columns)


def _split(choose: Callable[[Breakdown], SplitColumn | None]) -> _Key:
    """Sort by a part of the time off the CPU; rows without it get -1."""

    def shares(rows: TaskRows) -> npt.NDArray[Any]:
        split = rows.kept.split
        column = None if split is None else choose(split)
        if column is None:
            return np.zeros(len(rows))
        first, end = rows.columns["threads_of"].T
        sums = np.append(0, np.cumsum(column.ns))
        known = np.append(0, np.cumsum(column.known))
        found = _share(sums[end] - sums[first], rows.columns)
        return np.where(known[end] - known[first] == end - first, found, -1)

    return shares


def _delay(kind: str) -> _Key:
    return _split(lambda split: split.delays.get(kind))


def _child(name: str) -> _Key:
    """Sort by a sum over reaped children, if it was read."""

    def used(rows: TaskRows) -> npt.NDArray[Any]:
        reaped = rows.kept.reaped
        if reaped is None:
            return np.zeros(len(rows))
        values: npt.NDArray[Any] = getattr(reaped, name)[rows.columns["thread"]]
        return values

    return used


def _cgroups(rows: TaskRows) -> npt.NDArray[Any]:
    numbers = rows.columns["cgroup"]
    return np.array([rows.path(number) or "" for number in numbers.tolist()], np.str_)


KEYS: Mapping[str, _Key] = {
    "PID": _column("pid"),
    "TGID": _column("tgid"),
    "PPID": _column("ppid"),
    "USER": _column("uid"),
    "SIZE": _column("size_bytes"),
    "RSS": _column("rss_bytes"),
    "STATE": _column("state"),
    "PRI": _column("pri"),
    "NICE": _column("nice"),
    "PSR": _column("cpu"),
    "TIME": lambda rows: cpu_ns(rows.columns),
    "CPU": lambda rows: _ratio(cpu_ns(rows.columns), rows.columns["lifetime_ns"]),
    "NLWP": _column("threads"),
    "COMMAND": _column("comm"),
    "CGROUP": _cgroups,
    "NOW": _column("class"),
    "FOR": _column("class_age_ns"),
    "USR": _share_of("user_ns"),
    "SYS": _share_of("system_ns"),
    "LAT": _share_of("latency_ns"),
    "OFF": _share_of("off_cpu_ns"),
    "ZMB": _share_of("zombie_ns"),
    "TFL": _share_of("code_faults_ns"),
    "DFL": _share_of("data_faults_ns"),
    "LCK": _share_of("locks_ns"),
    "SLP": _sleep,
    "IOW": _split(lambda split: split.sleeps.iowait),
    "BLK": _split(lambda split: split.sleeps.blocked),
    "INT": _split(lambda split: split.sleeps.sleep),
    "STP": _split(lambda split: split.stopped),
    **{name: _delay(kind) for name, kind in DELAY_OF.items()},
    "VCX": _column("nvcsw"),
    "ICX": _column("nivcsw"),
    "MIN": _column("min_flt"),
    "MAJ": _column("maj_flt"),
    "OFF/VCX": _off_per_switch,
    "LIFE": _column("lifetime_ns"),
    "CUSR": _child("utime_ns"),
    "CSYS": _child("stime_ns"),
    "CVCX": _child("nvcsw"),
    "CICX": _child("nivcsw"),
    "CMIN": _child("min_flt"),
    "CMAJ": _child("maj_flt"),
}
"""Sort keys by the names of the columns."""

_LEAST_FIRST = frozenset(
    ("PID", "TGID", "PPID", "USER", "STATE", "PSR", "COMMAND", "CGROUP", "NOW")
)
