# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks on files that tasks wait for, and their owners.

fs/locks.c: who waits has a ``struct file_lock`` of its own, which hangs on that of the
lock in the way; on the waiter's own hang those that would have to wait for it, too. So
what all of them wait for is at the root of the tree.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import drgn
import numpy as np

from msatools.kernel.losses import Loss
from msatools.kernel.pids import find_tasks
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Holder, Lock, LockTypeName, QueuedWaiter, Request
from msatools.locks.base.lock_context import MAX_WAITERS, LockContext, per_context
from msatools.locks.base.lock_type import LockType, at_most_one
from msatools.locks.base.model import Mode, WaitTarget
from msatools.locks.base.struct_reader import Layout
from msatools.locks.base.wait_queues import wait_queues
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass
from msatools.tasks.table import TaskReader, TaskTable

# include/linux/filelock.h, fs.h before v6.3.
_POSIX, _FLOCK, _OFD = 1 << 0, 1 << 1, 1 << 10
_MODES: dict[int, Mode] = {0: "read", 1: "write"}
"""``F_RDLCK`` and ``F_WRLCK``."""


@dataclass(frozen=True)
class _FileLock:
    """Some members of a ``struct file_lock``."""

    address: int
    blocker: int
    """The one that is in its way; 0 if none is."""

    owner: int
    """Of a POSIX lock a ``struct files_struct``, else a ``struct file``."""

    file: int
    flags: int
    mode: Mode | None
    pid: int
    """The process that asked for it, as the initial PID namespace sees it."""

    @property
    def type(self) -> LockTypeName | None:
        """``None`` if it is no lock but a lease or the like."""
        if self.flags & _FLOCK:
            return "flock"
        return "posix_lock" if self.flags & _POSIX else None

    @property
    def is_of_file(self) -> bool:
        """Whether an open file has it, not a process."""
        return bool(self.flags & (_FLOCK | _OFD))


