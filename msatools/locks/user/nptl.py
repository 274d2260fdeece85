# SPDX-License-Identifier: LGPL-2.1-or-later

"""What glibc's locks say of themselves, in the memory of a process of 64 bits. Pure.

The words of a ``pthread_mutex_t`` are, from its start on: lock, count, owner, users,
kind, two of spinning, and two pointers that link robust ones. Its futex is the lock: 0
free, 1 taken, 2 taken and perhaps waited for; of a robust one the owner's thread ID and
the kernel's FUTEX_WAITERS.

Those of a ``pthread_rwlock_t`` (glibc 2.25 and newer) are: readers (their number above
three bits of state), writers, two futexes (the phase's, which readers wait on and the
next writer; that of the other writers), two of padding, the writer's thread ID, and
whether it is shared; then 16 bytes of zeros and what it prefers.

Any other program may use a futex as it likes. So nothing is told unless all of a lock's
words are what they can be together: its owner could be some other number else.
"""

import struct
from dataclasses import dataclass

from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.locks.model import Mode

MUTEX_BYTES = 40
RWLOCK_BYTES = 56

_MUTEX = struct.Struct("<IIIIIIQQ")
_RWLOCK = struct.Struct("<8I2QII")

# Bits of a mutex's kind (nptl/pthreadP.h).
_TYPE = 0b11
_RECURSIVE, _ERRORCHECK = 1, 2
_ROBUST, _INHERITS, _PROTECTS, _SHARED = 1 << 4, 1 << 5, 1 << 6, 1 << 7
_KINDS = (1 << 10) - 1
_TAKEN = (1, 2)

# Of a robust mutex's lock (include/uapi/linux/futex.h).
_WAITERS, _OWNER_DIED, _TID = 1 << 31, 1 << 30, (1 << 30) - 1

# Of a rwlock's readers (nptl/pthread_rwlock_common.c), and of its futexes.
_WRITE_PHASE, _WRITER, _READERS_WAIT = 1, 2, 4
_READERS_SHIFT = 3
_SET, _USED = 1, 2
_PREFERENCES = 3
_PHASE_AT, _WRITERS_AT = 8, 12


@dataclass(frozen=True)
class Mutex:
    """A ``pthread_mutex_t`` that a thread has."""

    owner: int
    """Its ID, as the process sees it."""

    blocks_owner: bool
    """Whether the owner waits, too, if it takes the mutex once more."""


@dataclass(frozen=True)
class Rwlock:
    """A ``pthread_rwlock_t`` that threads have."""

    writer: int | None
    """The ID of the thread that writes, as the process sees it; ``None`` if none."""

    readers: int
    """How many read."""

    mode: Mode
    """How those want it who wait on the futex that was looked at."""


def mutex(data: bytes, shared: bool) -> Mutex | None:
    """
    Take the mutex apart that a futex is the lock of; ``None`` if it is of no such.

    :param data: :data:`MUTEX_BYTES` from the futex on.
    :param shared: Whether its waiters let other processes use the futex.
    """
    lock, count, owner, users, kind, _, before, after = _MUTEX.unpack(data)
    # For robust ones the kernel wakes who waits, and does not know what is private.
    if kind > _KINDS or shared != bool(kind & (_SHARED | _ROBUST)):
        return None
    # One that inherits is the kernel's, one that protects has its priority in the lock.
    if kind & (_INHERITS | _PROTECTS):
        return None
    if not (0 < owner < PID_MAX_LIMIT and 0 < users < PID_MAX_LIMIT):
        return None
    type_ = kind & _TYPE
    if kind & _ROBUST:
        taken = lock & _TID == owner and lock & _WAITERS and not lock & _OWNER_DIED
        fits = count and before and after
    else:
        taken = lock in _TAKEN
        fits = bool(count) == (type_ == _RECURSIVE) and not before | after
    if not (taken and fits):
        return None
    return Mutex(owner, blocks_owner=type_ not in (_RECURSIVE, _ERRORCHECK))


def rwlock_start(address: int) -> int:
    """Tell where the rwlock is if a futex is one of its two: it is aligned."""
    return address - (_WRITERS_AT if address % 8 else _PHASE_AT)


def rwlock(data: bytes, place: int, shared: bool) -> Rwlock | None:
    """
    Take a rwlock apart; ``None`` if it is none, or changes hands.

    :param data: :data:`RWLOCK_BYTES`.
    :param place: Where in these the futex is that is waited on.
    :param shared: Whether its waiters let other processes use the futex.
    """
    values = _RWLOCK.unpack(data)
    readers, _, phase, writers, pad1, pad2, writer, is_shared, *zeros, prefers, end = (
        values
    )
    if pad1 or pad2 or any(zeros) or end or prefers >= _PREFERENCES:
        return None
    if is_shared != shared or max(phase, writers) > _SET | _USED:
        return None
    if not readers & _WRITER or not writers & _SET:
        return None
    mode = _mode(place, readers, phase, writers)
    if mode is None:
        return None
    if readers & _WRITE_PHASE:
        if phase & _SET and 0 < writer < PID_MAX_LIMIT:
            return Rwlock(writer, 0, mode)
    elif not phase & _SET and not writer and readers >> _READERS_SHIFT:
        return Rwlock(None, readers >> _READERS_SHIFT, mode)
    return None


def _mode(place: int, readers: int, phase: int, writers: int) -> Mode | None:
    """Tell how it is wanted by who waits at a place; ``None`` if nobody can there."""
    if place == _WRITERS_AT:
        return "write" if writers & _USED else None
    if place == _PHASE_AT and phase & _USED:
        # While a writer has it, readers wait for the phase to end.
        return "read" if phase & _SET else "write"
    if place == 0 and readers & _READERS_WAIT:
        return "read"
    return None
