# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes: requests, waiters, owners and readers.

The kernel records the waiters of each futex, but the owner only of a PI futex. Other
owners are in the memory of the process, next to the futex. They are used only if it is
a lock of the C library whose members are consistent (:mod:`msatools.locks.user.nptl`),
and the owner is a thread that can use the futex.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import drgn
import numpy as np
from drgn.helpers.linux.pid import find_task

from msatools.kernel.losses import Loss
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.report import LossLog
from msatools.kernel.walks import tree_records
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock import (
    Holder,
    Lock,
    LockTypeName,
    OwnerConfidence,
    QueuedWaiter,
    Request,
)
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.lock_type import LockType
from msatools.locks.base.model import Mode
from msatools.locks.places.places import lock_places
from msatools.locks.sleeping.kernellocks import kernel_locks
from msatools.locks.user import nptl
from msatools.locks.user.futexes import Waiter, futex_queues, futex_waiters, futexes
from msatools.locks.user.futexwaits import waiters_of
from msatools.locks.user.usermemory import UserMemory, user_memory
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.classes import TaskClass
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.syscalls import read_syscalls

PARKED = "parked on a futex of its own stack: nobody wakes it"

_FEW_WAITERS = 8
"""Maximum number of waiters whose mappings are searched for a futex in a file."""

_MAX_PROCESSES = 4096
"""Maximum number of processes that map a file with a futex."""

_PARKED_BYTES = 256
"""Bytes above the stack pointer that may be local variables of the function."""

_PAGE = 4096

# FUTEX_CMD_MASK: the operation without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME.
_COMMAND = 0x7F
_WAIT_BITSET = 9
_ALL_BITS = 0xFFFF_FFFF


@dataclass(frozen=True)
class _Content:
    """The lock that a futex belongs to, by the memory of the process."""

    owner: int | None = None
    """Address of the owner's ``struct task_struct``."""

    confidence: OwnerConfidence = "likely"
    mode: Mode | None = None
    readers: int | None = None

    condition: int | None = None
    """Offset of the futex in its condition variable; ``None`` if it is of none."""


@dataclass(frozen=True)
class _Place:
    """The address of a futex in the memory of one of its waiters."""

    task: int
    mm: int
    address: int
    inode: int
    """Address of the inode of the file that it is in; 0 if it is in no file."""


@dataclass(frozen=True)
class _Users:
    """The processes that map a file."""

    mms: frozenset[int]
    spaces: frozenset[int]
    """Their PID namespaces, if known."""


class _LockWordCache:
    """Results that are kept for one context."""

    def __init__(self, context: LockContext) -> None:
        self.waiters: dict[tuple[LockTypeName, object], Waiter] = {}
        """Maps type and key of each requested lock to one of its waiters."""

        self.contents: dict[FutexKey, _Content] = {}
        self.requests: dict[tuple[LockTypeName, FutexKey], Request] = {}
        self.words: dict[FutexKey, tuple[FutexKey, FutexKey]] = {}
        """Maps the key of the start of a condition variable to those of its futexes."""

        self.conditions: dict[tuple[int, int], int | None] = {}
        """Maps address space and aligned address of two adjacent futexes to the start
        of their condition variable; ``None`` if there is no such variable."""

        self.starts: set[tuple[int, int]] = set()
        """Address space and start of each condition variable."""

        self.users: dict[int, _Users] = {}
        """Maps the address of a ``struct inode`` to the processes that map it."""

        self.tasks: dict[tuple[int, int], int | None] = {}
        """Maps PID namespace and ID to a task."""

        self.by_pid: dict[int, int] = dict(
            zip(
                context.tasks["pid"].tolist(),
                context.tasks["address"].tolist(),
                strict=True,
            )
        )
        self.mms: dict[int, int] = dict(
            zip(
                context.tasks["address"].tolist(),
                context.tasks["mm"].tolist(),
                strict=True,
            )
        )

    def add_condition(self, mm: int, address: int, start: int | None) -> None:
        self.conditions[mm, address & ~7] = start
        if start is not None:
            self.starts.add((mm, start))


