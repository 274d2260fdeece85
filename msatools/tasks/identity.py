# SPDX-License-Identifier: LGPL-2.1-or-later

"""Identity of tasks: user, parent, name, address space, control group, namespaces.

Also the selection of threads by control group, container and namespace.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.files import DELETED, cgroup_paths
from msatools.kernel.pids import innermost_numbers
from msatools.kernel.reader import (
    Addresses,
    Reader,
    decode_string,
    distinct,
    read_string,
)
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import (
    NOT_FOUND,
    Booleans,
    Members,
    Numbers,
    Structs,
    constant,
    find_rows,
    read_structs,
)
from msatools.tasks.table import PF_KTHREAD, PF_WQ_WORKER, TaskReader, TaskTable

# --- User and parent of each thread, by their IDs in the initial namespaces.


UNKNOWN = -1
"""Stands for an ID or index that is unknown."""


_IDENTITY_CRED = {"uid": ("uid.val",), "euid": ("euid.val",)}
_TASK = {"tgid": ("tgid",)}


class Users(Struct, frozen=True):
    """User IDs of each thread; :data:`UNKNOWN` if unreadable."""

    uid: Numbers
    """The real user (``cred->uid``)."""

    euid: Numbers
    """The effective user (``cred->euid``)."""


class Identities(Users, frozen=True):
    """User and parent IDs of each thread; :data:`UNKNOWN` if unreadable."""

    ppid: Numbers
    """ID of the parent process; 0 for tasks that the kernel itself started."""


def read_identities(reader: Reader, tasks: TaskTable, losses: LossLog) -> Identities:
    """Read the user and the parent of each thread."""
    users = read_users(reader, tasks, losses)
    return Identities(users.uid, users.euid, _parents(reader, tasks, losses))


def read_users(reader: Reader, tasks: TaskTable, losses: LossLog) -> Users:
    """Read the user of each thread."""
    creds = read_structs(
        reader, "struct cred", _IDENTITY_CRED, tasks["cred"].astype(np.uint64), losses
    )
    return Users(
        uid=np.where(creds.readable, creds["uid"].astype(np.int64), UNKNOWN),
        euid=np.where(creds.readable, creds["euid"].astype(np.int64), UNKNOWN),
    )


def _parents(reader: Reader, tasks: TaskTable, losses: LossLog) -> Numbers:
    """Return the process ID of each thread's parent.

    Usually the table has every parent except the idle task (PID 0).
    """
    parents: Addresses = tasks["real_parent"].astype(np.uint64)
    row = find_rows(tasks["address"], parents)
    ppid: Numbers = tasks["tgid"][row].astype(np.int64)
    elsewhere = row == NOT_FOUND
    others = read_structs(
        reader, "struct task_struct", _TASK, parents[elsewhere], losses
    )
    ppid[elsewhere] = np.where(others.readable, others["tgid"], UNKNOWN)
    return ppid


@lru_cache(maxsize=4096)
def comm_text(value: bytes) -> str:
    """Decode a task's name; bytes that are not UTF-8 are escaped."""
    return decode_string(bytes(value))


# --- Full names of kernel threads, as ps shows them (fs/proc/array.c,
# proc_task_name()).
#
# comm holds 15 bytes. struct kthread has longer names, and struct worker the
# description of a worker's work.


_MAX_NAME = 128
_KTHREAD: Members = {
    "data": ("data",),
    # "kthread: dynamically allocate memory to store kthread's full name" (in v5.17)
    "full_name": ("full_name",),
}

_COMM_CHARACTERS = 15
"""Number of characters that ``comm`` has room for."""

_MOST_KEPT = 1 << 16
"""Maximum number of threads with short names that are remembered."""

_Rows = npt.NDArray[np.intp]


def _threads(tasks: TaskTable, rows: _Rows) -> Iterator[tuple[int, int]]:
    """Yield address and start time of some threads: together they identify a thread."""
    addresses, starts = tasks["address"][rows], tasks["start_ns"][rows]
    return zip(addresses.tolist(), starts.tolist(), strict=True)


