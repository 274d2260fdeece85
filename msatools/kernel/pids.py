# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks by their PID, without a walk over all tasks.

kernel/pid.c: since Linux kernel commit 95846ecf9dac ("pid: replace pid bitmap
implementation with IDR API") (in v4.15) a namespace keeps its ``struct pid`` in an IDR,
which is an XArray (lib/idr.c, lib/xarray.c): a tree whose nodes have a slot for each
value of some bits of the number. Some seven reads find a task, however many there are.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass

import drgn
import numpy as np

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.target.errors import TargetError

PID_MAX_LIMIT = 1 << 22
"""include/linux/threads.h: no PID is as large."""

_MAX_SHIFT = 64
"""No node of a tree is for so many bits."""

_POINTER_BYTES = 8
# include/linux/xarray.h: an entry with these low bits is one of the tree's own, a node
# if it is no small number (xa_is_node()).
_INTERNAL_MASK = 3
_INTERNAL = 2
_MAX_NUMBER = 4096


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


def find_tasks(
    reader: Reader, pids: Iterable[int], findings: LossLog
) -> dict[int, int]:
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
            findings.lose(
                Loss.PIDS, f"the task with a PID cannot be looked up: {error}"
            )
            continue
        if task is not None:
            found[pid] = task
    return found


def _initial_tree(reader: Reader) -> "PidTree":
    """Look at the initial namespace as it is now."""
    return PidTree(reader, reader.once("init_pid_ns", lambda: _initial(reader.prog)))


def _initial(prog: drgn.Program) -> int:
    address: int | None = prog["init_pid_ns"].address_
    assert address is not None
    return address


@dataclass(frozen=True)
class _PidLayout:
    """Where members are."""

    head: int
    shift: int
    slots: int
    count: int
    """Slots of a node."""

    task: int
    number: int
    """In ``struct pid``: the first of each, the thread itself and the initial
    namespace."""

    link: int
    task_pid: int


def _layout(prog: drgn.Program) -> _PidLayout:
    node, pid = prog.type("struct xa_node"), prog.type("struct pid")
    task = prog.type("struct task_struct")
    count = node.member("slots").type.length
    assert count
    return _PidLayout(
        head=drgn.offsetof(prog.type("struct pid_namespace"), "idr.idr_rt.xa_head"),
        shift=drgn.offsetof(node, "shift"),
        slots=drgn.offsetof(node, "slots"),
        count=count,
        task=drgn.offsetof(pid, "tasks[0].first"),
        number=drgn.offsetof(pid, "numbers[0].nr"),
        link=drgn.offsetof(task, "pid_links[0]"),
        task_pid=drgn.offsetof(task, "pid"),
    )


class PidTree:
    """A namespace's ``struct pid`` by number; nodes are read once."""

    def __init__(self, reader: Reader, namespace: int) -> None:
        """Look at the ``struct pid_namespace`` at an address."""
        self._layout = reader.once(_PidLayout, lambda: _layout(reader.prog))
        self._head = namespace + self._layout.head
        self._bits = self._layout.count.bit_length() - 1
        self._reader = reader
        self._root: int | None = None
        self._nodes: dict[int, tuple[int, memoryview[int]]] = {}

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
        entry = self._entry(pid)
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
        taken, todo = 0, [(self._top(), 0, _MAX_SHIFT)]
        while todo:
            entry, first, most = todo.pop()
            # A tree without nodes has number 0 alone, which is nobody's.
            if entry & _INTERNAL_MASK != _INTERNAL or entry <= _MAX_NUMBER:
                continue
            shift, words = self._node(entry - _INTERNAL)
            # Each level is for fewer bits, so this ends.
            if shift % self._bits or shift >= most:
                raise drgn.FaultError("a node of another level", entry)
            slots = np.array(words[: -(-(end - first) >> shift)], np.uint64)
            if not shift:
                taken += int(np.count_nonzero(slots & np.uint64(_INTERNAL_MASK) == 0))
                taken -= int(np.count_nonzero(slots == 0))
                continue
            todo += (
                (int(slots[number]), first + (number << shift), shift)
                for number in np.flatnonzero(slots).tolist()
            )
        return taken

    def _top(self) -> int:
        if self._root is None:
            self._root = _number(self._reader.read(self._head, 8), 0, 8)
        return self._root

    def _entry(self, pid: int) -> int:
        """Find the ``struct pid``; 0 if there is none."""
        entry, above = self._top(), None
        while entry & _INTERNAL_MASK == _INTERNAL:
            if entry <= _MAX_NUMBER:  # a slot that is being changed
                return 0
            shift, slots = self._node(entry - _INTERNAL)
            # Each level is for fewer bits, so this ends.
            if shift % self._bits or (above is not None and shift != above):
                raise drgn.FaultError("a node of another level", entry)
            if above is None and pid >> shift >= self._layout.count:
                return 0
            entry = slots[pid >> shift & (self._layout.count - 1)]
            if shift == 0:
                break
            above = shift - self._bits
        else:
            # A tree without nodes has number 0 alone, a slot above the last level none.
            return 0
        return 0 if entry & _INTERNAL_MASK else entry

    def _node(self, address: int) -> tuple[int, "memoryview[int]"]:
        if address not in self._nodes:
            layout = self._layout
            end = layout.slots + _POINTER_BYTES * layout.count
            data = self._reader.read(address, end)
            slots = memoryview(data)[layout.slots : end].cast("Q")
            self._nodes[address] = data[layout.shift], slots
        return self._nodes[address]


def _number(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")
