# SPDX-License-Identifier: LGPL-2.1-or-later

"""Open files: descriptor tables, and the ``struct file`` that they refer to.

fs/file.c: ``task_struct.files``, which threads may share.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
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
from msatools.selfdesc.find import find_type, find_variable, member_of, offset_of

MAX_OPEN = 1 << 20
"""Maximum number of descriptors read of one table: NR_OPEN's default."""

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
"""Members of a ``struct files_struct`` with its embedded table and array, which it uses
until it has many files open."""

_TABLE_TYPE = "struct fdtable"
_PART = 1 << 21
"""Number of descriptors that are read at once; the tables of processes have fewer."""

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
"""Columns of a ``struct file``: ``mapping`` is the address space of its data."""

_FILE_TYPE = "struct file"
_OPEN = ("inode", "mapping", "operations", "private", "mount", "dentry")


def _file_members(columns: Iterable[str]) -> Members:
    return {name: FILE[name] for name in columns}


class DescriptorTables(Struct, frozen=True):
    """The descriptor tables of some tasks, one row per task."""

    files: Addresses
    """Address of each table's array of files; 0 if it has none or cannot be read."""

    size: Numbers
    """Number of slots in each array."""


class Descriptors:
    """Looks up file descriptors."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses

    def tables(self, tasks: Addresses) -> DescriptorTables:
        """Find the tables of the ``struct task_struct`` at some addresses.

        A table that tasks share is read once.
        """
        task = self._structs("struct task_struct", _TASK, tasks)
        holder = self._structs(_HOLDER_TYPE, _HOLDER, task["files"])
        table = self._structs(_TABLE_TYPE, _TABLE, holder["table"])
        size = np.minimum(table["size"].astype(np.int64), MAX_OPEN)
        return DescriptorTables(table["files"], np.where(table.readable, size, 0))

    def lookup(self, tables: DescriptorTables, numbers: Numbers) -> Addresses:
        """Find the ``struct file`` of one descriptor of each table; 0 if not open.

        :param numbers: Descriptors, one per row of *tables*.
        """
        inside = (numbers >= 0) & (numbers < tables.size)
        offsets = np.where(inside, numbers, 0).astype(np.uint64) * np.uint64(8)
        addresses = tables.files + offsets
        files = np.zeros(len(numbers), np.uint64)
        wanted = np.flatnonzero(inside & (tables.files != 0))
        records, _ = self._reader.read_records(addresses[wanted], 8)
        files[wanted] = records.view("<u8")[:, 0]
        return files

    def all_files(
        self, tables: DescriptorTables, row: int, limit: int = MAX_OPEN
    ) -> Addresses:
        """Read a whole table: the ``struct file`` by descriptor, 0 if not open."""
        count = min(int(tables.size[row]), limit)
        if not count:
            return np.empty(0, np.uint64)
        try:
            return self._reader.words(int(tables.files[row]), count)
        except UNREADABLE as error:
            self._losses.lose(
                Loss.DESCRIPTORS, f"cannot read a table of open files: {error}"
            )
            return np.empty(0, np.uint64)

    def by_table(self, tasks: Addresses) -> Iterator[tuple[list[int], Addresses]]:
        """Read the tables of tasks, each once.

        :return: The rows of the tasks that share it, and the ``struct file`` by
            descriptor, 0 if not open.
        """
        tables = self.tables(tasks)
        sharers: dict[int, list[int]] = {}
        for row, table in enumerate(tables.files.tolist()):
            if table:
                sharers.setdefault(table, []).append(row)
        for rows in sharers.values():
            yield rows, self.all_files(tables, rows[0])

    def read_files(self, files: Addresses, columns: Iterable[str] = _OPEN) -> Structs:
        """Read some ``struct file``, by default all columns of an open file.

        :param columns: Keys of :data:`FILE`.
        """
        return self._structs(_FILE_TYPE, _file_members(columns), files)

    def _structs(
        self, type_name: str, members: Members, addresses: Addresses
    ) -> Structs:
        return read_structs(self._reader, type_name, members, addresses, self._losses)


class OpenFiles:
    """
    Every ``struct file`` in the file table of a process, once.

    Threads with a table of their own, and files in flight through a socket, are not
    included.
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
        Return ``private_data`` of the files with these ``struct file_operations``.

        :param operations: Names of global variables; those that this kernel lacks are
            skipped.
        :return: Non-NULL addresses, ascending and unique.
        """
        wanted = np.zeros(len(self._operations), np.bool_)
        for name in operations:
            with suppress(MissingError):
                wanted |= self._operations == find_variable(self._prog, name).address_
        chosen = self._private[wanted]
        return distinct(chosen[chosen != 0])


def _file_addresses(reader: Reader, losses: LossLog) -> Addresses:
    holders = distinct(processes(reader, losses).files)
    holders = holders[holders != 0]
    small, has_small = _small_tables(reader, holders)
    large, known = _rows(reader, _HOLDER_TYPE, _HOLDER, holders[~has_small])
    tables, readable = _rows(
        reader, _TABLE_TYPE, _TABLE, distinct(large["table"][known])
    )
    found, lost = [distinct(small)], np.count_nonzero(~known)
    lost += np.count_nonzero(~readable)
    arrays, sizes = tables["files"][readable], tables["size"][readable]
    most = reader.most(8)
    # The pointers of damaged sizes can be as many as memory holds: a part at a time.
    parts = np.cumsum(sizes, dtype=np.float64) // _PART
    starts = np.flatnonzero(np.diff(parts, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(sizes)]):
        addresses, rows, whole = reader.read_arrays(
            arrays[start:end], sizes[start:end].astype(np.uint64), most
        )
        most -= len(addresses)
        # With a damaged size the array runs into other data, which are not pointers.
        whole[rows[addresses % np.uint64(8) != 0]] = False
        found.append(distinct(addresses[whole[rows]]))
        lost += np.count_nonzero(~whole)
    losses.lose(Loss.DESCRIPTORS, count=int(lost))
    pointers = np.concatenate(found)
    return distinct(pointers[pointers != 0])


def _small_tables(
    reader: Reader, holders: Addresses
) -> tuple[Addresses, npt.NDArray[np.bool_]]:
    """
    Read the embedded tables, ``files_struct.fdtab``, of those that still use them.

    Most do, as they never had many files open. The table comes with its holder in one
    read.

    :return: The pointers in all of these, and whether each holder uses its own table.
    """
    type_ = find_type(reader.prog, _HOLDER_TYPE)
    table, array = (offset_of(type_, name) for name in ("fdtab", "fd_array"))
    rows, known = _rows(reader, _HOLDER_TYPE, _SMALL, holders)
    pointers = rows["array"]
    small = known & (rows["table"] == holders + np.uint64(table))
    small &= rows["files"] == holders + np.uint64(array)
    small &= rows["size"] == pointers.shape[1]
    small &= ~(pointers & np.uint64(7)).any(axis=1)
    return pointers[small].ravel(), small


def _rows(
    reader: Reader, type_name: str, members: Members, addresses: Addresses
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    layout = struct_layout(reader, type_name, members)
    if layout is None:
        raise MissingError(f"{type_name} has none of the members")
    return read_rows(reader, layout, addresses)


_RINGS = ("io_uring", "perf_event_list")


class FileTables(Struct, frozen=True):
    """Pointers in the ``struct task_struct`` of each thread group leader."""

    files: Addresses
    """Address of its ``struct files_struct``; 0 if it has none."""

    frag_pages: Addresses
    """Address of the struct page in its ``task_frag``; 0 if it has none."""

    io_uring: Addresses
    """Address of its ``struct io_uring_task``; 0 if it has used no ring."""

    perf_events: Addresses
    """Address of the list of the perf events that it opened; 0 if it is empty."""


def processes(reader: Reader, losses: LossLog) -> FileTables:
    """Read all processes, once per reader."""
    return reader.once(processes, lambda: _processes(reader, losses))


def _processes(reader: Reader, losses: LossLog) -> FileTables:
    prog = reader.prog
    task = find_type(prog, "struct task_struct")
    tasks = member_of(task, "tasks").offset
    offsets = [member_of(task, "files").offset, offset_of(task, "task_frag.page")]
    # Some kernels are configured without io_uring or perf.
    rings = [name for name in _RINGS if task.has_member(name)]
    offsets += [member_of(task, name).offset for name in rings]
    # Read only from the first to the last of these members.
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
    starts = [offset - first for offset in offsets]
    parts: list[bytes] = []
    addresses: list[int] = []
    for address, data in records:
        addresses.append(address - first)
        parts += [data[start : start + 8] for start in starts]
    words = np.frombuffer(b"".join(parts), np.uint64).reshape(-1, len(offsets))
    none = np.zeros(len(words), np.uint64)
    found = dict(zip(rings, words.T[2:], strict=True))
    events = none
    if "perf_event_list" in found:
        heads = np.array(addresses, np.uint64) + np.uint64(offsets[-1])
        firsts = found["perf_event_list"]
        events = np.where((firsts != heads) & (firsts != 0), heads, none)
    return FileTables(words[:, 0], words[:, 1], found.get("io_uring", none), events)
