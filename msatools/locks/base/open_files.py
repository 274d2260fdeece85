# SPDX-License-Identifier: LGPL-2.1-or-later

"""The open files of tasks, and their descriptors."""

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
    """The open files of one table, and the descriptors that they have."""

    def __init__(self, descriptors: Descriptors, table: Addresses) -> None:
        self._descriptors = descriptors
        numbers = np.flatnonzero(table)
        self._numbers: list[int] = numbers.tolist()
        self._files: Addresses = table[numbers]

    @cached_property
    def _read(self) -> Structs:
        return self._descriptors.read_files(self._files)

    @cached_property
    def numbers(self) -> dict[int, list[int]]:
        """The descriptors by ``struct file``."""
        found: dict[int, list[int]] = {}
        for number, file in zip(self._numbers, self._files.tolist(), strict=True):
            found.setdefault(file, []).append(number)
        return found

    @cached_property
    def by_private(self) -> dict[int, int]:
        """The first descriptor by what its file stands for."""
        values = self._read["private"].tolist()
        pairs = zip(values, self._numbers, strict=True)
        return dict(reversed(list(pairs)))

    def with_operations(self, operations: int | None) -> list[tuple[int, int]]:
        """Return descriptor and ``private_data`` of files with some operations."""
        fits = np.flatnonzero(self._read["operations"] == np.uint64(operations or 0))
        private = self._read["private"]
        return [(self._numbers[row], int(private[row])) for row in fits.tolist()]


def open_files(context: LockContext, case: BlockedTask) -> TaskFiles:
    """Read all open files of a task; those that tasks share are read once.

    :raises drgn.FaultError: if it cannot be read
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
    """By ``struct files_struct``."""
    return {}


def is_data_of(context: LockContext, file: OpenFile | None, inode: Inode) -> bool:
    """Return whether the data of an open file is that of an inode.

    :raises drgn.FaultError: if it cannot be read
    """
    if file is None or file.mapping < KERNEL_HALF:
        return False
    host = context.layout.member(file.mapping, "address_space", "host")
    return host == inode.address
