# SPDX-License-Identifier: LGPL-2.1-or-later

"""Open files of tasks, by file descriptor."""

from functools import cached_property

import numpy as np

from msatools.kernel.files import Descriptors
from msatools.kernel.reader import Addresses
from msatools.kernel.structs import Structs
from msatools.locks.base.blocked_tasks import BlockedTask, OpenFile
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.storage import Inode
from msatools.target.addresses import KERNEL_HALF


class TaskFiles:
    """The open files of one table of file descriptors."""

    def __init__(self, descriptors: Descriptors, table: Addresses) -> None:
        self._descriptors = descriptors
        fds = np.flatnonzero(table)
        self._fds: list[int] = fds.tolist()
        self._files: Addresses = table[fds]

    @cached_property
    def _read(self) -> Structs:
        return self._descriptors.read_files(self._files)

    @cached_property
    def numbers(self) -> dict[int, list[int]]:
        """Maps the address of each ``struct file`` to its descriptors."""
        fds: dict[int, list[int]] = {}
        for fd, file in zip(self._fds, self._files.tolist(), strict=True):
            fds.setdefault(file, []).append(fd)
        return fds

    @cached_property
    def by_private(self) -> dict[int, int]:
        """Maps ``private_data`` of each file to its first descriptor."""
        values = self._read["private"].tolist()
        pairs = zip(values, self._fds, strict=True)
        return dict(reversed(list(pairs)))

    def with_operations(self, operations: int | None) -> list[tuple[int, int]]:
        """Return descriptor and ``private_data`` of the files of one kind.

        :param operations: Address of its ``struct file_operations``.
        """
        rows = np.flatnonzero(self._read["operations"] == np.uint64(operations or 0))
        private = self._read["private"]
        return [(self._fds[row], int(private[row])) for row in rows.tolist()]


def open_files(context: LockContext, case: BlockedTask) -> TaskFiles:
    """Return the open files of a task; a table that tasks share is read once.

    :raises drgn.FaultError: if the task cannot be read
    """
    tables = _tables(context)
    shared = context.layout.member(case.address, "task_struct", "files")
    if shared not in tables:
        own = context.descriptors.tables(np.array([case.address], np.uint64))
        files = context.descriptors.all_files(own, 0)
        tables[shared] = TaskFiles(context.descriptors, files)
    return tables[shared]


@per_context
def _tables(context: LockContext) -> dict[int, TaskFiles]:
    """Maps the address of a ``struct files_struct`` to its open files."""
    return {}


def is_data_of(context: LockContext, file: OpenFile | None, inode: Inode) -> bool:
    """Return whether an open file has the data of an inode.

    :raises drgn.FaultError: if the mapping of the file cannot be read
    """
    if file is None or file.mapping < KERNEL_HALF:
        return False
    host = context.layout.member(file.mapping, "address_space", "host")
    return host == inode.address
