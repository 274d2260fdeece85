# SPDX-License-Identifier: LGPL-2.1-or-later

"""Open files: tables of descriptors, and what they name.

fs/file.c: a task's table of open files, shared by the threads that share it.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.live_lists import changing_list
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import (
    Members,
    Structs,
    WordArray,
    read_rows,
    read_structs,
    struct_layout,
)
from msatools.selfdesc.variables import find_variable

MAX_OPEN = 1 << 20
"""Files of one table that are looked at: what NR_OPEN allows by default."""

Numbers = npt.NDArray[np.int64]

_TASK: Members = {"files": ("files",)}
_HOLDER_TYPE = "struct files_struct"
_HOLDER: Members = {"table": ("fdt",)}
_SMALL: Members = {
    **_HOLDER,
    "size": ("fdtab.max_fds",),
    "files": ("fdtab.fd",),
    "array": WordArray(("fd_array",)),
}
"""Of one that never had many files open: table and array are part of it."""

_TABLE_TYPE = "struct fdtable"
_TABLE: Members = {"size": ("max_fds",), "files": ("fd",)}

FILE: Mapping[str, tuple[str, ...]] = {
    "inode": ("f_inode",),
    "mapping": ("f_mapping",),
    "operations": ("f_op",),
    "private": ("private_data",),
    "mount": ("f_path.mnt",),
    "dentry": ("f_path.dentry",),
    # A structure of its own since Linux kernel commit 1934b212615d ("file: reclaim 24
    # bytes from f_owner") (in v6.12)
    "owner": ("f_owner.pid",),
    "owned": ("f_owner",),
}
"""What is read of a ``struct file``: ``mapping`` is that of its data."""

_FILE_TYPE = "struct file"
_OPEN = ("inode", "mapping", "operations", "private", "mount", "dentry")


def _file_members(columns: Iterable[str]) -> Members:
    return {name: FILE[name] for name in columns}


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
        shared = self._structs(_HOLDER_TYPE, _HOLDER, found["files"])
        table = self._structs(_TABLE_TYPE, _TABLE, shared["table"])
        size = np.minimum(table["size"].astype(np.int64), MAX_OPEN)
        return DescriptorTables(table["files"], np.where(table.readable, size, 0))

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

    def read_files(self, files: Addresses, columns: Iterable[str] = _OPEN) -> Structs:
        """Read some ``struct file``, by default all columns of an open file.

        :param columns: Of :data:`FILE`.
        """
        return self._structs(_FILE_TYPE, _file_members(columns), files)

    def _structs(
        self, type_name: str, members: Members, addresses: Addresses
    ) -> Structs:
        return read_structs(self._reader, type_name, members, addresses, self._losses)


class OpenFiles:
    """
    Every ``struct file`` in a process's file table, once.

    Threads that have a table of their own, and files on their way through a
    socket, are not seen.
    """

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._prog = reader.prog
        addresses = _file_addresses(reader, losses)
        members = _file_members(("operations", "private"))
        files, readable = _rows(reader, _FILE_TYPE, members, addresses)
        losses.lose(Loss.FILES, count=int(np.count_nonzero(~readable)))
        self._operations = files["operations"]
        self._private = files["private"]

    def private_data(self, operations: Iterable[str]) -> Addresses:
        """
        Find what the files with these ``struct file_operations`` stand for.

        :param operations: Names of global variables; those that this kernel
            does not have are passed over.
        :return: Their ``private_data``, ascending and unique.
        """
        wanted = np.zeros(len(self._operations), np.bool_)
        for name in operations:
            with suppress(LookupError):
                wanted |= self._operations == find_variable(self._prog, name).address_
        chosen = self._private[wanted]
        return distinct(chosen[chosen != 0])


def _file_addresses(reader: Reader, losses: LossLog) -> Addresses:
    holders = distinct(processes(reader, losses).files)
    holders = holders[holders != 0]
    small, has_small = _small_tables(reader, holders)
    large, known = _rows(reader, _HOLDER_TYPE, _HOLDER, holders[~has_small])
    places = distinct(large["table"][known])
    tables, readable = _rows(reader, _TABLE_TYPE, _TABLE, places)
    addresses, rows, whole = reader.read_arrays(
        tables["files"][readable], tables["size"][readable].astype(np.uint64)
    )
    # A damaged number of them leads to what are no pointers, and as many reads.
    whole[rows[addresses % np.uint64(8) != 0]] = False
    addresses = np.concatenate((small, addresses[whole[rows]]))
    lost = sum(np.count_nonzero(~there) for there in (known, readable, whole))
    losses.lose(Loss.DESCRIPTORS, count=int(lost))
    return distinct(addresses[addresses != 0])


def _small_tables(
    reader: Reader, holders: Addresses
) -> tuple[Addresses, npt.NDArray[np.bool_]]:
    """
    Read the tables of those that never had many files open, as most have not.

    Theirs are part of ``struct files_struct``, and come with it in one read.

    :return: The pointers in all of these, and whether each holder has such a table.
    """
    type_ = reader.prog.type(_HOLDER_TYPE)
    table, array = (drgn.offsetof(type_, name) for name in ("fdtab", "fd_array"))
    found, known = _rows(reader, _HOLDER_TYPE, _SMALL, holders)
    pointers = found["array"]
    small = known & (found["table"] == holders + np.uint64(table))
    small &= found["files"] == holders + np.uint64(array)
    small &= found["size"] == pointers.shape[1]
    small &= ~(pointers & np.uint64(7)).any(axis=1)
    return pointers[small].ravel(), small


def _rows(
    reader: Reader, type_name: str, members: Members, addresses: Addresses
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    layout = struct_layout(reader, type_name, members)
    if layout is None:
        raise LookupError(f"{type_name} has none of the members")
    return read_rows(reader, layout, addresses)


@dataclass(frozen=True)
class FileTables:
    """What of each process's first ``struct task_struct`` names other things."""

    files: Addresses
    """Of its ``struct files_struct``; 0 if it has none."""

    frag_pages: Addresses
    """Of the struct page that it keeps to send from; 0 if it has none."""


def processes(reader: Reader, losses: LossLog) -> FileTables:
    """Read all processes, which is done once."""
    return reader.once(processes, lambda: _processes(reader, losses))


def _processes(reader: Reader, losses: LossLog) -> FileTables:
    prog = reader.prog
    task = prog.type("struct task_struct")
    tasks = task.member("tasks").offset
    offsets = task.member("files").offset, drgn.offsetof(task, "task_frag.page")
    # No more of each than from the first to the last of these.
    first, last = min(*offsets, tasks), max(*offsets, tasks + 8)
    init = find_variable(prog, "init_task").address_
    records = changing_list(
        reader,
        init + tasks,
        tasks - first,
        last + 8 - first,
        {init + first},
        "the list of processes",
        losses,
    )
    places = [offset - first for offset in offsets]
    members = (data[at : at + 8] for _, data in records for at in places)
    words = np.frombuffer(b"".join(members), np.uint64).reshape(-1, len(offsets))
    return FileTables(words[:, 0], words[:, 1])
