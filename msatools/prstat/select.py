# SPDX-License-Identifier: LGPL-2.1-or-later

"""Select, sort and sum up rows: by user, control group, container, name or class."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.kernel.reader import distinct
from msatools.kernel.structs import Booleans
from msatools.prstat.interval import ON_CODE, WAITED, ratio
from msatools.prstat.model import ClassGroup, TaskGroup
from msatools.prstat.rows import UNKNOWN, Columns, TaskRows
from msatools.prstat.states import Breakdown, SplitColumn
from msatools.tasks.identity import (
    ANY,
    Membership,
    TaskCgroups,
    comm_text,
    container_ids,
    container_path,
    members,
)
from msatools.tasks.waits import TaskClass

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
"""Maps columns of delays to the kernel's names of the delays."""


class Selection(Struct, frozen=True):
    """Conditions that rows must meet; ``None`` for any."""

    pids: tuple[int, ...] | None = None
    uids: tuple[int, ...] | None = None
    kernel: bool | None = None
    """``True`` for kernel threads only, ``False`` for all others."""

    cpus: frozenset[int] | None = None
    states: frozenset[str] | None = None
    classes: frozenset[TaskClass] | None = None
    min_age_ns: int = 0
    max_age_ns: int | None = None
    """Range of the time that a task has been in its current class."""

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
    """Return which rows match the conditions, except for the PIDs."""
    columns = rows.columns
    keep = np.ones(len(rows), np.bool_)
    if wanted.uids is not None:
        keep &= np.isin(columns["uid"], wanted.uids)
    if wanted.kernel is not None:
        keep &= columns["kthread"] == wanted.kernel
    if wanted.cpus is not None:
        keep &= np.isin(columns["cpu"], list(wanted.cpus))
    if wanted.states is not None:
        keep &= any_thread(rows, _isin(rows, "state", wanted.states))
    if wanted.classes is not None:
        keep &= any_thread(rows, _isin(rows, "class", wanted.classes))
    if not wanted.membership.is_any:
        kept = rows.kept
        cgroups = TaskCgroups(kept.paths, kept.columns["cgroup"])
        found = members(wanted.membership, cgroups, kept.namespaces)
        keep &= any_thread(rows, found)
    keep &= columns["class_age_ns"] >= wanted.min_age_ns
    if wanted.max_age_ns is not None:
        keep &= columns["class_age_ns"] <= wanted.max_age_ns
    return keep


def _isin(rows: TaskRows, name: str, wanted: Iterable[Any]) -> Booleans:
    return np.isin(rows.kept.columns[name], list(wanted))


def any_thread(rows: TaskRows, wanted: Booleans) -> Booleans:
    """Return which rows have a wanted thread."""
    found = np.append(0, np.cumsum(wanted))
    first, end = rows.columns["threads_of"].T
    has: Booleans = found[end] > found[first]
    return has


def order(
    rows: TaskRows, keys: Sequence[SortKey], *, stuck_first: bool = False
) -> Indices:
    """Return the indices of rows sorted by *keys*; equal rows are sorted by PID.

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
    """Return the longest time that a thread of each row is in state D; 0 if none is."""
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


def _share(values: npt.NDArray[Any], columns: Columns) -> npt.NDArray[np.float64]:
    """Return values as shares of the total lifetime of each row's threads."""
    return ratio(values, np.sum([columns[name] for name in _PARTS], axis=0))


_PARTS = ("user_ns", "system_ns", "latency_ns", "off_cpu_ns", "zombie_ns")


def _column(name: str) -> _Key:
    return lambda rows: rows.columns[name]


def _share_of(name: str) -> _Key:
    return lambda rows: _share(rows.columns[name], rows.columns)


def _off_per_switch(rows: TaskRows) -> npt.NDArray[Any]:
    return ratio(rows.columns["off_cpu_ns"], rows.columns["sleeps"])


