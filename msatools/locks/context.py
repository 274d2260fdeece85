# SPDX-License-Identifier: LGPL-2.1-or-later

"""The context of a snapshot: its tasks with their stacks, and shared readers.

A :class:`LockType` describes a lock type; :mod:`msatools.locks.lock_types` lists them.
"""

import stat
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, wraps
from typing import TypedDict, TypeVar, cast

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.clocks import Clocks
from msatools.kernel.files import Descriptors, Paths, Place
from msatools.kernel.reader import Addresses, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Structs
from msatools.locks.report import Holder, Lock, LockTypeName, QueuedWaiter, Request
from msatools.locks.storage import Endpoints, Inode, Sockets, Storage
from msatools.locks.struct_reader import Layout, OwnStack
from msatools.program.linear import KERNEL_HALF
from msatools.tasks.sampler import TaskState
from msatools.tasks.states import Throttles
from msatools.tasks.syscalls import syscalls_of
from msatools.tasks.table import TaskTable
from msatools.tasks.text import KernelText
from msatools.tasks.unwind import Rows, read_stacks
from msatools.tasks.waits import TaskClass

# --- The context of a snapshot: the tasks and the readers that lock types share.


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
        """Whether few tasks are examined: then few others may be read for them."""

        self.live = layout.reader.is_live
        """Whether the kernel runs, and may change between two reads."""

        self.limit = limit or (FEW_READS if alone else MAX_WAITERS)
        """Maximum number of waiters to read of one queue."""

        self.storage = Storage(layout, losses)
        self.descriptors = Descriptors(self.reader, losses)
        self.paths = Paths(self.reader, losses)
        self.endpoints: dict[int, Endpoints | None] = {}
        """Maps the address of a ``struct socket`` to its endpoints; ``None`` if they
        cannot be read."""

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
        """The runnable tasks that are throttled, and why."""
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
        """Return the path of a mount and a dentry; ``None`` if it cannot be read."""
        return self.paths.tell([place])[0]

    def path_of_file(self, file: int) -> str | None:
        """Return the path of a ``struct file``; ``None`` if a part cannot be read.

        :raises drgn.FaultError: if the ``struct file`` itself cannot be read
        """
        if file not in self._file_paths:
            mount, dentry = self.layout.members(
                file, "file", "f_path.mnt", "f_path.dentry"
            )
            self._file_paths[file] = self.path_at((mount, dentry))
        return self._file_paths[file]

    def path_of(self, inode: Inode) -> str | None:
        """Return a path of an inode: of its first dentry, under the first mount.

        :return: ``None`` if it has no dentry or mount, or a part cannot be read.
        :raises drgn.FaultError: if the inode itself cannot be read
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


# --- Reads the stacks and system calls of tasks in batches.


_CLASSES = {known.value: known for known in TaskClass}
_AT_ONCE = 256
"""Number of tasks whose stacks are in memory at a time."""

_FD_CALLS = """
    read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 ioctl
    connect accept accept4 sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg send recv
    flock fcntl fsync fdatasync ftruncate fallocate getdents getdents64 sync_file_range
    mq_timedsend mq_timedreceive readahead splice tee copy_file_range syncfs
