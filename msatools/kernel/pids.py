# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lookup of tasks by PID, and PID namespaces."""

from collections.abc import Container, Iterable

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError
from msatools.kernel.reader import Addresses, Reader, distinct, unsigned
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Structs, read_structs
from msatools.kernel.walks import XArray
from msatools.program.model import TargetError
from msatools.selfdesc.find import find_type, find_variable, member_of, offset_of

# --- Lookup of tasks by PID, without a walk over all tasks.
#
# kernel/pid.c: since Linux kernel commit 95846ecf9dac ("pid: replace pid bitmap
# implementation with IDR API") (in v4.15) a namespace keeps its struct pid in an IDR,
# which is an XArray (lib/idr.c). A lookup takes about seven reads, however many tasks
# there are.


PID_MAX_LIMIT = 1 << 22
"""All PIDs are smaller (include/linux/threads.h)."""

_POINTER_BYTES = 8


class NoSuchPidError(TargetError):
    """A requested PID was not found."""


def require_pids(
    pids: Iterable[int], there: Container[int], *, damaged: bool, option: str = "-p"
) -> None:
    """Make sure that all requested tasks were found.

    :param there: PIDs of the tasks that were found.
    :param damaged: Whether data that the search uses could not be read.
    :param option: The option that requests tasks by PID.
    :raises NoSuchPidError: if some were not found
    """
    missing = [pid for pid in pids if pid not in there]
    if not missing:
        return
    why = "no such task" if len(missing) == 1 else "no such tasks"
    raise NoSuchPidError(
        f"pid {', '.join(map(str, missing))}",
        "not found, and some lists of tasks are damaged" if damaged else why,
        f"list them all without {option}",
    )


def find_task(reader: Reader, pid: int) -> int | None:
    """Find the thread, alive or zombie, with a PID in the initial PID namespace.

    :return: Address of its ``struct task_struct``, whose PID the caller must compare;
        ``None`` if not found.
    :raises UNREADABLE: if the IDR is damaged, or changes during the lookup
    """
    tree = reader.once(find_task, lambda: _initial_tree(reader))
    # Its nodes may have changed since the previous lookup.
    tree.forget()
    return tree.linked(pid)


def find_tasks(reader: Reader, pids: Iterable[int], losses: LossLog) -> dict[int, int]:
    """Find the threads that have some PIDs in the initial PID namespace.

    Damaged data that hide a thread are noted as a loss.

    :return: Addresses of ``struct task_struct`` by PID; no entry for a PID that no
        thread, alive or zombie, has.
    """
    tree = _initial_tree(reader)
    found = {}
    for pid in dict.fromkeys(pids):
        try:
            task = tree.task(pid)
        except UNREADABLE as error:
            losses.lose(Loss.PIDS, f"the task with a PID cannot be looked up: {error}")
            continue
        if task is not None:
            found[pid] = task
    return found


def _initial_tree(reader: Reader) -> "PidTree":
    # Only the namespace's address is kept: the tree's nodes may change.
    return PidTree(reader, reader.once("init_pid_ns", lambda: _initial(reader.prog)))


def _initial(prog: drgn.Program) -> int:
    address: int | None = find_variable(prog, "init_pid_ns").address_
    assert address is not None
    return address


class _PidLayout(Struct, frozen=True):
    """Offsets of the members that a lookup by PID reads."""

    tree: int
    """Offset of the XArray in ``struct pid_namespace``."""

    task: int
    numbers: int
    """Offsets in ``struct pid``: of the list of threads with the PID, and of the array
    of its numbers, which begins with the one in the initial namespace."""

    upid: int
    """Size of an entry of that array in bytes."""

    link: int
    task_pid: int
    """Offsets in ``struct task_struct``: of the node on that list, and of the PID."""


def _layout(prog: drgn.Program) -> _PidLayout:
    pid, task = find_type(prog, "struct pid"), find_type(prog, "struct task_struct")
    return _PidLayout(
        tree=offset_of(find_type(prog, "struct pid_namespace"), "idr.idr_rt"),
        task=offset_of(pid, "tasks[0].first"),
        numbers=offset_of(pid, "numbers[0].nr"),
        upid=drgn.sizeof(member_of(pid, "numbers").type.type),
        link=offset_of(task, "pid_links[0]"),
        task_pid=offset_of(task, "pid"),
    )


class PidTree:
    """The ``struct pid`` of a namespace by number; the tree's nodes are read once."""

    def __init__(self, reader: Reader, namespace: int, level: int = 0) -> None:
        """
        :param namespace: Address of the ``struct pid_namespace``.
        :param level: Number of the namespace's ancestors.
        """
        self._layout = reader.once(_PidLayout, lambda: _layout(reader.prog))
        self._number = self._layout.numbers + level * self._layout.upid
        self._tree = XArray(reader, namespace + self._layout.tree)
        self._reader = reader

    def task(self, pid: int) -> int | None:
        """Find the thread with a PID in the initial namespace.

        :return: Address of its ``struct task_struct``; ``None`` if not found.
        :raises UNREADABLE: if a structure that leads to the thread is damaged
        """
        task = self.linked(pid)
        if task is not None:
            own = self._reader.read(task + self._layout.task_pid, 4)
            if unsigned(own, 0, 4) != pid:
                raise DamagedDataError("no task of that PID", task)
        return task

    def linked(self, pid: int) -> int | None:
        """Do as :meth:`task`, without reading the thread: the caller compares its PID.

        :raises UNREADABLE: if a structure that leads to the thread is damaged
        """
        if not 0 < pid < PID_MAX_LIMIT:
            return None
        entry = self._tree.load(pid)
        if not entry:
            return None
        layout = self._layout
        end = max(layout.task + _POINTER_BYTES, self._number + 4)
        data = self._reader.read(entry, end)
        if unsigned(data, self._number, 4) != pid:
            raise DamagedDataError("no struct pid of that number", entry)
        link = unsigned(data, layout.task, _POINTER_BYTES)
        if not link:  # reaped, or in use as a process group or session ID only
            return None
        return link - layout.link

    def forget(self) -> None:
        """Drop the nodes that were read, so that the next lookup reads them again."""
        self._tree.forget()

    def count_below(self, end: int) -> int:
        """Count the numbers below *end* that are in use.

        :raises UNREADABLE: if a part of the tree is damaged
        """
        return self._tree.count_below(end)