def _sleep(rows: TaskRows) -> npt.NDArray[Any]:
    columns = rows.columns
    others = [columns[name] for name in WAITED if name != "untold_ns"]
    return _share(columns["off_cpu_ns"] - np.sum(others, axis=0), columns)


def _split(choose: Callable[[Breakdown], SplitColumn | None]) -> _Key:
    """Return a key for a part of the time off the CPU; -1 for rows without it."""

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
    """Return a key for a sum over reaped children; 0 if not read."""

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
    "CPU": lambda rows: ratio(cpu_ns(rows.columns), rows.columns["lifetime_ns"]),
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
"""Maps names of columns to functions that return the values to sort by."""

_LEAST_FIRST = frozenset(
    ("PID", "TGID", "PPID", "USER", "STATE", "PSR", "COMMAND", "CGROUP", "NOW")
)


# --- Options of prstat.


GROUPS = ("user", "cgroup", "container", "ns", "class", "comm")
"""Properties that rows can be grouped by."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of a report: rows and their order, further tables, samples."""

    per_thread: bool = False
    selection: Selection = field(default_factory=Selection)
    sort: tuple[SortKey, ...] = (SortKey("CPU", largest_first=True),)
    stuck_first: bool = False
    """Whether rows of a dump with a thread in state D come first, the longest wait
    first: hung tasks have used little CPU time, by which rows are sorted."""

    rows: int | None = None
    """Maximum number of rows; ``None`` for all."""

    children: bool = False
    states: bool = False
    load: bool = False
    users: bool = False
    cgroups: bool = False
    by: tuple[str, ...] = ()
    """Some of :data:`GROUPS`."""

    stacks: bool = False
    functions: tuple[str, ...] = ()
    """Functions, one of which must be on a stack."""

    modules: tuple[str, ...] = ()
    """Modules, one of which must have a function on a stack."""

    why: tuple[str, ...] = ()
    """Columns to explain."""

    hz: float | None = None
    """Samples a second within an interval, 0 for none; ``None`` for as many as
    :attr:`share` allows."""

    share: float | None = None
    """Share of one CPU that samples may take; ``None`` for the default."""

    causes: bool = True
    """Whether to find what rows wait on, and which page faults are on code. This takes
    twice as long as all else; herds and :attr:`load` do it anyway."""

    whole: bool = False
    """Keep all data of all threads, to be selected and sorted later."""

    @property
    def needs_namespaces(self) -> bool:
        """Whether the namespaces of threads are needed."""
        return "ns" in self.by or self.selection.membership.namespaces is not None

    @property
    def by_thread(self) -> bool:
        """Whether rows and selections are of threads instead of processes.

        Stacks, the load and states are always of threads.
        """
        return self.per_thread or self.stacks or self.load or self.states


# --- Sum up processes by user, control group, container, PID namespace, name or class.
#
# Pure: rows in, groups out. -a and -Z are --by user and --by cgroup.


NO_NAME = "-"
"""Key of rows without a value, such as a container, or with an unknown one."""

_RAN = {"USR": "user_ns", "SYS": "system_ns", "LAT": "latency_ns", "ZMB": "zombie_ns"}
"""Maps classes to the columns of rows that have their time."""


def group_by(kind: str, rows: TaskRows) -> tuple[TaskGroup, ...]:
    """
    Sum up rows of processes or threads by a common property.

    :param kind: One of :data:`msatools.prstat.select.GROUPS`, except ``class``.
    :return: Groups, the largest share of a CPU first.
    """
    return _groups(rows, _KEYS[kind](rows))


# --- Groups of rows: by user, control group, container or namespace.


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


# --- Sums of the rows of a group.


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
    Sum up threads by their current class.

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
    """Map classes to (time, error) in ns within the interval; ``None`` without one."""
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
    """Return the distinct keys, and the index of each row's key among them."""
    names = sorted(set(keys))
    index = {name: position for position, name in enumerate(names)}
    return names, np.array([index[key] for key in keys], np.intp)