"""
_FIRST_IS_FD = frozenset(_FD_CALLS.split())
"""System calls whose first argument is a file descriptor."""

_ABOUT_FILES = frozenset(
    {
        *(TaskClass.KLK, TaskClass.FLK, TaskClass.DSK, TaskClass.PIP, TaskClass.NET),
        *(TaskClass.TTY, TaskClass.TMR, TaskClass.SIG, TaskClass.IPC),
    }
)


class OpenFile(Struct, frozen=True):
    """An open file of a task: addresses of its ``struct file`` and of related ones."""

    fd: int | None
    address: int
    inode: int
    mapping: int
    """Address of the ``struct address_space`` with its data."""

    private: int
    """``file.private_data``."""

    place: Place


@lru_cache(maxsize=4096)
def _without_suffixes(names: tuple[str, ...]) -> frozenset[str]:
    """Return names of functions without suffixes of the compiler, as ``.isra.0``."""
    return frozenset(name.partition(".")[0] for name in names)


class BlockedTask(Struct):
    """A task with its stack and its system call."""

    row: int
    """Row in the table of tasks."""

    address: int
    mm: int
    task_class: TaskClass
    names: tuple[str, ...]
    """The functions on its stack, innermost first, with suffixes of the compiler."""

    call: str | None
    """Name of the system call; ``None`` if that or its arguments are unknown."""

    arguments: list[int]
    """Arguments of the call; all 0 if unknown."""

    plain: bool
    """Whether the arguments are known, and in the order of the call's manual page: not
    for 32-bit code, which may use one system call number for several calls."""

    stack: OwnStack
    file: OpenFile | None = None
    """The open file, if the first argument of the call is a file descriptor."""

    def is_in(self, *functions: str) -> bool:
        """Return whether any of *functions* is on the stack, whatever its suffix."""
        return not _without_suffixes(self.names).isdisjoint(functions)

    def innermost(self, without: tuple[str, ...]) -> str:
        """Return the innermost function that begins with none of the words *without*;
        empty if there is none."""
        names = (name.partition(".")[0] for name in self.names)
        return next((name for name in names if not name.startswith(without)), "")

    @property
    def fd(self) -> int | None:
        """The first argument, as a file descriptor; ``None`` if unknown."""
        return self.arguments[0] & 0x7FFF_FFFF if self.call else None


def read_cases(
    context: LockContext, now: TaskState, rows: Rows, stack_size: int
) -> Iterator[BlockedTask]:
    """Read stacks, system calls and files of some tasks, in order, a batch at a time.

    :param now: State of ``context.tasks``.
    :param stack_size: Bytes of a kernel stack.
    """
    for start in range(0, len(rows), _AT_ONCE):
        cases = _cases(context, now, rows[start : start + _AT_ONCE], stack_size)
        _add_files(context, cases)
        yield from cases


def _cases(
    context: LockContext, now: TaskState, rows: Rows, stack_size: int
) -> list[BlockedTask]:
    """Read the stack of each task, and the arguments of its system call."""
    part = context.tasks.only(rows)
    pointers = part["sp"] if part.has("sp") else np.zeros(len(part), np.uint64)
    stacks = part["stack"].astype(np.uint64)
    # Unreadable stacks were already counted as losses when they were unwound.
    memory = read_stacks(
        context.reader, stacks, pointers.astype(np.uint64), stack_size, LossLog()
    )
    calls = syscalls_of(context.reader.prog, part, memory)
    names: dict[int, tuple[str, ...]] = {}
    for index in distinct(now.stacks.index[rows]).tolist():
        names[index] = now.stacks.names(now.stacks.unique[index])
    columns = zip(
        rows.tolist(),
        part["address"].tolist(),
        part["mm"].tolist(),
        now.classes[rows].tolist(),
        now.stacks.index[rows].tolist(),
        calls.arguments.tolist(),
        calls.compat.tolist(),
        calls.known.tolist(),
        calls.number.tolist(),
        memory.base.tolist(),
        memory.first.tolist(),
        (memory.first + (memory.size // 8).astype(np.intp)).tolist(),
        strict=True,
    )
    cases = []
    # The columns are lists, as taking a single number from an array is slow.
    for position in columns:
        row, address, mm, task_class, index, arguments, *user, base, first, end = (
            position
        )
        compat, known, number = user
        words = memory.words[first:end]
        case = BlockedTask(
            row=row,
            address=address,
            mm=mm,
            task_class=_CLASSES[task_class],
            names=names[index],
            call=None,
            arguments=arguments,
            plain=known and not compat,
            stack=OwnStack(context.layout, address, base, words),
        )
        if known and number >= 0:
            name = None if compat else calls.names.get(number)
            case.call = name or now.waits[index].call
        cases.append(case)
    return cases


def _add_files(context: LockContext, cases: list[BlockedTask]) -> None:
    """Set ``file`` of tasks in system calls on files, with one read for all."""
    chosen = [
        case
        for case in cases
        if case.call in _FIRST_IS_FD and case.task_class in _ABOUT_FILES
    ]
    if not chosen:
        return
    fds = np.array([case.fd for case in chosen], np.int64)
    tasks = np.array([case.address for case in chosen], np.uint64)
    files = context.descriptors.lookup(context.descriptors.tables(tasks), fds)
    found = context.descriptors.read_files(files)
    for row, case in enumerate(chosen):
        if found.readable[row]:
            case.file = open_file(found, row, int(files[row]), int(fds[row]))
    opened = [(case, case.file) for case in chosen if case.file]
    context.storage.read_inodes({file.inode for _, file in opened})
    add_sockets(context, [file for _, file in opened])
    context.paths.tell(
        [file.place for case, file in opened if _has_path(context, case)]
    )


def open_file(found: Structs, row: int, address: int, fd: int | None) -> OpenFile:
    """Return the open file in a row of what ``Descriptors.read_files`` has read."""
    return OpenFile(
        fd=fd,
        address=address,
        inode=int(found["inode"][row]),
        mapping=int(found["mapping"][row]),
        private=int(found["private"][row]),
        place=(int(found["mount"][row]), int(found["dentry"][row])),
    )


def _has_path(context: LockContext, case: BlockedTask) -> bool:
    """Return whether the path of a task's file will be needed."""
    # For a kernel lock, the lock is looked up, not the file of the call.
    if case.file is None or case.task_class is TaskClass.KLK:
        return False
    mode = _mode(context, case.file)
    return not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode))


