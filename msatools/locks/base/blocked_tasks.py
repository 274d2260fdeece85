# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks, and what is at hand to tell what they wait on: read for many at once."""

import stat
from collections.abc import Iterator
from dataclasses import dataclass

import drgn
import numpy as np

from msatools.kernel.paths import Place
from msatools.kernel.report import LossLog
from msatools.locks.base.lock_context import LockContext
from msatools.locks.base.ownstack import OwnStack
from msatools.locks.base.sockets import Sockets
from msatools.tasks.classes import TaskClass
from msatools.tasks.stackmemory import Rows, read_stacks
from msatools.tasks.syscalls import Syscalls, syscalls_of
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState

_AT_ONCE = 256
"""Tasks whose stacks are in memory at a time."""

_FD_CALLS = """
    read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 ioctl
    connect accept accept4 sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg send recv
    flock fcntl fsync fdatasync ftruncate fallocate getdents getdents64 sync_file_range
    mq_timedsend mq_timedreceive readahead splice tee copy_file_range syncfs
"""
_FIRST_IS_FD = frozenset(_FD_CALLS.split())

_ABOUT_FILES = frozenset(
    {
        *(TaskClass.KLK, TaskClass.FLK, TaskClass.DSK, TaskClass.PIP, TaskClass.NET),
        *(TaskClass.TTY, TaskClass.TMR, TaskClass.SIG, TaskClass.IPC),
    }
)


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


def read_cases(
    look: LockContext, now: TaskState, rows: Rows, stack_size: int
) -> Iterator[BlockedTask]:
    """Read what tells of each of some tasks, in their order, a batch at a time.

    :param now: What ``look.tasks`` are doing.
    :param stack_size: Bytes of a kernel stack.
    """
    for start in range(0, len(rows), _AT_ONCE):
        cases = _cases(look, now, rows[start : start + _AT_ONCE], stack_size)
        _add_files(look, cases)
        yield from cases


def _cases(
    look: LockContext, now: TaskState, rows: Rows, stack_size: int
) -> list[BlockedTask]:
    """Read what tells of each of some tasks: its stack, and its call's arguments."""
    part = TaskTable(look.tasks.records[rows], look.tasks.columns)
    pointers = part["sp"] if part.has("sp") else np.zeros(len(part), np.uint64)
    stacks = part["stack"].astype(np.uint64)
    # What cannot be read was counted when the stacks were unwound.
    memory = read_stacks(
        look.reader, stacks, pointers.astype(np.uint64), stack_size, LossLog()
    )
    calls = syscalls_of(look.reader.prog, part, memory)
    names: dict[int, tuple[str, ...]] = {}
    for index in np.unique(now.stacks.index[rows]).tolist():
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
    for place, column in enumerate(columns):
        row, address, mm, task_class, index, arguments, compat, base = column
        stack = OwnStack(look.layout, address, base, memory.stack(place))
        call = _call(calls, place, now.waits[index].call)
        case = BlockedTask(
            row=row,
            address=address,
            mm=mm,
            task_class=TaskClass(task_class),
            names=names[index],
            call=call,
            arguments=arguments,
            plain=bool(calls.known[place]) and not compat,
            stack=stack,
        )
        cases.append(case)
    return cases


def _call(calls: Syscalls, place: int, on_stack: str | None) -> str | None:
    """Name a task's call, if its arguments are known."""
    if not calls.known[place] or calls.number[place] < 0:
        return None
    return calls.name(place) or on_stack


def _add_files(look: LockContext, cases: list[BlockedTask]) -> None:
    """Look up what the system calls of some tasks are about, all at once."""
    chosen = [
        case
        for case in cases
        if case.call in _FIRST_IS_FD and case.task_class in _ABOUT_FILES
    ]
    if not chosen:
        return
    numbers = np.array([case.fd for case in chosen], np.int64)
    tasks = np.array([case.address for case in chosen], np.uint64)
    files = look.descriptors.lookup(look.descriptors.tables(tasks), numbers)
    found = look.descriptors.read_files(files)
    for row, case in enumerate(chosen):
        if found.readable[row]:
            case.file = OpenFile(
                fd=int(numbers[row]),
                address=int(files[row]),
                inode=int(found["inode"][row]),
                mapping=int(found["mapping"][row]),
                private=int(found["private"][row]),
                place=(int(found["mount"][row]), int(found["dentry"][row])),
            )
    opened = [(case, case.file) for case in chosen if case.file]
    look.storage.read_inodes({file.inode for _, file in opened})
    _add_sockets(look, [file for _, file in opened])
    look.paths.tell([file.place for case, file in opened if _has_path(look, case)])


def _has_path(look: LockContext, case: BlockedTask) -> bool:
    """Tell whether a file's path will be asked for."""
    # What a lock is in is mostly told by the lock.
    if case.file is None or case.task_class is TaskClass.KLK:
        return False
    mode = _mode(look, case.file)
    return not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode))


def _add_sockets(look: LockContext, files: list[OpenFile]) -> None:
    sockets = {file.private for file in files if stat.S_ISSOCK(_mode(look, file))}
    sockets -= look.endpoints.keys()
    if sockets:
        addresses = np.array(sorted(sockets), np.uint64)
        read = Sockets(look.layout, look.findings).read(addresses)
        look.endpoints.update(zip(addresses.tolist(), read, strict=True))


def _mode(look: LockContext, file: OpenFile) -> int:
    try:
        return look.storage.inode(file.inode).mode
    except drgn.FaultError:
        return 0
