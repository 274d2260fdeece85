# SPDX-License-Identifier: LGPL-2.1-or-later

"""The words of glibc's locks, in the memory of a process of 64 bits. Pure.

The words of a ``pthread_mutex_t`` are, from its start on: lock, count, owner, users,
kind, two of spinning, and two pointers that link robust ones. Its futex is the lock: 0
free, 1 taken, 2 taken and perhaps waited for; of a robust one the owner's thread ID and
the kernel's FUTEX_WAITERS.

Those of a ``pthread_rwlock_t`` (glibc 2.25 and newer) are: readers (their number above
three bits of state), writers, two futexes (the phase's, which readers wait on and the
next writer; that of the other writers), two of padding, the writer's thread ID, and
whether it is shared; then 16 bytes of zeros and what it prefers.

Those of a ``pthread_cond_t`` (2.25 and newer) are two counters of 64 bits, of who has
ever waited and where the first of two groups of waiters starts among them; then, up to
2.40, how many use the futex of each group; how many of each group are left; how many
the first had; who waits at all; and the two futexes, one a group, of which each waiter
waits on one. "nptl: Remove g_refs from condition variables" (in 2.41) took the third of
these out, so the futexes lie 8 bytes nearer to the start, and 8 bytes of zeros end it.

Any other program may use a futex as it likes. So nothing is told unless all of a lock's
words are what they can be together: its owner could be some other number else.
"""

import struct
from dataclasses import dataclass

from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.locks.base.model import Mode

MUTEX_BYTES = 40
RWLOCK_BYTES = 56
CONDITION_BYTES = 48

_MUTEX = struct.Struct("<IIIIIIQQ")
_RWLOCK = struct.Struct("<8I2QII")
_CONDITION = struct.Struct("<2Q8I")

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

# Bits of a condition variable's words (nptl/pthread_cond_common.c).
_LOCK = 0b11
_FLAGS_SHIFT, _PROCESS_SHARED = 3, 1
_MAX_GROUP = 1 << 29
_FUTEXES_AT, _FUTEXES_AT_241 = 40, 32
_HALF = 0xFFFF_FFFF


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
    """Return where the rwlock is if a futex is one of its two: it is aligned."""
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


def condition_starts(address: int) -> tuple[int, int]:
    """Return where the condition variable would start that has a futex, by layout.

    :return: Up to glibc 2.40, and since 2.41.
    """
    first = address & ~7
    return first - _FUTEXES_AT, first - _FUTEXES_AT_241


def condition(
    data: bytes, newer: bool, waiters: tuple[int, int], shared: bool | None
) -> bool:
    """
    Return whether there is a condition variable that tasks wait on.

    Nothing marks one. It is one if all of its words agree:

    - the first group starts, and ends, before the next waiter's turn; and no group has
      more than 2 to the power of 29 turns, after which all are woken;
    - no more wait than have ever waited, and at least as many as are queued. Up to 2.40
      that holds of each group, too, and both together are not more than wait at all;
    - of the first group no more are left than it had; of the second, which is not
      counted yet, none, but for those that gave up. In the midst of a change, when its
      own lock is taken, these two may disagree;
    - it is shared between processes, or not, as its futexes are;
    - since 2.41: it ends with 8 bytes of zeros.

    :param data: :data:`CONDITION_BYTES`.
    :param newer: Whether it is laid out as since 2.41.
    :param waiters: How many are queued on each of the futexes, or about to leave them.
    :param shared: Whether they let other processes use these; ``None`` if unknown.
    """
    values: tuple[int, ...] = _CONDITION.unpack(data)
    sequence, start, *words = values
    references, words = ([], words) if newer else (words[:2], words[2:])
    size_0, size_1, original, flags, _, _, *rest = words
    index, first = sequence & 1, start if newer else start >> 1
    if any(rest) or original & _LOCK == _LOCK:
        return False
    if shared is not None and flags & _PROCESS_SHARED != shared:
        return False
    ever, had, waiting = sequence >> 1, original >> 2, flags >> _FLAGS_SHIFT
    if not first + had <= ever <= first + 2 * _MAX_GROUP:
        return False
    if not max(sum(waiters), 1) <= waiting <= min(ever, PID_MAX_LIMIT):
        return False
    using = [count >> 1 for count in references] or [waiting] * 2
    if any(queued > used for queued, used in zip(waiters, using, strict=True)):
        return False
    if references and sum(using) > waiting:
        return False
    if original & _LOCK:
        return True
    if not newer and start & 1 != index:
        return False
    newest, oldest = (size_0, size_1) if index == 0 else (size_1, size_0)
    gave_up = -newest & _HALF
    return oldest <= had and gave_up <= _MAX_GROUP


def _mode(place: int, readers: int, phase: int, writers: int) -> Mode | None:
    """Return how it is wanted by who waits at a place; ``None`` if nobody can there."""
    if place == _WRITERS_AT:
        return "write" if writers & _USED else None
    if place == _PHASE_AT and phase & _USED:
        # While a writer has it, readers wait for the phase to end.
        return "read" if phase & _SET else "write"
    if place == 0 and readers & _READERS_WAIT:
        return "read"
    return None
