# SPDX-License-Identifier: LGPL-2.1-or-later

"""The context of a snapshot: the tasks and the readers that lock types share."""

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
from msatools.tasks.standing import Throttles
from msatools.tasks.table import TaskTable
from msatools.tasks.text import KernelText

FEW_READS = 12
"""Maximum number of other waiters, children or the like to read for a single task."""

MAX_CANDIDATES = 24
"""Maximum number of words of a stack to try as the address of a structure."""

MAX_WAITERS = 1 << 22
"""Maximum number of waiters to read of one queue: as many as there can be tasks."""

Made = TypeVar("Made")


class LockContext:
    """Tasks that are examined together, and the readers that they share.

    A module that needs a reader of its own makes it with :func:`per_context`.
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
        """Whether only a few tasks are examined, so few others may be read for them."""

        self.live = layout.reader.is_live
        """Whether the kernel runs, and may change between two reads."""

        self.limit = limit or (FEW_READS if alone else MAX_WAITERS)
        """Maximum number of waiters to read of one queue."""

        self.storage = Storage(layout, losses)
        self.descriptors = Descriptors(self.reader, losses)
        self.paths = Paths(self.reader, losses)
        self.endpoints: dict[int, Endpoints | None] = {}
        """Maps the address of a ``struct socket`` to its endpoints."""

        self.local_ns = clocks.local_ns
        """The local clock at the snapshot (:class:`.Clocks`)."""

        self.monotonic_ns = clocks.monotonic_ns
        """CLOCK_MONOTONIC at the snapshot; ``None`` if unknown."""

        self.made: dict[Callable[[LockContext], object], object] = {}
        """Maps a function to its result: see :func:`per_context`."""

        self._file_paths: dict[int, str | None] = {}

    @cached_property
    def text(self) -> KernelText:
        """Maps addresses to names of functions."""
        return KernelText(self.reader, self.losses)

    @cached_property
    def throttles(self) -> Throttles:
        """Which tasks may not run for now, and why."""
        return Throttles(self.reader, self.tasks, self.losses)

    @cached_property
    def _rows(self) -> dict[int, int]:
        addresses = self.tasks["address"].tolist()
        return {address: row for row, address in enumerate(addresses)}

    def pid(self, task: int, leader: bool = False) -> int | None:
        """Return the ID of a thread, or of its process.

        :param task: Address of a ``struct task_struct``.
        :param leader: Whether to return the ID of the process.
        :raises drgn.FaultError: if the task cannot be read
        """
        name = "tgid" if leader else "pid"
        row = self._rows.get(task)
        if row is not None:
            return int(self.tasks[name][row])
        if task < KERNEL_HALF:
            return None
        return self.layout.member(task, "task_struct", name)

    def function(self, frame: drgn.StackFrame) -> str | None:
        """Return the name of a frame's function, with suffixes of the compiler.

        drgn itself has no names of a module without debug info if the kernel has debug
        info.
        """
        # The return address may be past the end of the function if it ends with a call.
        return self.text.name(frame.pc if frame.interrupted else frame.pc - 1)

    def path_at(self, place: Place) -> str | None:
        """Return the path of a mount and a dentry."""
        return self.paths.tell([place])[0]

    def path_of_file(self, file: int) -> str | None:
        """Return the path of a ``struct file``.

        :raises drgn.FaultError: if it cannot be read
        """
        if file not in self._file_paths:
            mount, dentry = self.layout.members(
                file, "file", "f_path.mnt", "f_path.dentry"
            )
            self._file_paths[file] = self.path_at((mount, dentry))
        return self._file_paths[file]

    def path_of(self, inode: Inode) -> str | None:
        """Return a path of an inode: of its first dentry, under the first mount.

        :raises drgn.FaultError: if it cannot be read
        """
        first = self.layout.member(inode.address, "inode", "i_dentry")
        if first < KERNEL_HALF:
            return None
        dentry = first - self.layout.offset("dentry", "d_u.d_alias", "d_alias")
        mount = self.paths.mount_of(inode.super_block)
        return self.path_at((mount, dentry)) if mount else None


def per_context(make: Callable[[LockContext], Made]) -> Callable[[LockContext], Made]:
    """Decorate a function so that it is called once per context.

    The context keeps the result.
    """

    @wraps(make)
    def made(context: LockContext) -> Made:
        if make not in context.made:
            context.made[make] = make(context)
        return cast(Made, context.made[make])

    return made


def signals_of(mask: int) -> tuple[int, ...]:
    """Return the numbers of the signals in a ``sigset_t``."""
    return tuple(number for number in range(1, 65) if mask >> (number - 1) & 1)
