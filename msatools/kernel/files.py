# SPDX-License-Identifier: LGPL-2.1-or-later

"""The open files of all processes, by what kind of file they are."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.live_lists import changing_list
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, column, distinct
from msatools.kernel.report import LossLog


class OpenFiles:
    """
    Every ``struct file`` in a process's file table, once.

    Threads that have a table of their own, and files on their way through a
    socket, are not seen.
    """

    def __init__(self, reader: Reader, findings: LossLog) -> None:
        self._prog = reader.prog
        addresses = _file_addresses(reader, findings)
        file = reader.prog.type("struct file")
        f_op, private = file.member("f_op").offset, file.member("private_data").offset
        records, readable = reader.read_records(addresses, max(f_op, private) + 8)
        findings.lose(Loss.FILES, count=int(np.count_nonzero(~readable)))
        self._operations = column(records, f_op)
        self._private = column(records, private)

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
                wanted |= self._operations == self._prog[name].address_
        chosen = self._private[wanted]
        return distinct(chosen[chosen != 0])


def _file_addresses(reader: Reader, findings: LossLog) -> Addresses:
    prog = reader.prog
    fdt = prog.type("struct files_struct").member("fdt").offset
    table = prog.type("struct fdtable")
    count, array = table.member("max_fds"), table.member("fd")
    holders = distinct(processes(reader, findings).files)
    holders = holders[holders != 0]
    small, has_small = _small_tables(reader, holders)
    records, known = reader.read_records(holders[~has_small], fdt + 8)
    tables = distinct(column(records, fdt)[known])
    records, readable = reader.read_records(tables, drgn.sizeof(table))
    addresses, rows, whole = reader.read_arrays(
        column(records, array.offset)[readable],
        column(records, count.offset, drgn.sizeof(count.type))[readable],
    )
    # A damaged number of them leads to what are no pointers, and as many reads.
    whole[rows[addresses % np.uint64(8) != 0]] = False
    addresses = np.concatenate((small, addresses[whole[rows]]))
    lost = sum(np.count_nonzero(~there) for there in (known, readable, whole))
    findings.lose(Loss.DESCRIPTORS, count=int(lost))
    return distinct(addresses[addresses != 0])


def _small_tables(
    reader: Reader, holders: Addresses
) -> tuple[Addresses, npt.NDArray[np.bool_]]:
    """
    Read the tables of those that never had many files open, as most have not.

    Theirs are part of ``struct files_struct``, and come with it in one read.

    :return: The pointers in all of these, and whether each holder has such a table.
    """
    type_ = reader.prog.type("struct files_struct")
    fdt, table, files = (type_.member(name) for name in ("fdt", "fdtab", "fd_array"))
    count, fd = (table.type.member(name) for name in ("max_fds", "fd"))
    records, known = reader.read_records(holders, drgn.sizeof(type_))
    array = np.ascontiguousarray(records[:, files.offset :])
    pointers = array.view(np.uint64)[:, : files.type.length]
    small = known & (column(records, fdt.offset) == holders + np.uint64(table.offset))
    small &= column(records, table.offset + fd.offset) == holders + np.uint64(
        files.offset
    )
    counts = column(records, table.offset + count.offset, drgn.sizeof(count.type))
    small &= counts == files.type.length
    small &= ~(pointers & np.uint64(7)).any(axis=1)
    return pointers[small].ravel(), small


@dataclass(frozen=True)
class FileTables:
    """What of each process's first ``struct task_struct`` names other things."""

    files: Addresses
    """Of its ``struct files_struct``; 0 if it has none."""

    frag_pages: Addresses
    """Of the struct page that it keeps to send from; 0 if it has none."""


def processes(reader: Reader, findings: LossLog) -> FileTables:
    """Read all processes, which is done once."""
    return reader.once(processes, lambda: _processes(reader, findings))


def _processes(reader: Reader, findings: LossLog) -> FileTables:
    prog = reader.prog
    task = prog.type("struct task_struct")
    tasks = task.member("tasks").offset
    offsets = task.member("files").offset, drgn.offsetof(task, "task_frag.page")
    # No more of each than from the first to the last of these.
    first, last = min(*offsets, tasks), max(*offsets, tasks + 8)
    init = prog["init_task"].address_
    records = changing_list(
        reader,
        init + tasks,
        tasks - first,
        last + 8 - first,
        {init + first},
        "the list of processes",
        findings,
    )
    places = [offset - first for offset in offsets]
    members = (data[at : at + 8] for _, data in records for at in places)
    words = np.frombuffer(b"".join(members), np.uint64).reshape(-1, len(offsets))
    return FileTables(words[:, 0], words[:, 1])
