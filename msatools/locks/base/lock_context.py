# SPDX-License-Identifier: LGPL-2.1-or-later

"""The context of a snapshot: what readers of locks share, made once for some tasks."""

from collections.abc import Callable
from functools import cached_property, wraps
from typing import TypeVar, cast

import drgn

from msatools.kernel.clocks import Clocks
from msatools.kernel.files import Descriptors
from msatools.kernel.paths import Paths, Place
from msatools.kernel.report import LossLog
from msatools.locks.base.sockets import Endpoints
from msatools.locks.base.storage import Inode, Storage
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.table import TaskTable
from msatools.tasks.text import KernelText

FEW_READS = 12
"""Other waiters, children or the like that are read for a single task."""

MAX_CANDIDATES = 24
"""Words of a stack that are tried, where only trying tells what they point at."""

MAX_WAITERS = 1 << 22
"""Waiters that are read of one queue: as many as there can be tasks."""

Made = TypeVar("Made")


class LockContext:
    """Tasks that are examined together, and the readers that they share.

    A reader that only one module needs is made there, by a function with the decorator
    :func:`per_context`.
    """

    def __init__(
        self,
        layout: Layout,
        tasks: TaskTable,
        losses: LossLog,
        clocks: Clocks,
        alone: bool,
        limit: int | None = None,
    ) -> None:
        self.layout = layout
        self.reader = layout.reader
        self.tasks = tasks
        self.losses = losses
        self.alone = alone
        """Whether it is a single task: only a few others are read then."""

        self.live = layout.reader.is_live
        """Whether the kernel runs: then each read is of another moment."""

        self.limit = limit or (FEW_READS if alone else MAX_WAITERS)
        """How many waiters of one queue are read."""

        self.storage = Storage(layout, losses)
        self.descriptors = Descriptors(self.reader, losses)
        self.paths = Paths(self.reader, losses)
        self.endpoints: dict[int, Endpoints | None] = {}
        """By ``struct socket``."""

        self.monotonic_ns = clocks.monotonic_ns
        """CLOCK_MONOTONIC at the snapshot; ``None`` if unknown."""

        self.made: dict[Callable[[LockContext], object], object] = {}
        """Results by function: see :func:`per_context`."""

        self._file_paths: dict[int, str | None] = {}

    @cached_property
    def text(self) -> KernelText:
        """The names of functions."""
        return KernelText(self.reader, self.losses)

    @cached_property
    def _rows(self) -> dict[int, int]:
        addresses = self.tasks["address"].tolist()
        return {address: row for row, address in enumerate(addresses)}

    def pid(self, task: int, leader: bool = False) -> int | None:
        """Return the ID of the thread at an address, or of its process.

        :raises drgn.FaultError: if it cannot be read
        """
        name = "tgid" if leader else "pid"
        row = self._rows.get(task)
        if row is not None:
            return int(self.tasks[name][row])
        if task < KERNEL_HALF:
            return None
        return self.layout.member(task, "task_struct", name)

    def function(self, frame: drgn.StackFrame) -> str | None:
        """Return the name of a frame's function, as the compiler gave it.

        drgn has no names for a module without debug info if the kernel has debug info.
        """
        # A call may be the last instruction of its function.
        return self.text.name(frame.pc if frame.interrupted else frame.pc - 1)

    def path_at(self, place: Place) -> str | None:
        """Return the path of a place."""
        return self.paths.tell([place])[0]

    def path_of_file(self, file: int) -> str | None:
        """Return the path of the ``struct file`` at an address.

        :raises drgn.FaultError: if it cannot be read
        """
        if file not in self._file_paths:
            names = ("f_path.mnt", "f_path.dentry")
            mount, dentry = self.layout.members(file, "file", *names)
            self._file_paths[file] = self.path_at((mount, dentry))
        return self._file_paths[file]

    def path_of(self, inode: Inode) -> str | None:
        """Return a path of an inode: its first name, below the first mount.

        :raises drgn.FaultError: if it cannot be read
        """
        first = self.layout.member(inode.address, "inode", "i_dentry")
        if first < KERNEL_HALF:
            return None
        dentry = first - self.layout.offset("dentry", "d_u.d_alias", "d_alias")
        mount = self.paths.mount_of(inode.super_block)
        return self.path_at((mount, dentry)) if mount else None


def per_context(make: Callable[[LockContext], Made]) -> Callable[[LockContext], Made]:
    """Decorate a function of a context so that it is called once for each context.

    Its result is kept as long as the context.
    """

    @wraps(make)
    def made(context: LockContext) -> Made:
        if make not in context.made:
            context.made[make] = make(context)
        return cast(Made, context.made[make])

    return made


def signals_of(mask: int) -> tuple[int, ...]:
    """Return the numbers of the signals in a set."""
    return tuple(number for number in range(1, 65) if mask >> (number - 1) & 1)
