# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes as locks of user space: requests, waiters, owners and readers.

The memory of the process shows which lock a futex belongs to.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.reader import PAGE
from msatools.kernel.report import Loss, LossLog
from msatools.locks import c_library
from msatools.locks.c_library import library_of
from msatools.locks.context import BlockedTask, LockContext, LockType, per_context
from msatools.locks.futexes import (
    FutexPlace,
    Waiter,
    find_futex,
    find_owner,
    futex_queues,
    futex_waiters,
    futexes,
    requested_futexes,
    waiters_of,
    waiters_on,
)
from msatools.locks.kernel_locks import kernel_locks
from msatools.locks.report import (
    FutexKey,
    Holder,
    Lock,
    LockTypeName,
    Mode,
    OwnerConfidence,
    QueuedWaiter,
    Request,
)
from msatools.locks.user_memory import UserMemory, user_memory
from msatools.program.linear import KERNEL_HALF
from msatools.tasks.syscalls import read_syscalls
from msatools.tasks.unwind import stack_bytes
from msatools.tasks.waits import TaskClass

# --- The lock that a futex belongs to, by the memory of the process.
#
# A lock of a C library is recognized if a thread waits in that library, the members of
# the lock are consistent (both: msatools.locks.c_library), and its owner is a thread
# that can use the futex.


class FutexContent(Struct, frozen=True):
    """The lock that a futex belongs to, by the memory of the process."""

    owner: int | None = None
    """Address of the owner's ``struct task_struct``."""

    confidence: OwnerConfidence = "likely"
    mode: Mode | None = None
    readers: int | None = None

    condition: int | None = None
    """Offset of the futex in its condition variable; ``None`` if it is of none."""

    what: str | None = None
    """Description of the lock, if it records no owner."""


_UNRECORDED = "the C library does not record who"


class _FutexContents:
    """The locks and condition variables of futexes, kept for one context."""

    def __init__(self) -> None:
        self.contents: dict[FutexKey, FutexContent] = {}
        self.conditions: dict[tuple[int, int], int | None] = {}
        """Maps address space and aligned address of two adjacent futexes to the start
        of their condition variable; ``None`` if there is no such variable."""

        self.starts: set[tuple[int, int]] = set()
        """Address space and start of each condition variable."""

    def add_condition(self, mm: int, address: int, start: int | None) -> None:
        self.conditions[mm, address & ~7] = start
        if start is not None:
            self.starts.add((mm, start))


@per_context
def _cache(context: LockContext) -> _FutexContents:
    return _FutexContents()


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
            read = partial(user_memory(context).read, mm)
            start = _read_condition(read, address, (0, 0), None)
        except LOST as error:
            context.losses.lose(
                Loss.WAITERS, f"cannot read a condition variable: {error}"
            )
        cache.add_condition(mm, address, start)
    return cache.conditions[key]


def is_condition(context: LockContext, lock: Lock, mm: int) -> bool:
    """Return whether a requested lock is a condition variable.

    :param mm: Address of the ``struct mm_struct`` of a waiter's process.
    """
    words = requested_futexes(context).words
    shared = isinstance(lock.key, FutexKey) and lock.key in words
    return shared or (mm, lock.address) in _cache(context).starts


def content_of(context: LockContext, waiter: Waiter) -> FutexContent:
    """Return the lock that a waiter's futex belongs to; read each futex once."""
    contents = _cache(context).contents
    key = waiter.key
    if key not in contents:
        try:
            contents[key] = _read_content(context, waiter)
        except LOST as error:
            context.losses.lose(
                Loss.FUTEX_OWNERS, f"cannot determine who has a futex: {error}"
            )
            contents[key] = FutexContent()
    return contents[key]


class _Words(Struct, frozen=True):
    """The memory around a futex: the part on its page is read ahead, and kept."""

    memory: UserMemory
    mm: int
    start: int
    data: bytes

    @classmethod
    def around(cls, context: LockContext, place: FutexPlace) -> "_Words | None":
        """Read the memory around a futex; ``None`` if it is not in the dump."""
        memory = user_memory(context)
        page = place.address & -PAGE
        start = max(place.address - c_library.RWLOCK_BYTES, page)
        end = min(place.address + c_library.RWLOCK_BYTES, page + PAGE)
        data = memory.read(place.mm, start, end - start)
        return None if data is None else cls(memory, place.mm, start, data)

    def read(self, address: int, size: int) -> bytes | None:
        """Read a part of the memory; ``None`` if it is not in the dump."""
        first = address - self.start
        if first >= 0 and first + size <= len(self.data):
            return self.data[first : first + size]
        return self.memory.read(self.mm, address, size)


