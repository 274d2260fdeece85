# SPDX-License-Identifier: LGPL-2.1-or-later

"""The addresses of futexes in user memory, and the threads that can own them."""

from msgspec import Struct

from msatools.errors import DamagedDataError
from msatools.kernel.pidnamespaces import MAX_LEVEL
from msatools.kernel.pids import PidTree
from msatools.kernel.walks import tree_records
from msatools.kernel.words import unsigned
from msatools.locks.base.lock import Lock
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.places.places import lock_places
from msatools.locks.user.futexes import Waiter
from msatools.locks.user.futexwaits import waiters_on
from msatools.locks.user.usermemory import user_memory
from msatools.target.addresses import KERNEL_HALF

_FEW_WAITERS = 8
"""Maximum number of waiters whose mappings are searched for a futex in a file."""

_MAX_PROCESSES = 4096
"""Maximum number of processes that map a file with a futex."""


class FutexPlace(Struct, frozen=True):
    """The address of a futex in the memory of one of its waiters."""

    task: int
    mm: int
    address: int
    inode: int
    """Address of the inode of the file that it is in; 0 if it is in no file."""


class _Users(Struct, frozen=True):
    """The processes that map a file."""

    mms: frozenset[int]
    spaces: frozenset[int]
    """Their PID namespaces, if known."""


class _MappedBy:
    """Who maps files, and tasks by their IDs, kept for one context."""

    def __init__(self, context: LockContext) -> None:
        self.users: dict[int, _Users] = {}
        """Maps the address of a ``struct inode`` to the processes that map it."""

        self.tasks: dict[tuple[int, int], int | None] = {}
        """Maps PID namespace and ID to a task."""

        tasks = context.tasks
        addresses: list[int] = tasks["address"].tolist()
        self.by_pid: dict[int, int] = dict(
            zip(tasks["pid"].tolist(), addresses, strict=True)
        )
        self.mms: dict[int, int] = dict(
            zip(addresses, tasks["mm"].tolist(), strict=True)
        )


@per_context
def _cache(context: LockContext) -> _MappedBy:
    return _MappedBy(context)


def find_place(context: LockContext, waiter: Waiter) -> FutexPlace | None:
    """Find a futex in the memory of one of its waiters; ``None`` if not found."""
    key = waiter.key
    if key.address is not None:
        mm = _mm(context, waiter.task)
        return FutexPlace(waiter.task, mm, key.address, 0) if mm else None
    others = waiters_on(context, Lock("futex", None, key))[:_FEW_WAITERS]
    for task in dict.fromkeys([waiter.task, *(other.task for other in others)]):
        mm = _mm(context, task)
        for file in user_memory(context).shared_files(mm) if mm else ():
            address = file.start + (key.file_offset or 0) - file.first
            if file.sequence == key.object and file.start <= address < file.end:
                return FutexPlace(task, mm, address, file.inode)
    return None


def _mm(context: LockContext, task: int) -> int:
    """Return the address space of a task; 0 for a kernel thread."""
    known = _cache(context).mms.get(task)
    return context.layout.member(task, "task_struct", "mm") if known is None else known


def find_owner(context: LockContext, place: FutexPlace, tid: int) -> int | None:
    """Find the thread that has an ID and can use a futex; ``None`` unless it is unique.

    The ID is that in the PID namespace of the owner. For a futex in a file, the owner
    may be of any process that maps the file, and in another namespace than the waiter.
    """
    mms, spaces = {place.mm}, {_namespace(context, place.task)}
    if place.inode:
        users = _users(context, place.inode)
        mms, spaces = mms | users.mms, spaces | users.spaces
    tasks = {_task(context, space, tid) for space in spaces - {0}} - {None}
    fits = [task for task in tasks if task is not None and _mm(context, task) in mms]
    return fits[0] if len(fits) == 1 else None


def _users(context: LockContext, inode: int) -> _Users:
    """Find the processes that map a file.

    :raises drgn.FaultError: if there are too many, or a mapping cannot be read
    """
    users = _cache(context).users
    if inode not in users:
        mms = frozenset(_mapped_by(context, inode))
        owners = (lock_places(context).owner_of_mm(mm) for mm in mms)
        spaces = frozenset(_namespace(context, owner) for owner in owners if owner)
        users[inode] = _Users(mms, spaces)
    return users[inode]


def _mapped_by(context: LockContext, inode: int) -> set[int]:
    """Find the address spaces that map a file."""
    layout = context.layout
    mapping = layout.member(inode, "inode", "i_mapping")
    root = mapping + layout.offset("address_space", "i_mmap.rb_root", "i_mmap")
    node, mm = (
        layout.offset("vm_area_struct", member) for member in ("shared.rb", "vm_mm")
    )
    size = max(node + layout.size("rb_node"), mm + 8)
    name = "the mappings of a file with futexes"
    found: set[int] = set()
    records = tree_records(context.reader, root, node, size, context.losses, name)
    for count, (_, data) in enumerate(records):
        if count >= _MAX_PROCESSES:
            raise DamagedDataError("too many processes map it", inode)
        found.add(unsigned(data, mm, 8))
    return found


def _namespace(context: LockContext, task: int) -> int:
    """Return the PID namespace of a task; 0 if the task is dead."""
    layout = context.layout
    pid = layout.member(task, "task_struct", "thread_pid")
    if pid < KERNEL_HALF:
        return 0
    level = layout.member(pid, "pid", "level")
    first = pid + layout.offset("pid", "numbers[0].ns")
    return layout.word(first + level * layout.size("upid"))


def _task(context: LockContext, space: int, tid: int) -> int | None:
    """Find the thread with an ID in a PID namespace."""
    cache = _cache(context)
    if (space, tid) in cache.tasks:
        return cache.tasks[space, tid]
    initial = space == context.layout.symbol("init_pid_ns")
    task = cache.by_pid.get(tid) if initial else None
    if task is None:
        level = context.layout.member(space, "pid_namespace", "level")
        if level > MAX_LEVEL:
            raise DamagedDataError("a namespace of no known level", space)
        task = PidTree(context.reader, space, level).linked(tid)
    cache.tasks[space, tid] = task
    return task
