# SPDX-License-Identifier: LGPL-2.1-or-later

"""The memory that zombies hold until they are reaped.

kernel/exit.c, kernel/fork.c: address space, files and stack are freed at exit, the rest
by release_task() and RCU callbacks after it.
"""

from collections import Counter

import numpy as np

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.pidnamespaces import innermost_numbers
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.locks.base.struct_reader import Layout
from msatools.locks.places.slabs import Slabs
from msatools.tasks.stackmemory import Rows
from msatools.tasks.table import TaskTable
from msatools.zombies.model import HeldMemory


def held_memory(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> HeldMemory:
    """Return the memory that dead tasks hold, with the padding of the slab allocator.

    Objects shared with living tasks are not counted. Each size is read from one object,
    as all objects of a cache have the same size. Unknown sizes are left out, and noted.

    :param tasks: All tasks.
    :param zombies: Rows of the dead tasks in the table.
    """
    sizes = _Sizes(reader, losses)
    alone = _Alone(tasks, zombies)
    dead = tasks["address"][zombies].astype(np.uint64)
    processes, creds, pids = map(alone, ("signal", "cred", "thread_pid"))
    found = [
        ("task_struct", sizes.of("task_struct", dead), len(dead)),
        ("signal_struct", sizes.of("signal_struct", processes), len(processes)),
        # Rare clones that share a sighand_struct are counted as if they did not.
        (
            "sighand_struct",
            sizes.member("task_struct", "sighand", _of(tasks, zombies, processes)),
            len(processes),
        ),
        ("cred", sizes.of("cred", creds), len(creds)),
        # Data of security modules.
        ("task security", sizes.member("task_struct", "security", dead), len(dead)),
        ("cred security", sizes.member("cred", "security", creds), len(creds)),
    ]
    if tasks.has("delays"):
        delays = alone("delays")
        found.append(("task_delay_info", sizes.of("delays", delays), len(delays)))
    size, all_pids = _pids(reader, sizes, pids, losses)
    each = {name: size for name, size, _ in found if size}
    if size:
        each["pid"] = size
    return HeldMemory(
        bytes=sum(size * count for _, size, count in found) + all_pids, each_bytes=each
    )


class _Alone:
    """Objects of dead tasks that are not shared with living ones."""

    def __init__(self, tasks: TaskTable, zombies: Rows) -> None:
        self._tasks = tasks
        self._dead = zombies
        living = np.ones(len(tasks), np.bool_)
        living[zombies] = False
        self._living = living

    def __call__(self, column: str) -> Addresses:
        """Return the different addresses of such objects in a column of the table."""
        addresses = self._tasks[column]
        dead = distinct(addresses[self._dead])
        alone = dead[(dead != 0) & ~np.isin(dead, addresses[self._living])]
        found: Addresses = alone.astype(np.uint64)
        return found


class _Sizes:
    """Finds the sizes of slab objects by their addresses."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._layout = Layout(reader)
        self._slabs = Slabs(self._layout)
        self._losses = losses

    def of(self, name: str, addresses: Addresses) -> int:
        """Return the size of objects, read from the first; 0 if unknown."""
        if not len(addresses):
            return 0
        try:
            found = self._slabs.find(int(addresses[0]))
        except LOST as error:
            self._losses.lose(Loss.SIZES, f"cannot read a size: {error}", about=name)
            return 0
        return 0 if found is None else found.size

    def member(self, type_: str, member: str, owners: Addresses) -> int:
        """Return the size of the object that a member points to; 0 if not found."""
        if not len(owners) or not self._layout.has(type_, member):
            return 0
        try:
            pointer = self._layout.member(int(owners[0]), type_, member)
        except UNREADABLE as error:
            self._losses.lose(Loss.SIZES, f"cannot read a size: {error}", about=member)
            return 0
        return self.of(member, np.array([pointer], np.uint64))


def _of(tasks: TaskTable, zombies: Rows, processes: Addresses) -> Addresses:
    """Return the dead tasks of the first of some processes."""
    rows = zombies[np.isin(tasks["signal"][zombies], processes[:1])]
    addresses: Addresses = tasks["address"][rows].astype(np.uint64)
    return addresses


def _pids(
    reader: Reader, sizes: _Sizes, pids: Addresses, losses: LossLog
) -> tuple[int, int]:
    """Return the most common size of a ``struct pid``, and the sum of all sizes.

    It has a number for each level of PID namespaces, and a cache for each level.
    """
    spaces, _ = innermost_numbers(reader, pids, losses)
    unique, first, counts = np.unique(spaces, return_index=True, return_counts=True)
    bytes_of: Counter[int] = Counter()
    for space, index, count in zip(
        unique.tolist(), first.tolist(), counts.tolist(), strict=True
    ):
        if space:
            size = sizes.of("pid", pids[index : index + 1])
            bytes_of[size] += size * count
    if not bytes_of:
        return 0, 0
    most, _ = bytes_of.most_common(1)[0]
    return most, sum(bytes_of.values())
