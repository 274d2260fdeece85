# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks by their PID, without a walk over all tasks.

kernel/pid.c: since Linux kernel commit 95846ecf9dac ("pid: replace pid bitmap
implementation with IDR API") (in v4.15) a namespace keeps its ``struct pid`` in an IDR,
which is an XArray (lib/idr.c). Some seven reads find a task, however many there are.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.xarray import XArray
from msatools.selfdesc.variables import find_variable
from msatools.target.errors import TargetError

PID_MAX_LIMIT = 1 << 22
"""include/linux/threads.h: no PID is as large."""

_POINTER_BYTES = 8


class NoSuchPidError(TargetError):
    """A PID that was named is not there."""


def require_pids(pids: Iterable[int], there: Container[int], *, damaged: bool) -> None:
    """Make sure that tasks that were named are found.

    :param there: The PIDs of those that are.
    :param damaged: Whether something that tells of tasks could not be read.
    :raises NoSuchPidError: if some are not
    """
    missing = [pid for pid in pids if pid not in there]
    if not missing:
        return
    why = "no such task" if len(missing) == 1 else "no such tasks"
    raise NoSuchPidError(
        f"pid {', '.join(map(str, missing))}",
        "not found, and a part of what tells is damaged" if damaged else why,
        "list them all without -p",
    )


def find_task(reader: Reader, pid: int) -> int | None:
    """Find the thread, be it a zombie, with a PID in the initial PID namespace.

    :return: Address of its ``struct task_struct``, whose PID is for the caller to
        compare; ``None`` if there is none.
    :raises drgn.FaultError: if something on the way is damaged, or changed meanwhile
    """
    return _initial_tree(reader).linked(pid)


def find_tasks(reader: Reader, pids: Iterable[int], losses: LossLog) -> dict[int, int]:
    """Find the threads that have some PIDs in the initial PID namespace.

    What is damaged on the way to a thread costs a note.

    :return: Addresses of ``struct task_struct`` by PID; no entry where no thread, be it
        a zombie, has the PID.
    """
    tree = _initial_tree(reader)
    found = {}
    for pid in dict.fromkeys(pids):
        try:
            task = tree.task(pid)
        except drgn.FaultError as error:
            losses.lose(Loss.PIDS, f"the task with a PID cannot be looked up: {error}")
            continue
        if task is not None:
            found[pid] = task
    return found


def _initial_tree(reader: Reader) -> "PidTree":
    """Look at the initial namespace as it is now."""
    return PidTree(reader, reader.once("init_pid_ns", lambda: _initial(reader.prog)))


def _initial(prog: drgn.Program) -> int:
    address: int | None = find_variable(prog, "init_pid_ns").address_
    assert address is not None
    return address


@dataclass(frozen=True)
class _PidLayout:
    """Where members are."""

    tree: int
    """In ``struct pid_namespace``."""

    task: int
    number: int
    """In ``struct pid``: the first of each, the thread itself and the initial
    namespace."""

    link: int
    task_pid: int


def _layout(prog: drgn.Program) -> _PidLayout:
    pid, task = prog.type("struct pid"), prog.type("struct task_struct")
    return _PidLayout(
        tree=drgn.offsetof(prog.type("struct pid_namespace"), "idr.idr_rt"),
        task=drgn.offsetof(pid, "tasks[0].first"),
        number=drgn.offsetof(pid, "numbers[0].nr"),
        link=drgn.offsetof(task, "pid_links[0]"),
        task_pid=drgn.offsetof(task, "pid"),
    )


class PidTree:
    """A namespace's ``struct pid`` by number; the tree's nodes are read once."""

    def __init__(self, reader: Reader, namespace: int) -> None:
        """Look at the ``struct pid_namespace`` at an address."""
        self._layout = reader.once(_PidLayout, lambda: _layout(reader.prog))
        self._tree = XArray(reader, namespace + self._layout.tree)
        self._reader = reader

    def task(self, pid: int) -> int | None:
        """Find the thread with a PID, of the initial namespace.

        :raises drgn.FaultError: if something on the way is damaged
        """
        task = self.linked(pid)
        if task is not None:
            own = self._reader.read(task + self._layout.task_pid, 4)
            if _number(own, 0, 4) != pid:
                raise drgn.FaultError("no task of that PID", task)
        return task

    def linked(self, pid: int) -> int | None:
        """Find the same, for who reads the thread anyway, and sees its PID then.

        :raises drgn.FaultError: if something on the way is damaged
        """
        if not 0 < pid < PID_MAX_LIMIT:
            return None
        entry = self._tree.load(pid)
        if not entry:
            return None
        layout = self._layout
        end = max(layout.task + _POINTER_BYTES, layout.number + 4)
        data = self._reader.read(entry, end)
        if _number(data, layout.number, 4) != pid:
            raise drgn.FaultError("no struct pid of that number", entry)
        link = _number(data, layout.task, _POINTER_BYTES)
        if not link:  # it has been reaped, or is only a process group's or session's
            return None
        return link - layout.link

    def count_below(self, end: int) -> int:
        """Count the numbers below *end* that are taken.

        :raises drgn.FaultError: if a part of the tree is damaged
        """
        return self._tree.count_below(end)


def _number(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")
