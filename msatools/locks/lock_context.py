# SPDX-License-Identifier: LGPL-2.1-or-later

"""One look at what tasks wait on: a task's case, and what all cases may ask."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import drgn
import numpy as np

from msatools.kernel.clocks import Clocks
from msatools.kernel.paths import Paths, Place
from msatools.kernel.reader import Addresses
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Structs
from msatools.locks.events.kthreads import KernelThreads
from msatools.locks.events.queues import WaitQueues
from msatools.locks.events.work import Workqueues
from msatools.locks.external_waits.fuse import Fuse
from msatools.locks.external_waits.mapper import Mapper
from msatools.locks.futexkey import FutexKey
from msatools.locks.names.places import Places
from msatools.locks.ownstack import OwnStack
from msatools.locks.sleeping.kernellocks import MAX_WAITERS, KernelLocks
from msatools.locks.sockets import Endpoints
from msatools.locks.storage import Inode, Storage
from msatools.locks.struct_reader import Layout
from msatools.locks.user.futexes import Futexes, Waiter
from msatools.locks.user.usermemory import UserMemory
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass
from msatools.tasks.descriptors import Descriptors
from msatools.tasks.table import TaskTable
from msatools.tasks.text import KernelText
from msatools.tasks.wait_options import WaitOptsReader

FEW_READS = 12
"""Other waiters, children or the like that are looked at for a single task."""

MAX_CANDIDATES = 24
"""Words of a stack that are tried, where only trying tells what they point at."""

_NEVER = (1 << 63) - 1
"""``KTIME_MAX``: a timer that is not to end."""


class Ends(TypedDict, total=False):
    """When a wait ends by itself: fields of ``On``."""

    expires_ns: int
    left_ns: int


@dataclass(frozen=True)
class OpenFile:
    """What a file descriptor of a task is."""

    fd: int
    address: int
    inode: int
    mapping: int
    """The ``struct address_space`` of its data."""

    private: int
    place: Place


@dataclass
class BlockedTask:
    """A task, and what is at hand to tell what it waits on."""

    row: int
    """In the table of tasks."""

    address: int
    mm: int
    task_class: TaskClass
    names: tuple[str, ...]
    """The functions on its stack, innermost first, as the compiler named them."""

    call: str | None
    """Its system call, if its arguments are known."""

    arguments: list[int]
    """Of the call; all zero where they are not known."""

    plain: bool
    """Whether the arguments are those that the call's manual has: 32-bit code may have
    called by a number that stands for several."""

    stack: OwnStack
    file: OpenFile | None = None
    """What the call is about, if its first argument is a file descriptor."""

    def is_in(self, *functions: str) -> bool:
        """Tell whether a function is on the stack; what the compiler adds is none."""
        return any(name.partition(".")[0] in functions for name in self.names)

    @property
    def fd(self) -> int | None:
        """The first argument, as a file descriptor."""
        return self.arguments[0] & 0x7FFF_FFFF if self.call else None


class LockContext:
    """What has been learned in one look at the tasks."""

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
        self.locks = KernelLocks(layout, findings)
        self.queues = WaitQueues(layout, findings, self.limit)
        self.kthreads = KernelThreads(layout, findings)
        self.workqueues = Workqueues(layout, self.kthreads, findings)
        self.descriptors = Descriptors(self.reader, findings)
        self.paths = Paths(self.reader, findings)
        self.fuse = Fuse(layout, findings, tasks, self.descriptors, self.queues)
        self.mapper = Mapper(layout, findings)
        self.endpoints: dict[int, Endpoints | None] = {}
        """By ``struct socket``."""

        self._monotonic_ns = clocks.monotonic_ns
        self._tables: dict[int, TaskFiles] = {}
        self._file_paths: dict[int, str | None] = {}
        self._clock_offsets: dict[int, int] = {}

    @cached_property
    def text(self) -> KernelText:
        """Names functions."""
        return KernelText(self.reader, self.findings)

    @cached_property
    def places(self) -> Places:
        """Finds what locks are in."""
        return Places(self.layout, self.storage, self.findings, self.tasks)

    @cached_property
    def wait_opts(self) -> WaitOptsReader:
        """Reads what is waited for by wait()."""
        return WaitOptsReader(self.reader)

    @cached_property
    def futexes(self) -> Futexes:
        """Reads waiters on futexes."""
        return Futexes(self.layout, self.findings)

    @cached_property
    def _all_waiters(self) -> list[Waiter]:
        mms = sorted(set(self.tasks["mm"].tolist()) - {0})
        return list(self.futexes.all(mms))

    @cached_property
    def waiters(self) -> tuple[dict[int, list[Waiter]], Counter[FutexKey]]:
        """All waiters on futexes, by task, and how many each futex has."""
        by_task: dict[int, list[Waiter]] = {}
        for waiter in self._all_waiters:
            by_task.setdefault(waiter.task, []).append(waiter)
        return by_task, Counter(waiter.key for waiter in self._all_waiters)

    @cached_property
    def futex_queues(self) -> dict[FutexKey, list[Waiter]]:
        """All waiters on futexes, by futex, in the order of their chain."""
        by_key: dict[FutexKey, list[Waiter]] = {}
        for waiter in self._all_waiters:
            by_key.setdefault(waiter.key, []).append(waiter)
        return by_key

    @cached_property
    def user_memory(self) -> UserMemory:
        """Reads memory of processes."""
        return UserMemory(self.layout, self.findings)

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

    def ends(self, case: BlockedTask) -> Ends:
        """Tell when a wait ends by itself, by the timer on its stack."""
        timer = case.stack.timer()
        return Ends() if timer is None else self.at(timer.expires_ns, timer.base)

    def at(self, expires_ns: int, base: int) -> Ends:
        """Tell when a timer ends.

        :param base: Its ``struct hrtimer_clock_base``.
        """
        if expires_ns >= _NEVER:
            return Ends()
        offset = self._clock_offsets.get(base)
        if offset is None:
            # From CLOCK_MONOTONIC to the timer's own; it may be negative.
            offset = self.layout.member(base, "hrtimer_clock_base", "offset")
            self._clock_offsets[base] = offset
        expires = expires_ns - offset
        if self._monotonic_ns is None:
            return Ends(expires_ns=expires)
        return Ends(expires_ns=expires, left_ns=expires - self._monotonic_ns)

    def files(self, case: BlockedTask) -> "TaskFiles":
        """Read all open files of a task; those that tasks share are read once.

        :raises drgn.FaultError: if it cannot be read
        """
        shared = self.layout.member(case.address, "task_struct", "files")
        if shared not in self._tables:
            tables = self.descriptors.tables(np.array([case.address], np.uint64))
            files = self.descriptors.all_files(tables, 0)
            self._tables[shared] = TaskFiles(self.descriptors, files)
        return self._tables[shared]

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

    def is_data_of(self, file: OpenFile | None, inode: Inode) -> bool:
        """Tell whether the data of an open file is that of an inode.

        :raises drgn.FaultError: if it cannot be read
        """
        if file is None or file.mapping < KERNEL_HALF:
            return False
        host = self.layout.member(file.mapping, "address_space", "host")
        return host == inode.address


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
        """Give descriptor and ``private_data`` of files with some operations."""
        fits = np.flatnonzero(self._read["operations"] == np.uint64(operations or 0))
        private = self._read["private"]
        return [(self._numbers[row], int(private[row])) for row in fits.tolist()]


def signals_of(mask: int) -> tuple[int, ...]:
    """Give the numbers of the signals in a set."""
    return tuple(number for number in range(1, 65) if mask >> (number - 1) & 1)
