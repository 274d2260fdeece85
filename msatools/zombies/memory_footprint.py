# SPDX-License-Identifier: LGPL-2.1-or-later

"""The memory that the dead hold until they are reaped.

kernel/exit.c, kernel/fork.c: memory, files and stack are gone by then; release_task()
and what follows give the rest back.
"""

from collections import Counter

import drgn
import numpy as np

from msatools.kernel.losses import Loss
from msatools.kernel.pidnamespaces import innermost_numbers
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.locks.base.struct_reader import Layout
from msatools.locks.places.slabs import Slabs
from msatools.tasks.stackmemory import Rows
from msatools.tasks.table import TaskTable
from msatools.zombies.model import HeldMemory


def held_memory(
    reader: Reader, tasks: TaskTable, zombies: Rows, losses: LossLog
) -> HeldMemory:
    """Return what the dead hold, with all that the slab allocator puts around it.

    What is shared with the living is not counted. The sizes are those of the objects of
    one of the dead each, as all of a cache are alike. What cannot be told is left out,
    with a note.

    :param tasks: All tasks.
    :param zombies: Rows of the dead in the table.
    """
    sizes = _Sizes(reader, losses)
    alone = _Alone(tasks, zombies)
    dead = tasks["address"][zombies].astype(np.uint64)
    processes, creds, pids = map(alone, ("signal", "cred", "thread_pid"))
    found = [
        ("task_struct", sizes.of("task_struct", dead), len(dead)),
        ("signal_struct", sizes.of("signal_struct", processes), len(processes)),
        # Processes that share what they do on signals, as few clones do, are taken for
        # ones that do not.
        (
            "sighand_struct",
            sizes.member("task_struct", "sighand", _of(tasks, zombies, processes)),
            len(processes),
        ),
        ("cred", sizes.of("cred", creds), len(creds)),
        # What security modules keep of each.
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
    """What the dead have that the living do not have as well."""

    def __init__(self, tasks: TaskTable, zombies: Rows) -> None:
        self._tasks = tasks
        self._dead = zombies
        living = np.ones(len(tasks), np.bool_)
        living[zombies] = False
        self._living = living

    def __call__(self, column: str) -> Addresses:
        """Return the different addresses in a column of the table."""
        addresses = self._tasks[column]
        dead = np.unique(addresses[self._dead])
        alone = dead[(dead != 0) & ~np.isin(dead, addresses[self._living])]
        found: Addresses = alone.astype(np.uint64)
        return found


class _Sizes:
    """Tells sizes of objects by where they are."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._layout = Layout(reader)
        self._slabs = Slabs(self._layout)
        self._losses = losses

    def of(self, name: str, addresses: Addresses) -> int:
        """Return the size of objects by the first of them; 0 if that cannot be told."""
        if not len(addresses):
            return 0
        try:
            found = self._slabs.find(int(addresses[0]))
        except (drgn.FaultError, LookupError) as error:
            self._losses.lose(Loss.SIZES, f"a size is lost: {error}", about=name)
            return 0
        return 0 if found is None else found.size

    def member(self, type_: str, member: str, owners: Addresses) -> int:
        """Return the size of what a member points at; 0 if there is no such thing."""
        if not len(owners) or not self._layout.has(type_, member):
            return 0
        try:
            pointer = self._layout.member(int(owners[0]), type_, member)
        except drgn.FaultError as error:
            self._losses.lose(Loss.SIZES, f"a size is lost: {error}", about=member)
            return 0
        return self.of(member, np.array([pointer], np.uint64))


def _of(tasks: TaskTable, zombies: Rows, processes: Addresses) -> Addresses:
    """Find the dead tasks of the first of some processes."""
    rows = zombies[np.isin(tasks["signal"][zombies], processes[:1])]
    addresses: Addresses = tasks["address"][rows].astype(np.uint64)
    return addresses


def _pids(
    reader: Reader, sizes: _Sizes, pids: Addresses, losses: LossLog
) -> tuple[int, int]:
    """Return the size of most ``struct pid``, and that of all.

    It has a number for each namespace, and so a cache for each depth.
    """
    spaces, _ = innermost_numbers(reader, pids, losses)
    each, first, counts = np.unique(spaces, return_index=True, return_counts=True)
    bytes_of: Counter[int] = Counter()
    for space, at, count in zip(
        each.tolist(), first.tolist(), counts.tolist(), strict=True
    ):
        if space:
            size = sizes.of("pid", pids[at : at + 1])
            bytes_of[size] += size * count
    if not bytes_of:
        return 0, 0
    most, _ = bytes_of.most_common(1)[0]
    return most, sum(bytes_of.values())
