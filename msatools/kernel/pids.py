# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lookup of tasks by PID, without a walk over all tasks.

kernel/pid.c: since Linux kernel commit 95846ecf9dac ("pid: replace pid bitmap
implementation with IDR API") (in v4.15) a namespace keeps its ``struct pid`` in an IDR,
which is an XArray (lib/idr.c). A lookup takes about seven reads, however many tasks
there are.
"""

from collections.abc import Container, Iterable

import drgn
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.words import unsigned
from msatools.kernel.xarray import XArray
from msatools.selfdesc.find import find_type, find_variable, member_of, offset_of
from msatools.target.errors import TargetError

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
    :param option: The option that requests them.
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
    :raises drgn.FaultError: if something on the way is damaged, or changed meanwhile
    """
    return _initial_tree(reader).linked(pid)


def find_tasks(reader: Reader, pids: Iterable[int], losses: LossLog) -> dict[int, int]:
    """Find the threads that have some PIDs in the initial PID namespace.

    Damage on the way to a thread costs a note.

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
    # Only the address is kept: the tree itself may have changed.
    return PidTree(reader, reader.once("init_pid_ns", lambda: _initial(reader.prog)))


def _initial(prog: drgn.Program) -> int:
    address: int | None = find_variable(prog, "init_pid_ns").address_
    assert address is not None
    return address


class _PidLayout(Struct, frozen=True):
    """Offsets of members."""

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
        :param level: Its number of ancestors.
        """
        self._layout = reader.once(_PidLayout, lambda: _layout(reader.prog))
        self._number = self._layout.numbers + level * self._layout.upid
        self._tree = XArray(reader, namespace + self._layout.tree)
        self._reader = reader

    def task(self, pid: int) -> int | None:
        """Find the thread with a PID in the initial namespace.

        :return: Address of its ``struct task_struct``; ``None`` if not found.
        :raises UNREADABLE: if something on the way is damaged
        """
        task = self.linked(pid)
        if task is not None:
            own = self._reader.read(task + self._layout.task_pid, 4)
            if unsigned(own, 0, 4) != pid:
                raise DamagedDataError("no task of that PID", task)
        return task

    def linked(self, pid: int) -> int | None:
        """Find the same without reading the thread: the caller must compare its PID.

        :raises UNREADABLE: if something on the way is damaged
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

    def count_below(self, end: int) -> int:
        """Count the numbers below *end* that are in use.

        :raises drgn.FaultError: if a part of the tree is damaged
        """
        return self._tree.count_below(end)
