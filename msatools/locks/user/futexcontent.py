# SPDX-License-Identifier: LGPL-2.1-or-later

"""The lock that a futex belongs to, by the memory of the process.

A lock of a C library is recognized if that library waits on it
(:mod:`msatools.locks.user.clibrary`), its members are consistent
(:mod:`msatools.locks.user.nptl`, :mod:`msatools.locks.user.musl`), and its owner is a
thread that can use the futex.
"""

from msgspec import Struct

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.words import PAGE
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock import Lock, OwnerConfidence
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.model import Mode
from msatools.locks.user import musl, nptl
from msatools.locks.user.clibrary import library_of
from msatools.locks.user.futexes import Waiter, futex_queues
from msatools.locks.user.futexusers import FutexPlace, find_owner, find_place
from msatools.locks.user.futexwaits import requested_futexes, waiters_on
from msatools.locks.user.usermemory import UserMemory, user_memory


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
    """What it is, if it records no owner."""


_UNRECORDED = "the C library does not record who"


class _FutexContents:
    """What was read of futexes, kept for one context."""

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
            start = _read_condition(context, mm, address, (0, 0), None)
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
    """Read the lock that a futex belongs to, once."""
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
    """The memory around a futex, of which the part on its page is read at once."""

    memory: UserMemory
    mm: int
    start: int
    data: bytes

    @classmethod
    def around(cls, context: LockContext, place: FutexPlace) -> "_Words | None":
        """Read the memory around a futex; ``None`` if it is not in the dump."""
        memory = user_memory(context)
        page = place.address & -PAGE
        start = max(place.address - nptl.RWLOCK_BYTES, page)
        end = min(place.address + nptl.RWLOCK_BYTES, page + PAGE)
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
    place = find_place(context, waiter)
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
    return _condition(context, place, waiter.key) or FutexContent()


def _thread(
    context: LockContext, place: FutexPlace, words: _Words
) -> FutexContent | None:
    """Return a thread whose exit is waited for: the kernel then clears its futex."""
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
    data = words.read(place.address, nptl.MUTEX_BYTES)
    mutex = nptl.mutex(data, key.shared) if data else None
    return _owned(context, place, key, mutex) if mutex else None


def _owned(
    context: LockContext, place: FutexPlace, key: FutexKey, mutex: nptl.Mutex
) -> FutexContent | None:
    task = find_owner(context, place, mutex.owner)
    if task is None or (task in _tasks_on(context, key) and not mutex.blocks_owner):
        return None
    return FutexContent(task)


def _rwlock(
    context: LockContext, place: FutexPlace, words: _Words, key: FutexKey
) -> FutexContent | None:
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
            return _read_locked(lock.mode, lock.readers)
        task = find_owner(context, place, lock.writer)
        # glibc refuses the lock to its own writer (EDEADLK), so that does not wait.
        if task is not None and task not in _tasks_on(context, key):
            return FutexContent(task, mode=lock.mode, readers=lock.readers)
    return None


def _condition(
    context: LockContext, place: FutexPlace, key: FutexKey
) -> FutexContent | None:
    queued = [len(futex_queues(context).get(word, ())) for word in key.pair()]
    if context.live:
        # They were read at another time than its words are.
        queued = [0, 0]
    start = _read_condition(
        context, place.mm, place.address, (queued[0], queued[1]), key.shared
    )
    if not key.of_inode:
        _cache(context).add_condition(place.mm, place.address, start)
    return None if start is None else FutexContent(condition=place.address - start)


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


def _read_locked(mode: Mode | None, readers: int) -> FutexContent:
    has = "reader has" if readers == 1 else "readers have"
    what = f"{readers:,} {has} it: {_UNRECORDED}"
    return FutexContent(mode=mode, readers=readers, what=what)


def _musl_mutex(
    context: LockContext, place: FutexPlace, words: _Words, key: FutexKey
) -> FutexContent | None:
    start = place.address - musl.MUTEX_FUTEX
    data = None if start % 8 else words.read(start, musl.MUTEX_BYTES)
    if data is None:
        return None
    if musl.is_unrecorded(data, key.shared):
        return FutexContent(what=musl.UNRECORDED)
    mutex = musl.mutex(data, key.shared)
    return _owned(context, place, key, mutex) if mutex else None


def _musl_rwlock(
    place: FutexPlace, words: _Words, key: FutexKey
) -> FutexContent | None:
    data = words.read(place.address, musl.RWLOCK_BYTES)
    lock = musl.rwlock(data, key.shared) if data else None
    if lock is None:
        return None
    if lock.readers:
        return _read_locked(lock.mode, lock.readers)
    return FutexContent(what=f"a writer has it: {_UNRECORDED}")


def _musl_thread(
    context: LockContext, place: FutexPlace, words: _Words
) -> FutexContent | None:
    """Return a thread whose exit is waited for."""
    data = words.read(place.address - musl.THREAD_BYTES, musl.THREAD_BYTES + 4)
    found = musl.threads(data, place.address) if data else []
    tasks = {find_owner(context, place, tid) for tid in found} - {None}
    return FutexContent(tasks.pop()) if len(tasks) == 1 else None


def _tasks_on(context: LockContext, key: FutexKey) -> set[int]:
    lock = Lock("futex", key.address, key)
    return {waiter.task for waiter in waiters_on(context, lock)}