@per_context
def _cache(context: LockContext) -> _LockWordCache:
    return _LockWordCache(context)


def requests(context: LockContext, case: BlockedTask) -> list[Request]:
    """
    Return the futexes that a task waits on.

    :return: One; several for a ``futex_waitv()``; empty if not found.
    """
    waiters, _ = waiters_of(context, case)
    return _requests(context, waiters)


def futex_requests(context: LockContext, task: int) -> list[Request]:
    """Return the futexes that a task waits on, by the hash tables.

    The first call reads all waiters; later calls are cheap.

    :param task: Address of a ``struct task_struct``.
    """
    by_task, _ = futex_waiters(context)
    waiters = sorted(by_task.get(task, ()), key=lambda waiter: waiter.address)
    return _requests(context, waiters)


def queue(context: LockContext, lock: Lock) -> list[QueuedWaiter] | None:
    """Return the waiters on a futex, the next to be woken up first.

    Waiters of a PI futex are in the order of its ``rt_mutex``. The waiter of a
    ``futex_waitv()`` is in the queue of each of its futexes.
    """
    waiters = _waiters(context, lock)
    if not waiters:
        return None
    mode = None if lock.type == "pi_futex" else _content(context, waiters[0]).mode
    tasks = list(dict.fromkeys(waiter.task for waiter in waiters))
    if lock.type == "pi_futex":
        tasks = _by_urgency(context, waiters[0].pi_state, tasks)
    return [QueuedWaiter(task, mode) for task in tasks]


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """Return the owner of a futex.

    It is ``exact`` for a PI futex, whose owner the kernel records, and for a thread
    whose exit is waited for. Other owners are ``likely``: the C library recorded them.
    """
    waiter = _cache(context).waiters.get((lock.type, lock.key))
    if waiter is None:
        return []
    if lock.type == "pi_futex":
        return _pi_owner(context, waiter)
    content = _content(context, waiter)
    if content.owner is None:
        return []
    return [Holder(content.owner, content.confidence)]


def readers(context: LockContext, lock: Lock) -> int | None:
    """Return the number of readers of a futex; ``None`` if it does not count them."""
    waiter = _cache(context).waiters.get((lock.type, lock.key))
    if waiter is None or lock.type == "pi_futex":
        return None
    return _content(context, waiter).readers


def condition_at(context: LockContext, mm: int, address: int) -> int | None:
    """Find the condition variable that a private futex belongs to.

    :param mm: Address of the ``struct mm_struct`` of its process.
    :return: Address of the start; ``None`` if it belongs to no condition variable, or
        memory cannot be read.
    """
    cache = _cache(context)
    key = mm, address & ~7
    if key not in cache.conditions:
        start = None
        try:
            start = _read_condition(context, mm, address, (0, 0), None)
        except (drgn.FaultError, LookupError) as error:
            context.losses.lose(Loss.WAITERS, f"a condition variable is lost: {error}")
        cache.add_condition(mm, address, start)
    return cache.conditions[key]


