# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Full names of kernel threads, as ps shows them (fs/proc/array.c, proc_task_name()).

``comm`` holds 15 bytes. ``struct kthread`` has longer names, and ``struct worker`` the
description of a worker's work.
"""

import numpy as np
import numpy.typing as npt

from msatools.errors import UNREADABLE, MissingError
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

_Rows = npt.NDArray[np.intp]


class KernelNames:
    """Full names of the kernel threads of one kernel, cached where they are fixed."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: dict[tuple[int, int], bytes] = {}
        """Names by the thread's address and start time."""

    def fill(self, tasks: TaskTable, losses: LossLog) -> None:
        """Replace the truncated names of kernel threads by the full ones.

        A name that cannot be read stays truncated, and is counted.
        """
        if not tasks.has("kthread"):
            return
        own = (tasks["flags"] & PF_KTHREAD) != 0
        own &= (tasks["kthread"] != 0) & (tasks["exit_state"] == 0)
        rows, aside = np.flatnonzero(own), LossLog()
        works = (tasks["flags"][rows] & _PF_WQ_WORKER) != 0
        # Before v6.9 rescuers have no "kworker/" prefix: /proc shows the short name.
        long = ~works | np.char.startswith(tasks["comm"][rows], b"kworker/")
        try:
            threads = self._read(
                "struct kthread", _KTHREAD, tasks["kthread"][rows], aside
            )
            if threads.has("full_name"):
                names = np.where(long, threads["full_name"], 0)
                self._fill_long(tasks, rows, names, aside)
            self._fill_workers(tasks, rows[works], threads["data"][works], aside)
        except MissingError:
            # The types are unknown.
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
        self, tasks: TaskTable, rows: _Rows, names: Addresses, aside: LossLog
    ) -> None:
        """Write the names longer than ``comm``; *names* has their addresses or 0."""
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
        """Append the current or last work of workers (wq_worker_comm())."""
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
