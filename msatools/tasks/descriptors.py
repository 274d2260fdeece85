# SPDX-License-Identifier: LGPL-2.1-or-later

"""What tasks' file descriptors stand for.

fs/file.c: a task's table of open files, shared by the threads that share it.
"""

from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, Structs, read_structs

MAX_OPEN = 1 << 20
"""Files of one table that are looked at: what NR_OPEN allows by default."""

Numbers = npt.NDArray[np.int64]

_TASK = {"files": ("u8", ("files",))}
_FILES = {"table": ("u8", ("fdt",))}
_TABLE = {"size": ("u4", ("max_fds",)), "files": ("u8", ("fd",))}
_FILE = {
    "inode": ("u8", ("f_inode",)),
    "mapping": ("u8", ("f_mapping",)),
    "operations": ("u8", ("f_op",)),
    "private": ("u8", ("private_data",)),
    "mount": ("u8", ("f_path.mnt",)),
    "dentry": ("u8", ("f_path.dentry",)),
}


@dataclass(frozen=True)
class DescriptorTables:
    """The tables of open files of some tasks, one row a task."""

    files: Addresses
    """Where each table's array of files is; 0 if it has none, or it is lost."""

    size: Numbers
    """How many files it has room for."""


class Descriptors:
    """Looks file descriptors up."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses

    def tables(self, tasks: Addresses) -> DescriptorTables:
        """Find the tables of the ``struct task_struct`` at some addresses.

        What tasks share is read once.
        """
        found = self._structs("struct task_struct", _TASK, tasks)
        shared = self._structs("struct files_struct", _FILES, _words(found["files"]))
        table = self._structs("struct fdtable", _TABLE, _words(shared["table"]))
        size = np.minimum(table["size"].astype(np.int64), MAX_OPEN)
        return DescriptorTables(
            _words(table["files"]), np.where(table.readable, size, 0)
        )

    def lookup(self, tables: DescriptorTables, numbers: Numbers) -> Addresses:
        """Find the ``struct file`` of one descriptor of each table; 0 if none is."""
        inside = (numbers >= 0) & (numbers < tables.size)
        offsets = np.where(inside, numbers, 0).astype(np.uint64) * np.uint64(8)
        places = tables.files + offsets
        files = np.zeros(len(numbers), np.uint64)
        wanted = np.flatnonzero(inside & (tables.files != 0))
        records, _ = self._reader.read_records(places[wanted], 8)
        files[wanted] = records.view("<u8")[:, 0]
        return files

    def all_files(
        self, tables: DescriptorTables, row: int, limit: int = MAX_OPEN
    ) -> Addresses:
        """Read a whole table: the ``struct file`` by descriptor, 0 where none is."""
        count = min(int(tables.size[row]), limit)
        if not count:
            return np.empty(0, np.uint64)
        try:
            return self._reader.words(int(tables.files[row]), count)
        except drgn.FaultError as error:
            self._losses.lose(
                Loss.DESCRIPTORS, f"a table of open files is lost: {error}"
            )
            return np.empty(0, np.uint64)

    def read_files(self, files: Addresses) -> Structs:
        """Read some ``struct file``: ``inode``, ``mapping`` (that of its data),
        ``operations``, ``private`` and the path, ``mount`` and ``dentry``."""
        return self._structs("struct file", _FILE, files)

    def _structs(
        self,
        type_name: str,
        members: Members,
        addresses: Addresses,
    ) -> Structs:
        return read_structs(self._reader, type_name, members, addresses, self._losses)


def _words(values: npt.NDArray[np.uint64]) -> Addresses:
    return values.astype(np.uint64)
