# SPDX-License-Identifier: LGPL-2.1-or-later

"""Decodes locks of 64-bit musl from the memory of a process. Pure functions.

``pthread_mutex_t`` (src/internal/pthread_impl.h, ``_m_*``): type, lock, number of
waiters, two members unused, count, and two pointers that link the mutexes of their
owner. Its futex is the lock: the thread ID of its owner, or for a mutex of the usual
type only EBUSY, with FUTEX_WAITERS.

``pthread_rwlock_t`` (``_rw_*``): lock, number of waiters, shared flag; then zeros. Its
futex is the lock: the number of readers, or all bits but the highest for a writer, who
is not recorded.

Waiters on a condition variable each wait on their own stack. ``pthread_join()`` waits
on ``detach_state`` in the ``struct pthread`` of the thread, which begins with its own
address.
"""

import struct

from msgspec import Struct

from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.words import U32, U64
from msatools.locks.base.model import Mode
from msatools.locks.user.nptl import Mutex

MUTEX_BYTES = 40
MUTEX_FUTEX = 4
"""Offset of its futex in a mutex."""

RWLOCK_BYTES = 56

UNRECORDED = "a mutex of musl: of this type it does not record its owner"

_MUTEX = struct.Struct("<IIIIIIQQ")
_RWLOCK = struct.Struct("<14I")

# Bits of a mutex's type.
_TYPE, _RECURSIVE, _ERRORCHECK = 0b11, 1, 2
_ROBUST, _INHERITS, _SHARED = 1 << 2, 1 << 3, 1 << 7
_TYPES = _TYPE | _ROBUST | _INHERITS | _SHARED
_EBUSY = 16
_WAITERS, _TID = 1 << 31, (1 << 30) - 1
_WRITER = 0x7FFF_FFFF

_THREADS = ((56, 48), (64, 56), (40, 32))
"""Offsets of ``detach_state`` and ``tid`` in a ``struct pthread``: since 1.2.2, before,
and on arm64, where other members come last."""

THREAD_BYTES = 64
"""The most bytes of one that come before its futex."""

_JOINABLE = (1, 2)
"""``DT_EXITING`` and ``DT_JOINABLE``."""


class ReadWriteLock(Struct, frozen=True):
    """A ``pthread_rwlock_t`` that is taken."""

    readers: int
    """Number of readers; 0 if a writer has it."""

    mode: Mode | None
    """Mode of the waiters: readers wait for a writer alone."""


def mutex(data: bytes, shared: bool) -> Mutex | None:
    """
    Decode a mutex; ``None`` if it is not a mutex, or records no owner.

    :param data: :data:`MUTEX_BYTES` from its start on.
    :param shared: Whether other processes may use the futex, by its key.
    """
    type_, lock, waiters, *_, before, after = _MUTEX.unpack(data)
    if not _is_mutex(type_, lock, waiters, shared) or not _records_owner(type_):
        return None
    owner = lock & _TID
    if not 0 < owner < PID_MAX_LIMIT or not before or not after:
        return None
    return Mutex(owner, blocks_owner=type_ & _TYPE not in (_RECURSIVE, _ERRORCHECK))


def is_unrecorded(data: bytes, shared: bool) -> bool:
    """Return whether data is that of a mutex that is taken and records no owner.

    The parameters are those of :func:`mutex`.
    """
    type_, lock, waiters, _, _, count, before, after = _MUTEX.unpack(data)
    if not _is_mutex(type_, lock, waiters, shared) or _records_owner(type_):
        return False
    return lock & ~_WAITERS == _EBUSY and not (count or before or after)


def rwlock(data: bytes, shared: bool) -> ReadWriteLock | None:
    """
    Decode a rwlock; ``None`` if it is not a rwlock that is taken.

    :param data: :data:`RWLOCK_BYTES` from its start on.
    :param shared: Whether other processes may use the futex, by its key.
    """
    lock, waiters, is_shared, *zeros = _RWLOCK.unpack(data)
    if any(zeros) or is_shared != (_SHARED if shared else 0):
        return None
    if not lock & _WAITERS or not 0 < waiters < PID_MAX_LIMIT:
        return None
    readers = lock & ~_WAITERS
    if readers == _WRITER:
        return ReadWriteLock(0, None)
    return ReadWriteLock(readers, "write") if 0 < readers < PID_MAX_LIMIT else None


def threads(before: bytes, address: int) -> list[int]:
    """
    Return the IDs of the threads whose exit may be waited for.

    :param before: Memory that ends with the futex.
    :param address: Address of the futex.
    """
    if not before or U32.unpack_from(before, len(before) - 4)[0] not in _JOINABLE:
        return []
    found = []
    for state, tid in _THREADS:
        first = len(before) - 4 - state
        if first >= 0 and U64.unpack_from(before, first)[0] == address - state:
            found.append(U32.unpack_from(before, first + tid)[0])
    return [tid for tid in found if 0 < tid < PID_MAX_LIMIT]


def _is_mutex(type_: int, lock: int, waiters: int, shared: bool) -> bool:
    # The futex of a mutex that inherits priorities is a PI futex, not handled here.
    if type_ & (~_TYPES | _INHERITS) or type_ & _TYPE == _TYPE:
        return False
    if bool(type_ & _SHARED) != shared:
        return False
    return bool(lock & _WAITERS) and 0 < waiters < PID_MAX_LIMIT


def _records_owner(type_: int) -> bool:
    return bool(type_ & (_TYPE | _ROBUST))