class KernelNames:
    """Full names of the kernel threads of one kernel, with a cache of fixed names."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: dict[tuple[int, int], bytes] = {}
        """Names by the thread's address and start time."""

        self._short: set[tuple[int, int]] = set()
        """Threads, by address and start time, whose names fit into ``comm``."""

    def fill(self, tasks: TaskTable, losses: LossLog) -> None:
        """Replace the truncated names of kernel threads in *tasks* by the full ones.

        A name that cannot be read stays truncated, and is counted.
        """
        if not tasks.has("kthread"):
            return
        own = (tasks["flags"] & PF_KTHREAD) != 0
        own &= (tasks["kthread"] != 0) & (tasks["exit_state"] == 0)
        rows, aside = self._unknown(tasks, np.flatnonzero(own)), LossLog()
        works = (tasks["flags"][rows] & PF_WQ_WORKER) != 0
        # Before v6.9 rescuers have no "kworker/" prefix: /proc shows the short name.
        long = ~works | (tasks["comm"][rows].astype("S8") == b"kworker/")
        try:
            threads = self._read(
                "struct kthread", _KTHREAD, tasks["kthread"][rows], aside
            )
            if threads.has("full_name"):
                names = np.where(long, threads["full_name"], 0)
                self._fill_long(tasks, rows, names, aside)
                self._keep_short(tasks, rows[threads.readable & (names == 0) & ~works])
            self._fill_workers(tasks, rows[works], threads["data"][works], aside)
        except MissingError:
            # The types are unknown.
            return
        losses.lose(Loss.NAMES, count=aside.lost.total())

    def _unknown(self, tasks: TaskTable, rows: _Rows) -> _Rows:
        """Return the rows of threads whose names have to be read; name the others.

        The long name of a thread is fixed when it is created.
        """
        if not (self._kept or self._short):
            return rows
        comms, unknown = tasks["comm"], []
        # The names of workers change with their work.
        works = ((tasks["flags"][rows] & PF_WQ_WORKER) != 0).tolist()
        each = zip(rows.tolist(), _threads(tasks, rows), works, strict=True)
        for row, thread, works_now in each:
            name = None if works_now else self._kept.get(thread)
            if name is not None:
                comms[row] = name
            elif works_now or thread not in self._short:
                unknown.append(row)
        return np.array(unknown, np.intp)

    def _keep_short(self, tasks: TaskTable, rows: _Rows) -> None:
        """Remember the threads that have no long name, and never will.

        Only a name that fills ``comm`` may be longer.
        """
        if len(self._short) > _MOST_KEPT:
            self._short.clear()
        for row, thread in zip(rows.tolist(), _threads(tasks, rows), strict=True):
            if len(tasks["comm"][row]) < _COMM_CHARACTERS:
                self._short.add(thread)

    def _read(
        self,
        type_name: str,
        members: Members,
        addresses: Addresses,
        aside: LossLog,
    ) -> Structs:
        return read_structs(
            self._reader, type_name, members, addresses.astype(np.uint64), aside
        )

    def _fill_long(
        self, tasks: TaskTable, rows: _Rows, names: Addresses, aside: LossLog
    ) -> None:
        """Write long names into *tasks*; *names* has their addresses, 0 for others."""
        has = np.flatnonzero(names)
        for row, pointer in zip(rows[has].tolist(), names[has].tolist(), strict=True):
            thread = int(tasks["address"][row]), int(tasks["start_ns"][row])
            if thread not in self._kept:
                try:
                    name = read_string(self._reader, pointer, _MAX_NAME)
                except UNREADABLE:
                    aside.lose(Loss.NAMES)
                    continue
                self._kept[thread] = name.encode("utf-8", "surrogateescape")
            tasks["comm"][row] = self._kept[thread]

    def _fill_workers(
        self, tasks: TaskTable, rows: _Rows, workers: Addresses, aside: LossLog
    ) -> None:
        """Append their current (``+``) or last (``-``) work to the names of workers, as
        wq_worker_comm() does."""
        members: Members = {
            "task": ("task",),
            "pool": ("pool",),
            "work": ("current_work",),
            "desc": ("desc",),
        }
        found = self._read("struct worker", members, workers, aside)
        # Skip reused memory and workers detached from their pool.
        known = (found["task"] == tasks["address"][rows]) & (found["pool"] != 0)
        known &= found["desc"] != b""
        for index in np.flatnonzero(known).tolist():
            sign = b"+" if found["work"][index] else b"-"
            comm = bytes(tasks["comm"][rows[index]])
            desc = bytes(found["desc"][index]).partition(b"\0")[0]
            tasks["comm"][rows[index]] = comm + sign + desc