def _read_content(context: LockContext, waiter: Waiter) -> FutexContent:
    """Return the lock that a futex belongs to.

    :raises drgn.FaultError: if a structure that leads to it or to its owner is damaged
    """
    place = find_futex(context, waiter)
    words = _Words.around(context, place) if place else None
    if place is None or words is None:
        context.losses.coverage["futexes_not_read"] += 1
        return FutexContent()
    thread = _thread(context, place, words)
    if thread is not None:
        return thread
    of_library = {
        "glibc": _mutex(context, place, words, waiter.key)
        or _rwlock(context, place, words, waiter.key),
        "musl": _musl_mutex(context, place, words, waiter.key)
        or _musl_rwlock(place, words, waiter.key)
        or _musl_thread(context, place, words),
    }
    if any(of_library.values()):
        library = library_of(context, place.task, place.mm)
        found = of_library[library] if library else None
        if found is not None:
            return found
    return _condition(context, place, words, waiter.key) or FutexContent()


def _thread(
    context: LockContext, place: FutexPlace, words: _Words
) -> FutexContent | None:
    """Return the thread whose exit is waited for: at exit the kernel clears the futex.

    :return: ``None`` if the futex is not a thread's ``clear_child_tid``.
    """
    tid = int.from_bytes(words.read(place.address, 4) or b"", "little")
    if not 0 < tid < PID_MAX_LIMIT or place.inode:
        return None
    task = find_owner(context, place, tid)
    if task is None:
        return None
    address = context.layout.member(task, "task_struct", "clear_child_tid")
    return FutexContent(task, "exact") if address == place.address else None


def _mutex(
    context: LockContext, place: FutexPlace, words: _Words, key: FutexKey
) -> FutexContent | None:
    if place.address % 8:
        return None
    data = words.read(place.address, c_library.MUTEX_BYTES)
    mutex = c_library.glibc_mutex(data, key.shared) if data else None
    return _owned(context, place, key, mutex) if mutex else None


def _owned(
    context: LockContext, place: FutexPlace, key: FutexKey, mutex: c_library.Mutex
) -> FutexContent | None:
    task = find_owner(context, place, mutex.owner)
    if task is None or (task in _tasks_on(context, key) and not mutex.blocks_owner):
        return None
    return FutexContent(task)


def _rwlock(
    context: LockContext, place: FutexPlace, words: _Words, key: FutexKey
) -> FutexContent | None:
    starts = [c_library.rwlock_start(place.address)]
    if not place.address % 8:
        # Readers may also wait on the first member.
        starts.append(place.address)
    for start in starts:
        data = words.read(start, c_library.RWLOCK_BYTES)
        offset = place.address - start
        lock = c_library.glibc_rwlock(data, offset, key.shared) if data else None
        if lock is None:
            continue
        if lock.writer is None:
            return _read_locked(lock.mode, lock.readers)
        task = find_owner(context, place, lock.writer)
        # glibc refuses the lock to its own writer (EDEADLK), so no writer waits for it.
        if task is not None and task not in _tasks_on(context, key):
            return FutexContent(task, mode=lock.mode, readers=lock.readers)
    return None


def _condition(
    context: LockContext, place: FutexPlace, words: _Words, key: FutexKey
) -> FutexContent | None:
    queued = [len(futex_queues(context).get(word, ())) for word in key.pair()]
    if context.live:
        # On a running kernel the queues were read earlier than the futexes' words.
        queued = [0, 0]
    pair = queued[0], queued[1]
    start = _read_condition(words.read, place.address, pair, key.shared)
    if not key.of_inode:
        _cache(context).add_condition(place.mm, place.address, start)
    return None if start is None else FutexContent(condition=place.address - start)


def _read_condition(
    read: Callable[[int, int], bytes | None],
    address: int,
    queued: tuple[int, int],
    shared: bool | None,
) -> int | None:
    """Return the start of the condition variable of a futex; ``None`` if not found."""
    for newer, start in enumerate(c_library.condition_starts(address)):
        data = read(start, c_library.CONDITION_BYTES)
        if data is None:
            return None
        if c_library.condition(data, bool(newer), queued, shared):
            return start
    return None


def _read_locked(mode: Mode | None, readers: int) -> FutexContent:
    has = "reader has" if readers == 1 else "readers have"
    what = f"{readers:,} {has} it: {_UNRECORDED}"
    return FutexContent(mode=mode, readers=readers, what=what)


def _musl_mutex(
    context: LockContext, place: FutexPlace, words: _Words, key: FutexKey
) -> FutexContent | None:
    start = place.address - c_library.MUTEX_FUTEX
    data = None if start % 8 else words.read(start, c_library.MUTEX_BYTES)
    if data is None:
        return None
    if c_library.is_unrecorded(data, key.shared):
        return FutexContent(what=c_library.UNRECORDED)
    mutex = c_library.mutex(data, key.shared)
    return _owned(context, place, key, mutex) if mutex else None


