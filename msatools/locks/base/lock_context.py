# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is shared by all who examine some tasks, and made once for them."""

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
"""Other waiters, children or the like that are looked at for a single task."""

MAX_CANDIDATES = 24
"""Words of a stack that are tried, where only trying tells what they point at."""

MAX_WAITERS = 1 << 22
"""In one queue: all tasks that there can be."""

Made = TypeVar("Made")


class LockContext:
    """The tasks that are examined together, and what all who examine them share.

    What only some of them need is made by a function that :func:`per_context` decorates
    and that lies with what it makes: nothing here knows of it.
    """

    def __init__(
        self,
        layout: Layout,
        tasks: TaskTable,
        findings: LossLog,
        clocks: Clocks,
        alone: bool,
        limit: int | None = None,
    ) -> None:
        self.layout = layout
        self.reader = layout.reader
        self.tasks = tasks
        self.findings = findings
        self.alone = alone
        """Whether just one task is looked at: others are not, then, but for a few."""

        self.live = bool(layout.reader.prog.flags & drgn.ProgramFlags.IS_LIVE)
        """Whether the kernel runs: what is read is of as many moments as reads."""

        self.limit = limit or (FEW_READS if alone else MAX_WAITERS)
        """How many in one queue are looked at."""

        self.storage = Storage(layout, findings)
        self.descriptors = Descriptors(self.reader, findings)
        self.paths = Paths(self.reader, findings)
        self.endpoints: dict[int, Endpoints | None] = {}
        """By ``struct socket``."""

        self.monotonic_ns = clocks.monotonic_ns
        """What CLOCK_MONOTONIC shows; ``None`` if it is unknown."""

        self.made: dict[Callable[[LockContext], object], object] = {}
        """What functions have made of this context: see :func:`per_context`."""

        self._file_paths: dict[int, str | None] = {}

    @cached_property
    def text(self) -> KernelText:
        """Names functions."""
        return KernelText(self.reader, self.findings)

    @cached_property
    def _rows(self) -> dict[int, int]:
        addresses = self.tasks["address"].tolist()
        return {address: row for row, address in enumerate(addresses)}

    def pid(self, task: int, leader: bool = False) -> int | None:
        """Tell the ID of the thread at an address, or of its process.

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
        """Name a frame's function as the compiler did.

        drgn names none of a module that has no debug info where the kernel has some.
        """
        # A call may be the last that its function does.
        return self.text.name(frame.pc if frame.interrupted else frame.pc - 1)

    def path_at(self, place: Place) -> str | None:
        """Tell the path of a place."""
        return self.paths.tell([place])[0]

    def path_of_file(self, file: int) -> str | None:
        """Tell the path of the ``struct file`` at an address.

        :raises drgn.FaultError: if it cannot be read
        """
        if file not in self._file_paths:
            names = ("f_path.mnt", "f_path.dentry")
            mount, dentry = self.layout.members(file, "file", *names)
            self._file_paths[file] = self.path_at((mount, dentry))
        return self._file_paths[file]

    def path_of(self, inode: Inode) -> str | None:
        """Tell a path of an inode: its first name, below the first mount.

        :raises drgn.FaultError: if it cannot be read
        """
        first = self.layout.member(inode.address, "inode", "i_dentry")
        if first < KERNEL_HALF:
            return None
        dentry = first - self.layout.offset("dentry", "d_u.d_alias", "d_alias")
        mount = self.paths.mount_of(inode.super_block)
        return self.path_at((mount, dentry)) if mount else None


def per_context(make: Callable[[LockContext], Made]) -> Callable[[LockContext], Made]:
    """Decorate a function of a context: it is called once for each context.

    What it has returned lasts as long as the context.
    """

    @wraps(make)
    def made(context: LockContext) -> Made:
        if make not in context.made:
            context.made[make] = make(context)
        return cast(Made, context.made[make])

    return made


def signals_of(mask: int) -> tuple[int, ...]:
    """Give the numbers of the signals in a set."""
    return tuple(number for number in range(1, 65) if mask >> (number - 1) & 1)