# --- The address spaces of processes.


_MM: Members = {"pgd": ("pgd",), "tables": ("pgtables_bytes.counter",)}


class AddressSpace(Struct, frozen=True):
    """An address space, and the ID and name of one of its threads."""

    pid: int
    comm: str
    top: int
    """Address of its top-level page table."""

    table_bytes: int | None = None
    """Size of its page tables: VmPTE of /proc/PID/status."""


def address_spaces(reader: Reader, losses: LossLog) -> list[AddressSpace]:
    """Return the address spaces of all threads, each with one of its threads."""
    tasks = TaskReader(reader).read_all(losses)
    tasks = tasks.only((tasks["mm"] != 0) & ((tasks["flags"] & PF_KTHREAD) == 0))
    chosen = _first_of_each(tasks)
    mms: Addresses = tasks["mm"][chosen].astype(np.uint64)
    structs = read_structs(reader, "struct mm_struct", _MM, mms, losses)
    comms = tasks["comm"][chosen].tolist()
    pids = tasks["pid"][chosen].tolist()
    return [
        AddressSpace(pid, comm_text(comm), top, tables)
        for pid, comm, top, tables, known in zip(
            pids,
            comms,
            structs["pgd"].tolist(),
            structs["tables"].tolist(),
            structs.readable.tolist(),
            strict=True,
        )
        if known
    ]


def _first_of_each(tasks: TaskTable) -> npt.NDArray[np.intp]:
    """
    Return the row of one thread for each address space, preferably a leader.

    If processes share an address space, as between vfork() and execve(), the leader
    with the lowest PID is chosen.
    """
    order = np.lexsort((tasks["pid"], ~tasks.leaders, tasks["mm"]))
    ascending = tasks["mm"][order]
    first = np.ones(len(order), np.bool_)
    first[1:] = ascending[1:] != ascending[:-1]
    return order[first]


# --- The control group of each thread: in the default hierarchy (v2), or of its cpuset.


_CSS_SET = {"cgroup": ("dfl_cgrp",)}
_STATE = {"group": ("cgroup",)}


class TaskCgroups(Struct, frozen=True):
    """The control group of each thread; threads of a group have the same index."""

    paths: tuple[str, ...]
    """Paths of groups, as after ``0::`` in /proc/PID/cgroup; several removed groups may
    have the same path."""

    index: npt.NDArray[np.int32]
    """Index in *paths* of each thread's group; :data:`UNKNOWN` if unreadable or without
    control groups."""

    def path(self, row: int) -> str | None:
        """Return the path of a thread's group; ``None`` if unknown."""
        index = int(self.index[row])
        return None if index == UNKNOWN else self.paths[index]


def read_cgroups(reader: Reader, tasks: TaskTable, losses: LossLog) -> TaskCgroups:
    """Read the control group of each thread (cgroup v2), each path once."""
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
    thread's own group, or the nearest ancestor with the controller enabled. It is
    unknown for all threads if the kernel has no cpusets.
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


# --- Namespaces of each thread, by inode number, as readlink /proc/PID/ns/*.
#
# fs/proc/namespaces.c: the PID namespace is that of the thread's struct pid, the user
# namespace that of its credentials. A thread's other namespaces are in its struct
# nsproxy, which a dead thread does not have.


Inodes = npt.NDArray[np.int64]

_PROXY = {
    "mnt": ("mnt_ns",),
    "net": ("net_ns",),
    "uts": ("uts_ns",),
    "ipc": ("ipc_ns",),
    # Linux kernel commit 769071ac9f20 ("ns: Introduce Time Namespace") (in v5.6)
    "time": ("time_ns",),
    # Linux kernel commit a79a908fd2b0 ("cgroup: introduce cgroup namespaces") (in v4.6)
    "cgroup": ("cgroup_ns",),
}
_NS_CRED = {"user": ("user_ns",)}
_INODE = {"inode": ("ns.inum",)}

_TYPES = {
    "pid": "struct pid_namespace",
    "user": "struct user_namespace",
    "mnt": "struct mnt_namespace",
    "net": "struct net",
    "uts": "struct uts_namespace",
    "ipc": "struct ipc_namespace",
    "time": "struct time_namespace",
    "cgroup": "struct cgroup_namespace",
}
KINDS = tuple(_TYPES)
"""The kinds of namespaces, as in /proc/PID/ns."""


