# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads the records and stacks of single threads, and checks them."""

from collections.abc import Collection, Iterable
from contextlib import suppress
from operator import itemgetter
from typing import Any

import drgn
import numpy as np

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Decoder
from msatools.kernel.words import MAX_PLAUSIBLE
from msatools.query.life import LifeSeen, Record, state_class
from msatools.selfdesc.find import find_type, offset_of
from msatools.tasks.delays import read_delay
from msatools.tasks.iowait import read_one_in_iowait
from msatools.tasks.processes import read_process
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.states import UNINTERRUPTIBLE
from msatools.tasks.table import COUNTS, TaskReader, TaskTable

_SWITCHES = ("nvcsw", "nivcsw")
_AGAIN = {"pid": "i4", **dict.fromkeys(_SWITCHES, "u8")}
"""Columns that are read again to see whether a thread has moved on."""


class ThreadReader:
    """Reads threads of one kernel."""

    def __init__(self, reader: Reader) -> None:
        """
        :raises MissingError: if the types of tasks are missing
        """
        self._reader = reader
        self._tasks = TaskReader(reader)
        self.columns: Collection[str] = self._tasks.columns
        """Columns of :mod:`msatools.tasks.table` that the kernel has."""

        self._times = itemgetter(
            *(name for name in self.columns if name in COUNTS or name.endswith("_ns"))
        )
        self._stack_bytes = stack_bytes(reader.prog)
        self._again = _again(reader.prog)

    def read(self, address: int, pid: int) -> tuple[LifeSeen, bytes]:
        """Read a thread and its stack: see :meth:`record` and :meth:`_stack`."""
        task = self.record(address, pid)
        return self._see(address, task), self._stack(task)

    def record(self, address: int, pid: int) -> Record:
        """
        Read the record of a thread.

        :param address: Address of its ``struct task_struct``.
        :raises UNREADABLE: if it is damaged, or does not have the PID
        """
        task = self._tasks.read_one(address)
        self._check(address, task)
        if task["pid"] != pid:
            raise DamagedDataError("no task of that PID", address)
        return task

    def read_process(
        self, address: int, losses: LossLog
    ) -> list[tuple[LifeSeen, bytes]]:
        """
        Read all threads of a process, the leader first, and their stacks.

        :param address: Address of the ``struct task_struct`` of any of its threads.
        :raises drgn.FaultError: if one of them is damaged
        """
        found = []
        for thread, task in self._tasks.read_threads(address, losses):
            self._check(thread, task)
            found.append((self._see(thread, task), self._stack(task)))
        return found

    def table(self, addresses: Iterable[int], losses: LossLog) -> TaskTable:
        """Read some tasks as a table."""
        return self._tasks.read([*addresses], losses)

    def counts(self, signal: int) -> Any:
        """Return the counts of a process, by its ``struct signal_struct``.

        :raises UNREADABLE: if one of them is impossible
        """
        counted = read_process(self._reader, signal)
        if max(counted.values()) > MAX_PLAUSIBLE:
            raise DamagedDataError("no counts of a process", signal)
        return counted

    def _check(self, address: int, task: Record) -> None:
        """Check that a record is a task with possible times.

        :raises UNREADABLE: if not
        """
        pids = task["pid"], task["tgid"]
        if (
            min(pids) <= 0
            or max(pids) > PID_MAX_LIMIT
            or max(self._times(task)) > MAX_PLAUSIBLE
        ):
            raise DamagedDataError("no task, or no times of one", address)

    def _see(self, address: int, task: Record) -> LifeSeen:
        """Read the data of a thread outside its ``struct task_struct``."""
        in_iowait = False
        if task["state"] & UNINTERRUPTIBLE and not task["exit_state"]:
            in_iowait = read_one_in_iowait(self._reader, address)
        delays = None
        if task.get("delays"):
            with suppress(*UNREADABLE):
                delays = read_delay(self._reader, task["delays"])
        return LifeSeen(address, task, in_iowait, delays)

    def _stack(self, task: Record) -> bytes:
        """Read the stack of a sleeping thread, to be unwound on demand.

        :return: The stack from the saved stack pointer on; empty if the thread does not
            sleep, or its stack cannot be read.
        """
        if state_class(task) is not None or "sp" not in task:
            return b""
        size = task["stack"] + self._stack_bytes - task["sp"]
        if not 0 < size <= self._stack_bytes or task["sp"] % 8 or size % 8:
            return b""
        try:
            return self._reader.read(task["sp"], size)
        except UNREADABLE:
            return b""

    def has_not_run(self, seen: LifeSeen) -> bool:
        """Return whether a thread has not been on a CPU since it was read.

        :raises UNREADABLE: if it has ended meanwhile
        """
        if not self._reader.is_live:
            return True
        task, (start, size, decode) = seen.task, self._again
        again = decode(self._reader.read(seen.address + start, size))
        if again["pid"] != task["pid"]:
            raise DamagedDataError("it has ended meanwhile", seen.address)
        return all(again[name] == task[name] for name in _SWITCHES)


def _again(prog: drgn.Program) -> tuple[int, int, Decoder]:
    """Return offset, size and decoder of the columns that are read again."""
    task = find_type(prog, "struct task_struct")
    offsets = {name: offset_of(task, name) for name in _AGAIN}
    start, end = min(offsets.values()), max(offsets.values()) + 8
    record = np.dtype(
        {
            "names": list(_AGAIN),
            "formats": list(_AGAIN.values()),
            "offsets": [offset - start for offset in offsets.values()],
            "itemsize": end - start,
        }
    )
    return start, end - start, Decoder(record, _AGAIN)
