# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks on files: requests, waiters and owners."""

from collections import deque
from functools import cached_property

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.pids import find_tasks
from msatools.kernel.reader import distinct
from msatools.kernel.report import Loss
from msatools.locks.context import (
    MAX_WAITERS,
    BlockedTask,
    LockContext,
    LockType,
    at_most_one,
    per_context,
)
from msatools.locks.report import (
    Holder,
    Lock,
    LockTypeName,
    Mode,
    QueuedWaiter,
    Request,
    WaitTarget,
)
from msatools.locks.struct_reader import Layout
from msatools.locks.wait_queues import wait_queues
from msatools.program.linear import KERNEL_HALF
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.waits import TaskClass

# Flags of a lock on a file (include/linux/filelock.h, fs.h before v6.3).
_POSIX, _FLOCK, _OFD = 1 << 0, 1 << 1, 1 << 10
_MODES: dict[int, Mode] = {0: "read", 1: "write"}
"""``F_RDLCK`` and ``F_WRLCK``."""


class _FileLock(Struct, frozen=True):
    """Some members of a ``struct file_lock``."""

    address: int
    blocker: int
    """Address of the conflicting ``struct file_lock``; 0 if there is no conflict."""

    owner: int
    """Address of the ``struct files_struct`` of a POSIX lock, otherwise of a
    ``struct file``. For a lock of an NFS client, the server's own record of it."""

    file: int
    flags: int
    mode: Mode | None
    pid: int
    """ID, in the initial PID namespace, of the process that requested the lock."""

    is_held: bool
    """Whether the lock is in the list of a file's locks; a request is in no list."""

    @property
    def type(self) -> LockTypeName | None:
        """The type of the lock; ``None`` for a lease or the like."""
        if self.flags & _FLOCK:
            return "flock"
        return "posix_lock" if self.flags & _POSIX else None

    @property
    def is_of_file(self) -> bool:
        """Whether the owner is an open file, not a process."""
        return bool(self.flags & (_FLOCK | _OFD))


