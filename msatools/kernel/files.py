# SPDX-License-Identifier: LGPL-2.1-or-later

"""The open files of all processes, by what kind of file they are."""

from collections.abc import Iterable, Iterator

import drgn
import numpy as np

from msatools.kernel.changinglists import changing_list
from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.report import Findings


class OpenFiles:
    """
    Every ``struct file`` in a process's file table, once.

    Threads that have a table of their own, and files on their way through a
    socket, are not seen.
    """

    def __init__(self, reader: Reader, findings: Findings) -> None:
        self._prog = reader.prog
        addresses = _file_addresses(reader, findings)
        file = reader.prog.type("struct file")
        f_op, private = file.member("f_op").offset, file.member("private_data").offset
        records, readable = reader.read_records(addresses, max(f_op, private) + 8)
        findings.coverage["files_unreadable"] += int(np.count_nonzero(~readable))
        self._operations = column(records, f_op)
        self._private = column(records, private)

    def private_data(self, operations: Iterable[str]) -> Addresses:
        """
        Find what the files with these ``struct file_operations`` stand for.

        :param operations: Names of global variables; those that this kernel
            does not have are passed over.
        :return: Their ``private_data``, ascending and unique.
        """
        known = []
        for name in operations:
            try:
                known.append(self._prog[name].address_)
            except LookupError:
                continue
        chosen = self._private[np.isin(self._operations, known)]
        return np.unique(chosen[chosen != 0])


def _file_addresses(reader: Reader, findings: Findings) -> Addresses:
    task = reader.prog.type("struct task_struct")
    member = task.member("files").offset
    tables = {
        int.from_bytes(data[member : member + 8], "little")
        for data in process_records(reader, member + 8, findings)
    }
    found = [np.empty(0, np.uint64)]
    for table in sorted(tables - {0}):
        try:
            found.append(_table(reader, table))
        except drgn.FaultError:
            findings.coverage["file_tables_unreadable"] += 1
    addresses = np.unique(np.concatenate(found))
    used: Addresses = addresses[addresses != 0]
    return used


def process_records(reader: Reader, size: int, findings: Findings) -> Iterator[bytes]:
    """Read the start of each process's first ``struct task_struct``."""
    prog = reader.prog
    tasks = prog.type("struct task_struct").member("tasks").offset
    init = prog["init_task"].address_
    for _, data in changing_list(
        reader,
        init + tasks,
        tasks,
        max(size, tasks + 16),
        {init},
        "the list of processes",
        findings,
    ):
        yield data


def _table(reader: Reader, files: int) -> Addresses:
    table = drgn.Object(reader.prog, "struct files_struct", address=files).fdt
    count = int(table.max_fds)
    return reader.words(table.fd.value_(), count)