# --- PID namespaces and the number of PIDs in use in each (kernel/pid_namespace.c).


MAX_LEVEL = 32
"""``MAX_PID_NS_LEVEL`` (include/linux/pid_namespace.h)."""

RESERVED_PIDS = 300
"""A namespace that has reached this PID reuses no lower one (include/linux/pid.h)."""

_ADDING = 1 << 31
"""``PIDNS_ADDING``, a flag in the count: the namespace still accepts new processes."""

_NAMESPACE = {
    "inode": ("ns.inum",),
    "level": ("level",),
    "parent": ("parent",),
    "init": ("child_reaper",),
    # Linux kernel commit e8cfbc245e24 ("pid: remove pidhash") (in v4.15)
    "taken": ("pid_allocated", "nr_hashed"),
    # Linux kernel commit 7863dcc72d0f ("pid: allow pid_max to be set per pid
    # namespace") (in v6.14)
    "most": ("pid_max",),
}

_PID = {"level": ("level",), "space": ("numbers[0].ns",)}
_UPID = {"nr": ("nr",), "space": ("ns",)}


class PidNamespace(Struct, frozen=True):
    """A ``struct pid_namespace``."""

    address: int
    inode: int
    level: int
    """Nesting level; 0 for the initial namespace."""

    parent: int
    """Address of the parent namespace; 0 if it has none."""

    init: int
    """Address of the ``struct task_struct`` that inherits orphans."""

    taken: int
    """Number of PIDs in use by threads, process groups and sessions."""

    most: int | None
    """``pid_max``: all PIDs are smaller; ``None`` if it cannot be read."""


def read_pid_namespaces(
    reader: Reader, addresses: Addresses, losses: LossLog
) -> dict[int, PidNamespace]:
    """Read some ``struct pid_namespace`` and all their ancestors, by address.

    Namespaces that cannot be read are left out, and count as losses.
    """
    found: dict[int, PidNamespace] = {}
    level = distinct(addresses)
    for _ in range(MAX_LEVEL + 1):
        known = np.array([0, *found], np.uint64)
        level = level[~np.isin(level, known, assume_unique=True)]
        if not len(level):
            break
        read = read_structs(reader, "struct pid_namespace", _NAMESPACE, level, losses)
        shared = None if read.has("most") else _pid_max(reader.prog, losses)
        for row in np.flatnonzero(read.readable).tolist():
            found[int(level[row])] = _namespace(int(level[row]), read, row, shared)
        level = distinct(read["parent"].astype(np.uint64))
    return found


def _namespace(
    address: int, read: Structs, row: int, shared: int | None
) -> PidNamespace:
    return PidNamespace(
        address=address,
        inode=int(read["inode"][row]),
        level=int(read["level"][row]),
        parent=int(read["parent"][row]),
        init=int(read["init"][row]),
        taken=int(read["taken"][row]) & ~_ADDING,
        most=int(read["most"][row]) if read.has("most") else shared,
    )


def _pid_max(prog: drgn.Program, losses: LossLog) -> int | None:
    """Read the ``pid_max`` that all namespaces share up to v6.13; ``None`` if lost."""
    try:
        most: int = find_variable(prog, "pid_max").value_()
    except LOST as error:
        losses.lose(Loss.LIMITS, f"pid_max cannot be read: {error}")
        return None
    return most


def reserved_taken(
    reader: Reader, namespace: PidNamespace, losses: LossLog
) -> int | None:
    """Count the PIDs below :data:`RESERVED_PIDS` in use; ``None`` if lost."""
    try:
        return PidTree(reader, namespace.address).count_below(RESERVED_PIDS)
    except UNREADABLE as error:
        losses.lose(Loss.PIDS, f"cannot read numbers that are taken: {error}")
        return None


def innermost_numbers(
    reader: Reader, pids: Addresses, losses: LossLog
) -> tuple[Addresses, npt.NDArray[np.int64]]:
    """Find the innermost namespace of each ``struct pid``, and its PID there.

    :return: Addresses of ``struct pid_namespace``, 0 if unreadable; and the PIDs, 0
        if that is the initial namespace or the PID is unreadable.
    """
    read = read_structs(reader, "struct pid", _PID, pids, losses)
    levels = read["level"].astype(np.uint64)
    spaces: Addresses = read["space"].astype(np.uint64)
    numbers = np.zeros(len(pids), np.int64)
    nested = np.flatnonzero(read.readable & (levels > 0) & (levels <= MAX_LEVEL))
    if len(nested):
        # A struct pid has one struct upid per nesting level.
        first = np.uint64(offset_of(find_type(reader.prog, "struct pid"), "numbers"))
        size = np.uint64(drgn.sizeof(find_type(reader.prog, "struct upid")))
        addresses = pids[nested] + first + levels[nested] * size
        innermost = read_structs(reader, "struct upid", _UPID, addresses, losses)
        spaces[nested] = innermost["space"]
        numbers[nested] = innermost["nr"]
    spaces[levels > MAX_LEVEL] = 0
    return spaces, numbers
