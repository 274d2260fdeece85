# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Kernel threads by the names that ps has (fs/proc/array.c, proc_task_name()).

``comm`` has room for 15 bytes. What does not fit the kernel keeps elsewhere, and what
a worker is at is no part of its name.
"""

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.kernel.structs import Members, Structs, read_structs
from msatools.tasks.table import PF_KTHREAD, TaskTable

_PF_WQ_WORKER = 0x20
_MAX_NAME = 128
_KTHREAD: Members = {
    "data": ("data",),
    # "kthread: dynamically allocate memory to store kthread's full name" (in v5.17)
    "full_name": ("full_name",),
}

Places = npt.NDArray[np.intp]


class KernelNames:
    """Names the threads of one kernel; the names that stay it keeps."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: dict[tuple[int, int], bytes] = {}
        """By the thread's address and when it was started."""

    def fill(self, tasks: TaskTable, losses: LossLog) -> None:
        """Write the whole names of kernel threads over those that are cut.

        A name that cannot be read stays as it is, and is counted.
        """
        if not tasks.has("kthread"):
            return
        own = (tasks["flags"] & PF_KTHREAD) != 0
        own &= (tasks["kthread"] != 0) & (tasks["exit_state"] == 0)
        rows, aside = np.flatnonzero(own), LossLog()
        works = (tasks["flags"][rows] & _PF_WQ_WORKER) != 0
        # Of rescuers that are not called so, before v6.9, /proc has what fits.
        long = ~works | np.char.startswith(tasks["comm"][rows], b"kworker/")
        try:
            threads = self._read(
                "struct kthread", _KTHREAD, tasks["kthread"][rows], aside
            )
            if threads.has("full_name"):
                names = np.where(long, threads["full_name"], 0)
                self._fill_long(tasks, rows, names, aside)
            self._fill_workers(tasks, rows[works], threads["data"][works], aside)
        except LookupError:
            # Nothing tells the types.
            return
        losses.lose(Loss.NAMES, count=aside.lost.total())

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
        self, tasks: TaskTable, rows: Places, names: Addresses, aside: LossLog
    ) -> None:
        """Write the names that did not fit."""
        has = np.flatnonzero(names)
        for row, pointer in zip(rows[has].tolist(), names[has].tolist(), strict=True):
            thread = int(tasks["address"][row]), int(tasks["start_ns"][row])
            if thread not in self._kept:
                try:
                    name = read_string(self._reader, pointer, _MAX_NAME)
                except drgn.FaultError:
                    aside.lose(Loss.NAMES)
                    continue
                self._kept[thread] = name.encode("utf-8", "surrogateescape")
            tasks["comm"][row] = self._kept[thread]

    def _fill_workers(
        self, tasks: TaskTable, rows: Places, workers: Addresses, aside: LossLog
    ) -> None:
        """Add what workers are at, or were at last (wq_worker_comm())."""
        members: Members = {
            "task": ("task",),
            "pool": ("pool",),
            "work": ("current_work",),
            "desc": ("desc",),
        }
        found = self._read("struct worker", members, workers, aside)
        # Of another's memory, or one that has left its pool, nothing is told.
        known = (found["task"] == tasks["address"][rows]) & (found["pool"] != 0)
        known &= found["desc"] != b""
        for place in np.flatnonzero(known).tolist():
            sign = b"+" if found["work"][place] else b"-"
            comm = bytes(tasks["comm"][rows[place]])
            desc = bytes(found["desc"][place]).partition(b"\0")[0]
            tasks["comm"][rows[place]] = comm + sign + desc