def _musl_rwlock(
    place: FutexPlace, words: _Words, key: FutexKey
) -> FutexContent | None:
    data = words.read(place.address, c_library.RWLOCK_BYTES)
    lock = c_library.rwlock(data, key.shared) if data else None
    if lock is None:
        return None
    if lock.readers:
        return _read_locked(lock.mode, lock.readers)
    return FutexContent(what=f"a writer has it: {_UNRECORDED}")


def _musl_thread(
    context: LockContext, place: FutexPlace, words: _Words
) -> FutexContent | None:
    """Return the thread whose exit is waited for; ``None`` unless it is only one."""
    data = words.read(
        place.address - c_library.THREAD_BYTES, c_library.THREAD_BYTES + 4
    )
    found = c_library.threads(data, place.address) if data else []
    tasks = {find_owner(context, place, tid) for tid in found} - {None}
    return FutexContent(tasks.pop()) if len(tasks) == 1 else None


def _tasks_on(context: LockContext, key: FutexKey) -> set[int]:
    lock = Lock("futex", key.address, key)
    return {waiter.task for waiter in waiters_on(context, lock)}


# --- Futexes: requests, waiters, owners and readers.
#
# The kernel records the waiters of each futex, but the owner only of a PI futex. Other
# owners are in the memory of the process, next to the futex: see FutexContent, above.


PARKED = "parked on a futex of its own stack: nobody wakes it"

_PARKED_BYTES = 256
"""Bytes above the stack pointer that may be local variables of the function."""

# FUTEX_CMD_MASK: the operation without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME.
_COMMAND = 0x7F
_WAIT_BITSET = 9
_ALL_BITS = 0xFFFF_FFFF


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
    waiters = waiters_on(context, lock)
    if not waiters:
        return None
    mode = None if lock.type == "pi_futex" else content_of(context, waiters[0]).mode
    tasks = list(dict.fromkeys(waiter.task for waiter in waiters))
    if lock.type == "pi_futex":
        tasks = _by_urgency(context, waiters[0].pi_state, tasks)
    return [QueuedWaiter(task, mode) for task in tasks]


def holders(context: LockContext, lock: Lock) -> list[Holder]:
    """Return the owner of a futex.

    It is ``exact`` for a PI futex, whose owner the kernel records, and for a thread
    whose exit is waited for. Other owners are ``likely``: the C library recorded them.
    """
    waiter = requested_futexes(context).waiters.get((lock.type, lock.key))
    if waiter is None:
        return []
    if lock.type == "pi_futex":
        return _pi_owner(context, waiter)
    content = content_of(context, waiter)
    if content.owner is None:
        return []
    return [Holder(content.owner, content.confidence)]


def readers(context: LockContext, lock: Lock) -> int | None:
    """Return the number of readers of a futex; ``None`` if it does not count them."""
    waiter = requested_futexes(context).waiters.get((lock.type, lock.key))
    if waiter is None or lock.type == "pi_futex":
        return None
    return content_of(context, waiter).readers


def what(context: LockContext, case: BlockedTask, request: Request) -> str | None:
    """Describe a futex without an owner: see :func:`recorded` and :func:`parked`."""
    known = recorded(context, request)
    return known or parked(context, case.address, request)


def recorded(context: LockContext, request: Request) -> str | None:
    """Describe a futex by its process's memory; ``None`` if an owner is recorded."""
    requested = requested_futexes(context).waiters
    waiter = requested.get((request.lock.type, request.lock.key))
    if waiter is None or waiter.pi_state:
        return None
    return content_of(context, waiter).what


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
    waiters = waiters_on(context, lock)
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
    known = _known_requests(context)
    type_: LockTypeName = "pi_futex" if waiter.pi_state else "futex"
    request = known.get((type_, waiter.key))
    if request is None:
        requested = requested_futexes(context)
        content = FutexContent() if waiter.pi_state else content_of(context, waiter)
        key = waiter.key
        if content.condition is not None:
            key = waiter.key.moved(-content.condition)
            requested.words[key] = waiter.key.pair()
        requested.waiters[type_, key] = waiter
        request = Request(Lock(type_, key.address, key), content.mode)
        known[type_, waiter.key] = request
    return request


@per_context
def _known_requests(context: LockContext) -> dict[tuple[str, FutexKey], Request]:
    """Return the requests of a context by type and key of the futex."""
    return {}


def _by_urgency(context: LockContext, pi_state: int, tasks: list[int]) -> list[int]:
    try:
        mutex = pi_state + context.layout.offset("futex_pi_state", "pi_mutex")
        order = kernel_locks(context).rt_mutex(mutex).waiters or ()
    except UNREADABLE as error:
        context.losses.lose(Loss.WAITERS, f"cannot read the queue of a futex: {error}")
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
    except UNREADABLE:
        return False


FUTEX = LockType(
    names=frozenset({"futex", "pi_futex"}),
    requests=requests,
    queue=queue,
    holders=holders,
    readers=readers,
    what=what,
    task_class=TaskClass.LCK,
)
