# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes that lie at addresses of processes, if tasks wait for them."""

from collections.abc import Iterator

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock import Lock
from msatools.locks.user.futexes import Waiter, futex_queues
from msatools.locks.user.futexusers import find_place
from msatools.locks.user.futexwaits import requested_futexes
from msatools.locks.user.userlocks import futex_requests
from msatools.locks.user.usermemory import SharedFile, user_memory
from msatools.whatis.locks import make_lock
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import LockThere

_WORD = 4
"""Bytes of a futex."""

_CONDITION_BYTES = 48
"""Size of the C library's ``pthread_cond_t``, which begins before its futexes."""


def futex_at(lookup: Lookup, mm: int, address: int) -> LockThere | None:
    """Return the futex at an address of a process; ``None`` if no task waits for one.

    :param mm: Address of the ``struct mm_struct`` of the process.
    """
    context = lookup.locks
    word = address - address % _WORD
    try:
        queues = futex_queues(context)
        file = None
        if any(key.of_inode for key in queues):
            file = user_memory(context).shared_file(mm, word)
        for key, waiters in queues.items():
            there = _address(lookup, key, waiters[0], mm, file)
            if there is None or not 0 <= there - word < _CONDITION_BYTES:
                continue
            for lock in _locks(lookup, waiters[0]):
                start = there - _bytes_before(key, lock)
                if word in (there, start):
                    return make_lock(lookup, lock, start, _id(lookup, lock, mm, file))
    except LOST as error:
        lookup.losses.lose(Loss.LOCKS, f"a futex cannot be read: {error}")
    return None


def _address(
    lookup: Lookup, key: FutexKey, waiter: Waiter, mm: int, file: SharedFile | None
) -> int | None:
    """Return where a futex is in the memory of a process; ``None`` if it is not."""
    if key.file_offset is not None:
        if file is None or file.sequence != key.object:
            return None
        return file.start + key.file_offset - file.first
    place = find_place(lookup.locks, waiter)
    return place.address if place is not None and place.mm == mm else None


def _locks(lookup: Lookup, waiter: Waiter) -> Iterator[Lock]:
    """Yield the lock that a waiter is on: a condition variable has two futexes."""
    words = requested_futexes(lookup.locks).words
    for request in futex_requests(lookup.locks, waiter.task):
        key = request.lock.key
        if isinstance(key, FutexKey) and waiter.key in words.get(key, (key,)):
            yield request.lock


def _bytes_before(key: FutexKey, lock: Lock) -> int:
    """Return how far before a futex the lock begins that it is a part of."""
    start = lock.key
    assert isinstance(start, FutexKey)
    if key.file_offset is not None:
        return key.file_offset - (start.file_offset or 0)
    return (key.address or 0) - (start.address or 0)


def _id(lookup: Lookup, lock: Lock, mm: int, file: SharedFile | None) -> str:
    """Return the ID that msa-locks gives to a futex."""
    key = lock.key
    if lock.address is None and file is not None and isinstance(key, FutexKey):
        inode = lookup.structs.member(file.inode, "inode", "i_ino")
        return f"{lock.type} inode {inode}+{key.file_offset or 0:#x}"
    process = lookup.process_of(mm)
    pid = 0 if process is None else process.pid
    return f"{lock.type} {pid}:{lock.address or 0:#x}"