class _FileLocks:
    """Reads locks on files of one kernel.

    :raises MissingError: if the types are unknown
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # "filelock: split common fields into struct file_lock_core" (in v6.9)
        core = layout.has("file_lock", "c.flc_wait")
        self._type = "file_lock_core" if core else "file_lock"
        self._prefix = "flc" if core else "fl"
        self.wait = self._offset("wait")
        """Offset of the wait queue on which the requester sleeps."""

        self.waits_head = self.wait + layout.offset("wait_queue_head", "head")
        self._requests = self._offset("blocked_requests")
        self._member = self._offset("blocked_member")
        self._list = self._offset("list")
        names = ("blocker", "owner", "file", "flags", "pid", "type", "list")
        self._format = np.dtype(
            {
                "names": names,
                "formats": ["<u8", "<u8", "<u8", "<u4", "<i4", "u1", "<u8"],
                "offsets": [self._offset(name) for name in names],
            }
        )
        self._roots: dict[int, _FileLock | None] = {}

    def read(self, address: int) -> _FileLock:
        """Read a lock.

        :raises drgn.FaultError: if it cannot be read
        """
        data = self._layout.reader.read(address, self._format.itemsize)
        record = np.frombuffer(data, self._format, 1)[0]
        blocker, owner, file, flags, pid, kind, following = record.tolist()
        return _FileLock(
            address=address,
            blocker=blocker,
            owner=owner,
            file=file,
            flags=flags,
            mode=_MODES.get(kind),
            pid=pid,
            is_held=following not in (0, address + self._list),
        )

    def root(self, lock: _FileLock) -> _FileLock | None:
        """Find the root of a lock's tree of blockers; ``None`` if it is not blocked.

        The root may be a request, too, if its task was woken and has not run yet.

        :raises UNREADABLE: if a blocker cannot be read, or there is a cycle
        """
        path: dict[int, _FileLock] = {}
        while lock.address not in self._roots and lock.blocker:
            if lock.address in path or lock.blocker < KERNEL_HALF:
                raise DamagedDataError("a damaged chain of locks", lock.blocker)
            path[lock.address] = lock
            lock = self.read(lock.blocker)
        root = self._roots.get(lock.address, lock if path else None)
        # Many waiters may form a chain, so the root is stored for each of them.
        self._roots.update(dict.fromkeys(path, root))
        return root

    def blocked(self, root: int) -> list[_FileLock]:
        """Return the requests that wait for a lock, directly or not, breadth first.

        :param root: Address of the lock.
        :raises UNREADABLE: if a request cannot be read, or the tree changes
        """
        waiters: dict[int, _FileLock] = {}
        todo = deque([root])
        while todo:
            parent = todo.popleft()
            head = parent + self._requests
            node = self._layout.word(head)
            while node != head:
                address = node - self._member
                lock = self.read(address) if node >= KERNEL_HALF else None
                if lock is None or lock.blocker != parent or address in waiters:
                    raise DamagedDataError("a list of waiters changed", node)
                if len(waiters) >= MAX_WAITERS:
                    raise DamagedDataError("too many wait for a lock", root)
                waiters[address] = lock
                todo.append(address)
                node = self._layout.word(node)
        return list(waiters.values())

    def _offset(self, name: str) -> int:
        return self._layout.offset(self._type, f"{self._prefix}_{name}")


class _FileLockCache:
    """The reader of file locks, and the tasks by their open files, for one context."""

    def __init__(self, context: LockContext) -> None:
        self.locks = _FileLocks(context.layout)
        self._tasks = context.tasks
        self._descriptors = context.descriptors
        self._reader = context.reader
        self._losses = context.losses
        self._alone = context.alone

    def tasks_with_files(self, files: int, pid: int) -> list[int]:
        """Find the tasks with a ``struct files_struct``, one thread per process.

        :param pid: ID of the process that probably has it. If few tasks are examined,
            the other processes are read only if this one does not have it.
        """
        first = _by_files(self._process(pid)) if self._alone else self._all
        return first.get(files) or self._all.get(files, [])

    def tasks_with_file(self, file: int, pid: int) -> list[int]:
        """Find the tasks that have a ``struct file`` open, one thread per process.

        :param pid: ID of the process that probably has it open. The tables of the
            others are read only if this one does not have it open.
        """
        first = self._by_open_file(_by_files(self._process(pid)))
        return first[file] if file in first else self._all_open.get(file, [])

    def _process(self, pid: int) -> TaskTable:
        tasks = list(find_tasks(self._reader, [pid], self._losses).values())
        return TaskReader(self._reader).read_processes(tasks, self._losses)

    @cached_property
    def _all(self) -> dict[int, list[int]]:
        tasks = self._tasks
        if self._alone:
            tasks = TaskReader(self._reader).read_all(self._losses)
        return _by_files(tasks.only(tasks["exit_state"] == 0))

    @cached_property
    def _all_open(self) -> dict[int, list[int]]:
        return self._by_open_file(self._all)

    def _by_open_file(self, by_files: dict[int, list[int]]) -> dict[int, list[int]]:
        """Map the address of each ``struct file`` to the tasks that have it open."""
        by_file: dict[int, list[int]] = {}
        groups = list(by_files.values())
        first = np.array([tasks[0] for tasks in groups], np.uint64)
        tables = self._descriptors.tables(first)
        for row, tasks in enumerate(groups):
            files = self._descriptors.all_files(tables, row)
            for file in distinct(files).tolist():
                by_file.setdefault(file, []).extend(tasks)
        return by_file


def _by_files(tasks: TaskTable) -> dict[int, list[int]]:
    """Map each ``struct files_struct`` to the first task with it of each process."""
    names = ("address", "tgid", "files")
    columns = zip(*(tasks[name].tolist() for name in names), strict=True)
    groups: dict[int, dict[int, int]] = {}
    for address, process, table in columns:
        if table:
            groups.setdefault(table, {}).setdefault(process, address)
    return {table: list(by_process.values()) for table, by_process in groups.items()}


@per_context
def _cache(context: LockContext) -> _FileLockCache:
    return _FileLockCache(context)


def file_lock(context: LockContext, case: BlockedTask) -> WaitTarget | None:
    """Return the lock on a file that a task waits for, as a wait target."""
    lock = _own_request(context, case)
    root = _cache(context).locks.root(lock) if lock else None
    if lock is None or root is None:
        return None
    inode = context.layout.member(lock.file, "file", "f_inode")
    return WaitTarget(
        kind=root.type or ("flock" if case.call == "flock" else "posix_lock"),
        inode=context.storage.inode(inode).number,
        path=context.path_of_file(lock.file),
        fd=case.file.fd if case.file else None,
        owner=root.pid if root.is_held and root.pid > 0 else None,
    )


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """Return the lock on a file that a task waits for; ``None`` if not found.

    :raises drgn.FaultError: if a conflicting lock cannot be read
    """
    own = _own_request(context, case)
    root = _cache(context).locks.root(own) if own else None
    if own is None or root is None or root.type is None:
        return None
    return Request(Lock(root.type, root.address), own.mode)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """
    Return the waiters of a lock; those that are blocked by no other waiter come first.

    The others conflict with one of these, and wait for it as well.

    :return: ``None`` if there are none, or they cannot be read.
    """
    locks = _cache(context).locks
    queued = []
    try:
        for waiter in locks.blocked(lock.address or 0):
            requester = wait_queues(context).of_head(waiter.address + locks.waits_head)
            if requester is not None and requester.waiters is not None:
                tasks = wait_queues(context).tasks(requester.waiters)
                queued += [QueuedWaiter(each.task, waiter.mode) for each in tasks]
    except UNREADABLE as error:
        context.losses.lose(
            Loss.WAITERS, f"cannot read who waits for a lock on a file: {error}"
        )
        return None
    return queued or None


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """
    Return the owners of a lock on a file, the first thread of each process.

    A POSIX lock belongs to all processes that share a table of open files: ``exact``.
    Other locks belong to an open file. Usually one process has it open. If several do,
    the owner is the one that requested the lock: ``likely``; the list is empty if that
    one no longer has the file open.

    :raises drgn.FaultError: if the lock cannot be read
    """
    cache = _cache(context)
    held = cache.locks.read(lock.address or 0)
    if held.type != lock.type or not held.is_held:
        return []
    if not held.is_of_file:
        tasks = cache.tasks_with_files(held.owner, held.pid)
        return [Holder(task, "exact") for task in tasks]
    tasks = cache.tasks_with_file(held.owner, held.pid)
    if len(tasks) > 1:
        tasks = [task for task in tasks if context.pid(task, leader=True) == held.pid]
    return [Holder(task, "likely") for task in tasks[:1]]


def _own_request(context: LockContext, case: BlockedTask) -> _FileLock | None:
    """Find the ``struct file_lock`` of a task's own request, by its wait queue."""
    locks = _cache(context).locks
    for entry in case.stack.wait_entries():
        head = wait_queues(context).head_of(entry)
        if head is None:
            continue
        lock = locks.read(head[0] - locks.wait)
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