class TaskNamespaces(Struct, frozen=True):
    """Inode numbers of each thread's namespaces, by kind.

    :data:`UNKNOWN` if unreadable, if the thread is dead, or if this kernel has no
    namespaces of the kind.
    """

    inodes: Mapping[str, Inodes]


def read_task_namespaces(
    reader: Reader, tasks: TaskTable, losses: LossLog
) -> TaskNamespaces:
    """Read the namespaces of all kinds of each thread."""
    addresses = _addresses(reader, tasks, losses)
    return TaskNamespaces(
        {
            kind: _inodes(reader, type_name, addresses.get(kind), len(tasks), losses)
            for kind, type_name in _TYPES.items()
        }
    )


def _addresses(
    reader: Reader, tasks: TaskTable, losses: LossLog
) -> dict[str, Addresses]:
    """Return the address of each thread's namespace, by kind."""
    found: dict[str, Addresses] = {}
    if tasks.has("thread_pid"):
        pids = tasks["thread_pid"].astype(np.uint64)
        found["pid"], _ = innermost_numbers(reader, pids, losses)
    creds = tasks["cred"].astype(np.uint64)
    read = [read_structs(reader, "struct cred", _NS_CRED, creds, losses)]
    if tasks.has("nsproxy"):
        proxies = tasks["nsproxy"].astype(np.uint64)
        read.append(read_structs(reader, "struct nsproxy", _PROXY, proxies, losses))
    for structs in read:
        found |= {kind: structs[kind].astype(np.uint64) for kind in structs.columns}
    return found


def _inodes(
    reader: Reader,
    type_name: str,
    addresses: Addresses | None,
    count: int,
    losses: LossLog,
) -> Inodes:
    """Return the inode number of each thread's namespace of one kind."""
    unknown = np.full(count, UNKNOWN, np.int64)
    if addresses is None:
        return unknown
    with suppress(MissingError):
        # A kernel without such namespaces does not have the type.
        read = read_structs(reader, type_name, _INODE, addresses, losses)
        if read.has("inode"):
            return np.where(read.readable, read["inode"].astype(np.int64), UNKNOWN)
    return unknown


# --- Select threads by control group, container and namespace.
#
# For the options --cgroup, --container and --ns of all commands.


_CONTAINER = re.compile(r"(?:^|[-_:.])([0-9a-f]{64})(?:$|\.)")
"""Matches the container's ID in a control group's name, as engines name the groups."""


class Membership(Struct, frozen=True):
    """Which threads are wanted: those in one of the groups, one of the containers and
    one of the namespaces; ``None`` for any."""

    cgroups: tuple[str, ...] | None = None
    """Paths of groups as in /proc/PID/cgroup, which include all groups below; ``*``,
    ``?`` and ``[...]`` match as in the shell."""

    containers: tuple[str, ...] | None = None
    """Prefixes of container IDs."""

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
    Return which threads are wanted; read only the data that this needs.

    :param cgroups: The threads' control groups, if they have been read.
    """
    if wanted.is_any:
        return np.ones(len(tasks), np.bool_)
    namespaces = None
    if wanted.namespaces is not None:
        namespaces = read_task_namespaces(reader, tasks, losses)
    return members(wanted, cgroups or read_cgroups(reader, tasks, losses), namespaces)


def members(
    wanted: Membership, cgroups: TaskCgroups, namespaces: TaskNamespaces | None
) -> Booleans:
    """
    Return which threads are wanted. Pure.

    :param namespaces: The threads' namespaces; needed if *wanted* has some.
    """
    fits = [is_in_path(wanted, path) for path in cgroups.paths]
    # The index of an unknown group is -1, which selects the last value.
    keep = np.array([*fits, is_in_path(wanted, None)], np.bool_)[cgroups.index]
    if wanted.namespaces is not None:
        assert namespaces is not None, "namespaces have not been read"
        inside = [np.isin(i, wanted.namespaces) for i in namespaces.inodes.values()]
        keep &= np.logical_or.reduce(inside)
    return keep


def is_in_path(wanted: Membership, path: str | None) -> bool:
    """
    Return whether a control group is wanted, and in a wanted container.

    :param path: Path as in /proc/PID/cgroup; ``None`` for an unknown group, which is
        wanted only if all groups and containers are.
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
