# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads the stacks and system calls of tasks in batches."""

import stat
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.paths import Place
from msatools.kernel.reader import distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Structs
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.ownstack import OwnStack
from msatools.locks.base.sockets import Sockets
from msatools.tasks.classes import TaskClass
from msatools.tasks.stackmemory import Rows, read_stacks
from msatools.tasks.syscalls import Syscalls, syscalls_of
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState

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
    """An open file of a task."""

    fd: int | None
    address: int
    inode: int
    mapping: int
    """Address of the ``struct address_space`` with its data."""

    private: int
    place: Place


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
    """The system call, if its arguments are known."""

    arguments: list[int]
    """Arguments of the call; all 0 if unknown."""

    plain: bool
    """Whether the arguments are in the order of the call's manual page. 32-bit code may
    use one system call number for several calls."""

    stack: OwnStack
    file: OpenFile | None = None
    """The open file, if the first argument of the call is a file descriptor."""

    def is_in(self, *functions: str) -> bool:
        """Return whether any of some functions is on the stack, with any suffix."""
        return any(name.partition(".")[0] in functions for name in self.names)

    @property
    def fd(self) -> int | None:
        """The first argument, as a file descriptor."""
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
    part = TaskTable(context.tasks.records[rows], context.tasks.columns)
    pointers = part["sp"] if part.has("sp") else np.zeros(len(part), np.uint64)
    stacks = part["stack"].astype(np.uint64)
    # What cannot be read was counted when the stacks were unwound.
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
        memory.base.tolist(),
        strict=True,
    )
    cases = []
    for position, column in enumerate(columns):
        row, address, mm, task_class, index, arguments, compat, base = column
        stack = OwnStack(context.layout, address, base, memory.stack(position))
        call = _call(calls, position, now.waits[index].call)
        case = BlockedTask(
            row=row,
            address=address,
            mm=mm,
            task_class=TaskClass(task_class),
            names=names[index],
            call=call,
            arguments=arguments,
            plain=bool(calls.known[position]) and not compat,
            stack=stack,
        )
        cases.append(case)
    return cases


def _call(calls: Syscalls, position: int, on_stack: str | None) -> str | None:
    """Return the name of a system call, if its arguments are known."""
    if not calls.known[position] or calls.number[position] < 0:
        return None
    return calls.name(position) or on_stack


def _add_files(context: LockContext, cases: list[BlockedTask]) -> None:
    """Read the files of the system calls of some tasks at once."""
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
    """Return one of the files that ``Descriptors.read_files`` has read."""
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
    # The path of a kernel lock is found by the lock itself.
    if case.file is None or case.task_class is TaskClass.KLK:
        return False
    mode = _mode(context, case.file)
    return not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode))


def add_sockets(context: LockContext, files: list[OpenFile]) -> None:
    """Read the endpoints of those files that are sockets."""
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