def is_condition(context: LockContext, lock: Lock, mm: int) -> bool:
    """Return whether a requested lock is a condition variable.

    :param mm: Address of the ``struct mm_struct`` of a waiter's process.
    """
    cache = _cache(context)
    shared = isinstance(lock.key, FutexKey) and lock.key in cache.words
    return shared or (mm, lock.address) in cache.starts


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe a futex without an owner: see :func:`parked`."""
    return parked(context, case.address, request)


def parked(context: LockContext, task: int, request: Request) -> str | None:
    """
    Return :data:`PARKED` if a task waits forever on a futex on its own stack.

    glibc does this if the kernel refuses a lock of a PI mutex, as it would close a
    cycle (EDEADLK). The futex is a local variable of the function that waits. There is
    no other trace, so the arguments of the call have to match, and the task has to own
    a PI futex that others wait for.

    :param task: Address of its ``struct task_struct``, one of ``context.tasks``.
    :return: ``None`` if it is not parked, or if that cannot be determined.
    """
    lock = request.lock
    if lock.type != "futex" or lock.address is None:
        return None
    waiters = _waiters(context, lock)
    if len(waiters) != 1 or not _owns_pi_futex(context, task):
        return None
    row = context.tasks.only(context.tasks["address"] == np.uint64(task))
    if not len(row):
        return None
    prog = context.reader.prog
    call = read_syscalls(context.reader, row, stack_bytes(prog), LossLog())
    if not call.known[0] or call.compat[0] or call.name(0) != "futex":
        return None
    address, operation, value, timeout, _, bits = call.arguments[0].tolist()
    above = address - int(call.sp[0])
    plain = operation & _COMMAND == _WAIT_BITSET and bits & _ALL_BITS == _ALL_BITS
    # value and bits are u32: the high half of a register may have any value.
    fits = plain and not value & _ALL_BITS and not timeout
    if fits and address == lock.address and 0 <= above < _PARKED_BYTES:
        return PARKED
    return None


def _requests(context: LockContext, waiters: Iterable[Waiter]) -> list[Request]:
    """Return the requests of waiters without duplicates.

    On a running kernel, a task may appear in the queues of both futexes of a condition
    variable, if it waits again before all queues are read.
    """
    return list(dict.fromkeys(_request(context, waiter) for waiter in waiters))


def _request(context: LockContext, waiter: Waiter) -> Request:
    cache = _cache(context)
    type_: LockTypeName = "pi_futex" if waiter.pi_state else "futex"
    request = cache.requests.get((type_, waiter.key))
    if request is None:
        content = _Content() if waiter.pi_state else _content(context, waiter)
        key = waiter.key
        if content.condition is not None:
            key = waiter.key.moved(-content.condition)
            cache.words[key] = waiter.key.pair()
        cache.waiters[type_, key] = waiter
        request = Request(Lock(type_, key.address, key), content.mode)
        cache.requests[type_, waiter.key] = request
    return request


def _waiters(context: LockContext, lock: Lock) -> list[Waiter]:
    """Return the waiters of a requested lock."""
    key = lock.key
    if not isinstance(key, FutexKey):
        return []
    words = _cache(context).words.get(key)
    if words is not None:
        # The two futexes hash to different buckets, so all tables are read.
        queues = futex_queues(context)
        waiters = [waiter for word in words for waiter in queues.get(word, ())]
    elif not context.alone:
        waiters = futex_queues(context).get(key, [])
    else:
        first = _cache(context).waiters.get((lock.type, key))
        chain = futexes(context).chain(first.lock) if first else ()
        waiters = [waiter for waiter in chain if waiter.key == key]
    # Waiters that will be requeued to a PI futex do not have its pi_state yet.
    return [w for w in waiters if bool(w.pi_state) == (lock.type == "pi_futex")]


def _by_urgency(context: LockContext, pi_state: int, tasks: list[int]) -> list[int]:
    try:
        mutex = pi_state + context.layout.offset("futex_pi_state", "pi_mutex")
        order = kernel_locks(context).rt_mutex(mutex).waiters or ()
    except drgn.FaultError as error:
        context.losses.lose(Loss.WAITERS, f"the queue of a futex is lost: {error}")
        order = ()
    queued = set(tasks)
    first = [task for task in order if task in queued]
    # Some tasks may not be in the rt_mutex yet, or not any more.
    return list(dict.fromkeys([*first, *tasks]))


def _pi_owner(context: LockContext, waiter: Waiter) -> list[Holder]:
    """Return the owner of a PI futex.

    It is ``likely`` if it differs from that of the rt_mutex: the futex is being handed
    over.
    """
    layout, state = context.layout, waiter.pi_state
    owner, rt_owner = layout.members(state, "futex_pi_state", "owner", "pi_mutex.owner")
    key = futexes(context).key(state + layout.offset("futex_pi_state", "key"))
    # The state may have been freed, and reused for another futex.
    if key != waiter.key or owner < KERNEL_HALF or not context.pid(owner):
        return []
    agree = rt_owner & ~1 in (0, owner)
    return [Holder(owner, "exact" if agree else "likely")]


def _owns_pi_futex(context: LockContext, task: int) -> bool:
    """Return whether a task owns a PI futex that others wait for."""
    # "futex: Move futex related task_struct data into a struct" (in v7.1)
    head = task + context.layout.offset(
        "task_struct", "futex.pi_state_list", "pi_state_list"
    )
    try:
        return context.layout.word(head) not in (0, head)
    except drgn.FaultError:
        return False


# --- locks in the memory of processes


def _content(context: LockContext, waiter: Waiter) -> _Content:
    """Read the lock that a futex belongs to, once."""
    contents = _cache(context).contents
    key = waiter.key
    if key not in contents:
        try:
            contents[key] = _read_content(context, waiter)
        except (drgn.FaultError, LookupError) as error:
            context.losses.lose(Loss.FUTEX_OWNERS, f"who has a futex is lost: {error}")
            contents[key] = _Content()
    return contents[key]


@dataclass(frozen=True)
class _Words:
    """The memory around a futex, of which the part on its page is read at once."""

    memory: UserMemory
    mm: int
    start: int
    data: bytes

    @classmethod
    def around(cls, context: LockContext, place: _Place) -> "_Words | None":
        """Read the memory around a futex; ``None`` if it is not in the dump."""
        memory = user_memory(context)
        page = place.address & -_PAGE
        start = max(place.address - nptl.RWLOCK_BYTES, page)
        end = min(place.address + nptl.RWLOCK_BYTES, page + _PAGE)
        data = memory.read(place.mm, start, end - start)
        return None if data is None else cls(memory, place.mm, start, data)

    def read(self, address: int, size: int) -> bytes | None:
        """Read a part of the memory; ``None`` if it is not in the dump."""
        first = address - self.start
        if first >= 0 and first + size <= len(self.data):
            return self.data[first : first + size]
        return self.memory.read(self.mm, address, size)


def _read_content(context: LockContext, waiter: Waiter) -> _Content:
    """Return the lock that a futex belongs to.

    :raises drgn.FaultError: if a structure that leads to it or to its owner is damaged
    """
    place = _place(context, waiter)
    words = _Words.around(context, place) if place else None
    if place is None or words is None:
        context.losses.coverage["futexes_not_read"] += 1
        return _Content()
    return (
        _thread(context, place, words)
        or _mutex(context, place, words, waiter.key)
        or _rwlock(context, place, words, waiter.key)
        or _condition(context, place, waiter.key)
        or _Content()
    )


def _thread(context: LockContext, place: _Place, words: _Words) -> _Content | None:
    """Return a thread whose exit is waited for: the kernel then clears its futex."""
    tid = int.from_bytes(words.read(place.address, 4) or b"", "little")
    if not 0 < tid < PID_MAX_LIMIT or place.inode:
        return None
    task = _owner(context, place, tid)
    if task is None:
        return None
    address = context.layout.member(task, "task_struct", "clear_child_tid")
    return _Content(task, "exact") if address == place.address else None


def _mutex(
    context: LockContext, place: _Place, words: _Words, key: FutexKey
) -> _Content | None:
    if place.address % 8:
        return None
    data = words.read(place.address, nptl.MUTEX_BYTES)
    mutex = nptl.mutex(data, key.shared) if data else None
    if mutex is None:
        return None
    task = _owner(context, place, mutex.owner)
    if task is None or (task in _tasks_on(context, key) and not mutex.blocks_owner):
        return None
    return _Content(task)


def _rwlock(
    context: LockContext, place: _Place, words: _Words, key: FutexKey
) -> _Content | None:
    starts = [nptl.rwlock_start(place.address)]
    if not place.address % 8:
        # Readers may also wait on the first member.
        starts.append(place.address)
    for start in starts:
        data = words.read(start, nptl.RWLOCK_BYTES)
        offset = place.address - start
        lock = nptl.rwlock(data, offset, key.shared) if data else None
        if lock is None:
            continue
        if lock.writer is None:
            return _Content(mode=lock.mode, readers=lock.readers)
        task = _owner(context, place, lock.writer)
        # glibc refuses the lock to its own writer (EDEADLK), so that does not wait.
        if task is not None and task not in _tasks_on(context, key):
            return _Content(task, mode=lock.mode, readers=lock.readers)
    return None


def _condition(context: LockContext, place: _Place, key: FutexKey) -> _Content | None:
    queued = [len(futex_queues(context).get(word, ())) for word in key.pair()]
    if context.live:
        # They were read at another time than its words are.
        queued = [0, 0]
    start = _read_condition(
        context, place.mm, place.address, (queued[0], queued[1]), key.shared
    )
    if not key.of_inode:
        _cache(context).add_condition(place.mm, place.address, start)
    return None if start is None else _Content(condition=place.address - start)


def _read_condition(
    context: LockContext,
    mm: int,
    address: int,
    queued: tuple[int, int],
    shared: bool | None,
) -> int | None:
    """Return the start of the condition variable of a futex; ``None`` if not found."""
    for newer, start in enumerate(nptl.condition_starts(address)):
        data = user_memory(context).read(mm, start, nptl.CONDITION_BYTES)
        if data is None:
            return None
        if nptl.condition(data, bool(newer), queued, shared):
            return start
    return None


def _tasks_on(context: LockContext, key: FutexKey) -> set[int]:
    lock = Lock("futex", key.address, key)
    return {waiter.task for waiter in _waiters(context, lock)}


# --- addresses of futexes, and threads that can own them


def _place(context: LockContext, waiter: Waiter) -> _Place | None:
    """Find a futex in the memory of one of its waiters."""
    key = waiter.key
    if key.address is not None:
        mm = _mm(context, waiter.task)
        return _Place(waiter.task, mm, key.address, 0) if mm else None
    others = _waiters(context, Lock("futex", None, key))[:_FEW_WAITERS]
    for task in dict.fromkeys([waiter.task, *(other.task for other in others)]):
        mm = _mm(context, task)
        for file in user_memory(context).shared_files(mm) if mm else ():
            address = file.start + (key.file_offset or 0) - file.first
            if file.sequence == key.object and file.start <= address < file.end:
                return _Place(task, mm, address, file.inode)
    return None


def _mm(context: LockContext, task: int) -> int:
    """Return the address space of a task; 0 for a kernel thread."""
    known = _cache(context).mms.get(task)
    return context.layout.member(task, "task_struct", "mm") if known is None else known


def _owner(context: LockContext, place: _Place, tid: int) -> int | None:
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
            raise drgn.FaultError("too many processes map it", inode)
        found.add(int.from_bytes(data[mm : mm + 8], "little"))
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
    prog = context.reader.prog
    initial = space == context.layout.symbol("init_pid_ns")
    task = cache.by_pid.get(tid) if initial else None
    if task is None:
        namespace = drgn.Object(prog, "struct pid_namespace *", value=space)
        task = int(find_task(namespace, tid).value_()) or None
    cache.tasks[space, tid] = task
    return task


FUTEX = LockType(
    names=frozenset({"futex", "pi_futex"}),
    requests=requests,
    queue=queue,
    holders=holders,
    readers=readers,
    what=what,
    task_class=TaskClass.LCK,
)