class _FileLocks:
    """Reads locks on files of one kernel.

    :raises LookupError: if the types are unknown
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # "filelock: split common fields into struct file_lock_core" (in v6.9)
        core = layout.has("file_lock", "c.flc_wait")
        self._type = "file_lock_core" if core else "file_lock"
        self._prefix = "flc" if core else "fl"
        self.wait = self._at("wait")
        """Where the queue is of who waits with the lock."""

        self.waits_head = self.wait + layout.offset("wait_queue_head", "head")
        self._requests = self._at("blocked_requests")
        self._member = self._at("blocked_member")
        words = {name: self._at(name) for name in ("blocker", "owner", "file")}
        halves = {name: self._at(name) for name in ("flags", "pid")}
        self._format = np.dtype(
            {
                "names": [*words, *halves, "type"],
                "formats": ["<u8"] * 3 + ["<u4", "<i4", "u1"],
                "offsets": [*words.values(), *halves.values(), self._at("type")],
            }
        )
        self._roots: dict[int, _FileLock | None] = {}

    def read(self, address: int) -> _FileLock:
        """Read the lock at an address.

        :raises drgn.FaultError: if it cannot be read
        """
        data = self._layout.reader.read(address, self._format.itemsize)
        blocker, owner, file, flags, pid, kind = np.frombuffer(
            data, self._format, 1
        ).tolist()[0]
        return _FileLock(address, blocker, owner, file, flags, _MODES.get(kind), pid)

    def root(self, lock: _FileLock) -> _FileLock | None:
        """Find the lock that one waits for in the end; ``None`` if for none.

        :raises drgn.FaultError: if one on the way cannot be read, or they are a circle
        """
        way: dict[int, _FileLock] = {}
        while lock.address not in self._roots and lock.blocker:
            if lock.address in way or lock.blocker < KERNEL_HALF:
                raise drgn.FaultError("no lock is in the way", lock.blocker)
            way[lock.address] = lock
            lock = self.read(lock.blocker)
        found = self._roots.get(lock.address, lock if way else None)
        # A crowd may stand in line: each behind the one before.
        self._roots.update(dict.fromkeys(way, found))
        return found

    def blocked(self, root: int) -> list[_FileLock]:
        """Return all that wait for a lock, first those that wait for nothing more.

        :raises drgn.FaultError: if one cannot be read, or they change meanwhile
        """
        found: dict[int, _FileLock] = {}
        todo = deque([root])
        while todo:
            parent = todo.popleft()
            head = parent + self._requests
            node = self._layout.word(head)
            while node != head:
                address = node - self._member
                lock = self.read(address) if node >= KERNEL_HALF else None
                # It hangs on this one, and was not seen before.
                if lock is None or lock.blocker != parent or address in found:
                    raise drgn.FaultError("a list of waiters changed", node)
                if len(found) >= MAX_WAITERS:
                    raise drgn.FaultError("too many wait for a lock", root)
                found[address] = lock
                todo.append(address)
                node = self._layout.word(node)
        return list(found.values())

    def _at(self, name: str) -> int:
        return self._layout.offset(self._type, f"{self._prefix}_{name}")


class _Learned:
    """What was read of locks on files for one context."""

    def __init__(self, context: LockContext) -> None:
        self.locks = _FileLocks(context.layout)
        self._tasks = context.tasks
        self._descriptors = context.descriptors
        self._reader = context.reader
        self._losses = context.losses
        self._alone = context.alone

    def tasks_with_files(self, files: int, pid: int) -> list[int]:
        """Find who has a ``struct files_struct``: one thread of each process.

        :param pid: The process that should: of a look at few tasks it is looked at
            first, and all others only if it has not.
        """
        near = _by_files(self._process(pid)) if self._alone else self._all
        return near.get(files) or self._all.get(files, [])

    def tasks_with_file(self, file: int, pid: int) -> list[int]:
        """Find who has a ``struct file`` open.

        :param pid: The process that should: all others are looked at only if it has
            not, as that takes their tables of open files.
        """
        near = self._open(_by_files(self._process(pid)))
        return near[file] if file in near else self._all_open.get(file, [])

    def _process(self, pid: int) -> TaskTable:
        found = find_tasks(self._reader, [pid], self._losses)
        tasks = list(found.values())
        return TaskReader(self._reader).read_processes(tasks, self._losses)

    @cached_property
    def _all(self) -> dict[int, list[int]]:
        tasks = self._tasks
        if self._alone:
            tasks = TaskReader(self._reader).read_all(self._losses)
        return _by_files(tasks.only(tasks["exit_state"] == 0))

    @cached_property
    def _all_open(self) -> dict[int, list[int]]:
        return self._open(self._all)

    def _open(self, by_files: dict[int, list[int]]) -> dict[int, list[int]]:
        """Find who has each file open."""
        found: dict[int, list[int]] = {}
        groups = list(by_files.values())
        first = np.array([tasks[0] for tasks in groups], np.uint64)
        tables = self._descriptors.tables(first)
        for row, tasks in enumerate(groups):
            files = self._descriptors.all_files(tables, row)
            for file in np.unique(files).tolist():
                found.setdefault(file, []).extend(tasks)
        return found


def _by_files(tasks: TaskTable) -> dict[int, list[int]]:
    """Group tasks by their ``struct files_struct``: of each process one, the first."""
    names = ("address", "tgid", "files")
    columns = zip(*(tasks[name].tolist() for name in names), strict=True)
    found: dict[int, dict[int, int]] = {}
    for address, process, table in columns:
        if table:
            found.setdefault(table, {}).setdefault(process, address)
    return {table: list(tasks.values()) for table, tasks in found.items()}


@per_context
def _learned(context: LockContext) -> _Learned:
    return _Learned(context)


def file_lock(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """A lock that another has on a file: its waiter waits on a queue of its own."""
    lock = _own_request(context, case)
    if lock is None:
        return None
    owner = _learned(context).locks.read(lock.blocker).pid
    inode = context.layout.member(lock.file, "file", "f_inode")
    return WaitTarget(
        kind="flock" if case.call == "flock" else "posix_lock",
        inode=context.storage.inode(inode).number,
        path=context.path_of_file(lock.file),
        fd=case.file.fd if case.file else None,
        owner=owner or None,
    )


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """Return the lock on a file that a task waits for.

    :raises drgn.FaultError: if one in its way cannot be read
    """
    own = _own_request(context, case)
    root = _learned(context).locks.root(own) if own else None
    if own is None or root is None or root.type is None:
        return None
    return Request(Lock(root.type, root.address), own.mode)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock: those in whose way nothing else is first.

    Those that come behind conflict with one of them, and wait for it as well.
    """
    locks = _learned(context).locks
    queued = []
    try:
        for waiter in locks.blocked(lock.address or 0):
            found = wait_queues(context).of_head(waiter.address + locks.waits_head)
            if found is not None and found.waiters is not None:
                tasks = wait_queues(context).tasks(found.waiters)
                queued += [QueuedWaiter(each.task, waiter.mode) for each in tasks]
    except drgn.FaultError as error:
        context.losses.lose(Loss.WAITERS, f"who waits for a lock on a file: {error}")
        return None
    return queued or None


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return the owners of a lock on a file, the first thread of each process.

    ``exact`` of a POSIX lock: it is of all that share a table of open files. Others are
    of an open file. It is mostly one process that has it open, or of several the one
    that asked for the lock: ``likely``.

    :raises drgn.FaultError: if the lock cannot be read
    """
    learned = _learned(context)
    own = learned.locks.read(lock.address or 0)
    if own.type != lock.type:
        return []
    if not own.is_of_file:
        tasks = learned.tasks_with_files(own.owner, own.pid)
        return [Holder(task, "exact") for task in tasks]
    tasks = learned.tasks_with_file(own.owner, own.pid)
    if len(tasks) > 1:
        tasks = [task for task in tasks if context.pid(task, leader=True) == own.pid]
    return [Holder(task, "likely") for task in tasks[:1]]


def _own_request(context: LockContext, case: BlockedTask) -> _FileLock | None:
    """Find what a task waits with, which hangs on the lock that is in its way."""
    locks = _learned(context).locks
    for entry in case.stack.wait_entries():
        found = wait_queues(context).head_of(entry)
        if found is None:
            continue
        lock = locks.read(found[0] - locks.wait)
        if min(lock.file, lock.blocker) >= KERNEL_HALF:
            return lock
    return None


FILE_LOCK = LockType(
    names=frozenset({"posix_lock", "flock"}),
    requests=at_most_one(request),
    queue=queue,
    holders=holders,
    task_class=TaskClass.FLK,
)