def add_sockets(context: LockContext, files: list[OpenFile]) -> None:
    """Add the endpoints of the files that are sockets to ``context.endpoints``."""
    sockets = {file.private for file in files if stat.S_ISSOCK(_mode(context, file))}
    sockets -= context.endpoints.keys()
    if sockets:
        addresses = np.array(sorted(sockets), np.uint64)
        read = Sockets(context.layout, context.losses).read(addresses)
        context.endpoints.update(zip(addresses.tolist(), read, strict=True))


def _mode(context: LockContext, file: OpenFile) -> int:
    try:
        return context.storage.inode(file.inode).mode
    except UNREADABLE:
        return 0


# --- The description of a lock type; msatools.locks.lock_types lists all of them.


def _no_queue(context: LockContext, lock: Lock) -> Sequence[QueuedWaiter] | None:
    return None


def _no_holders(context: LockContext, lock: Lock) -> Sequence[Holder]:
    return ()


def _no_readers(context: LockContext, lock: Lock) -> int | None:
    return None


def _no_description(
    context: LockContext, case: BlockedTask, request: Request
) -> str | None:
    return None


Finder = Callable[[LockContext, BlockedTask], Request | None]


class LockType(Struct, frozen=True, kw_only=True):
    """A type of locks, or several types that are read the same way.

    All functions may raise ``UNREADABLE`` if memory cannot be read, or is
    inconsistent, as on a running kernel.
    """

    names: frozenset[LockTypeName]
    """Names of the types, which are values of :attr:`Lock.type`."""

    requests: Callable[[LockContext, BlockedTask], Sequence[Request]]
    """Return the locks of this type that a task waits for: none, one, or several if any
    one of them ends the wait. Raises ``MissingError`` if the types of the kernel lack a
    structure."""

    queue: Callable[[LockContext, Lock], Sequence[QueuedWaiter] | None] = _no_queue
    """Return the waiters of a lock in queue order; ``None`` if it keeps no list, or
    they could not be read."""

    holders: Callable[[LockContext, Lock], Sequence[Holder]] = _no_holders
    """Return the tasks that the lock's own fields name as holders."""

    readers: Callable[[LockContext, Lock], int | None] = _no_readers
    """Return the number of readers of a lock; ``None`` if it does not count them."""

    what: Callable[[LockContext, BlockedTask, Request], str | None] = _no_description
    """Describe what a waiter of a lock without an owner waits for, such as work."""

    task_class: TaskClass | None = None
    """The class of all tasks that wait for such a lock; ``None`` if they have various
    classes. For a task of such a class, only the lock types of that class are tried."""


def at_most_one(
    find: Finder,
) -> Callable[[LockContext, BlockedTask], Sequence[Request]]:
    """Wrap a function that finds at most one lock as :attr:`LockType.requests`."""

    def requests(context: LockContext, case: BlockedTask) -> Sequence[Request]:
        request = find(context, case)
        return () if request is None else (request,)

    return requests


# --- The time at which a wait ends by itself, from the timer on the task's stack.


_NEVER = (1 << 63) - 1
"""``KTIME_MAX``: a timer that never expires."""


class Ends(TypedDict, total=False):
    """The end of a wait: fields of :class:`WaitTarget`."""

    expires_ns: int
    left_ns: int


def timer_ends(context: LockContext, case: BlockedTask) -> Ends:
    """Return when a wait ends by the timer on the task's stack; empty without timer.

    :raises drgn.FaultError: if the clock of the timer cannot be read
    """
    timer = case.stack.timer()
    return Ends() if timer is None else ends_at(context, timer.expires_ns, timer.base)


def ends_at(context: LockContext, expires_ns: int, base: int) -> Ends:
    """Return when a timer expires; empty if never.

    :param expires_ns: Time in the timer's clock.
    :param base: Address of the timer's ``struct hrtimer_clock_base``.
    :raises drgn.FaultError: if the clock base cannot be read
    """
    if expires_ns >= _NEVER:
        return Ends()
    offsets = _clock_offsets(context)
    if base not in offsets:
        offsets[base] = context.layout.member(base, "hrtimer_clock_base", "offset")
    expires = expires_ns - offsets[base]
    if context.monotonic_ns is None:
        return Ends(expires_ns=expires)
    return Ends(expires_ns=expires, left_ns=expires - context.monotonic_ns)


@per_context
def _clock_offsets(context: LockContext) -> dict[int, int]:
    """Maps a ``struct hrtimer_clock_base`` to its offset from CLOCK_MONOTONIC in ns,
    which may be negative."""
    return {}


# --- Open files of tasks, by file descriptor.


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
        """Maps ``private_data`` of each file to its lowest descriptor."""
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
    """Return whether the data of an open file is that of an inode (``f_mapping.host``).

    :raises drgn.FaultError: if the mapping of the file cannot be read
    """
    if file is None or file.mapping < KERNEL_HALF:
        return False
    host = context.layout.member(file.mapping, "address_space", "host")
    return host == inode.address
