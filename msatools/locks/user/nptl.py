# SPDX-License-Identifier: LGPL-2.1-or-later

"""Decodes locks of 64-bit glibc from the memory of a process. Pure functions.

``pthread_mutex_t``: lock, count, owner, users, kind, two members for spinning, and two
pointers that link robust mutexes. Its futex is the lock: 0 free, 1 taken, 2 taken and
perhaps waited for. The lock of a robust mutex is the thread ID of its owner with the
kernel's FUTEX_WAITERS.

``pthread_rwlock_t`` (glibc 2.25 and newer): number of readers above three bits of
state, writers, two futexes (``wrphase``, which readers and the next writer wait on;
``writers``, which the other writers wait on), two members of padding, thread ID of the
writer, shared flag; then 16 bytes of zeros, and the preference.

``pthread_cond_t`` (glibc 2.25 and newer): two 64-bit counters, of all waiters so far
and of those before the first of two groups; then, up to 2.40, the number of
users of the futex of each group; the number of remaining waiters of each group; the
original size of the first group; the number of all current waiters; and the futex of
each group. Each waiter waits on one of these. "nptl: Remove g_refs from condition
variables" (in 2.41) removed the users, so the futexes are 8 bytes closer to the start,
and 8 bytes of zeros are at the end.

Other programs may use a futex in any way. So a lock is reported only if all of its
members are consistent. Otherwise its owner could be any other number.
"""

import struct

from msgspec import Struct

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

# Bits of the lock of a robust mutex (include/uapi/linux/futex.h).
_WAITERS, _OWNER_DIED, _TID = 1 << 31, 1 << 30, (1 << 30) - 1

# Bits of the readers of a rwlock (nptl/pthread_rwlock_common.c), and of its futexes.
_WRITE_PHASE, _WRITER, _READERS_WAIT = 1, 2, 4
_READERS_SHIFT = 3
_SET, _USED = 1, 2
_PREFERENCES = 3
_PHASE_OFFSET, _WRITERS_OFFSET = 8, 12

# Bits of members of a condition variable (nptl/pthread_cond_common.c).
_LOCK = 0b11
_FLAGS_SHIFT, _PROCESS_SHARED = 3, 1
_MAX_GROUP = 1 << 29
_FUTEXES_OFFSET, _FUTEXES_OFFSET_241 = 40, 32
_U32_MASK = 0xFFFF_FFFF


class Mutex(Struct, frozen=True):
    """A ``pthread_mutex_t`` that has an owner."""

    owner: int
    """Thread ID of the owner in the PID namespace of the process."""

    blocks_owner: bool
    """Whether the owner deadlocks if it takes the mutex again."""


class Rwlock(Struct, frozen=True):
    """A ``pthread_rwlock_t`` that has a writer or readers."""

    writer: int | None
    """Thread ID of the writer in the PID namespace of the process; ``None`` if there is
    no writer."""

    readers: int
    """Number of readers."""

    mode: Mode
    """Mode of the waiters on the futex that was examined."""


def mutex(data: bytes, shared: bool) -> Mutex | None:
    """
    Decode a mutex; ``None`` if it is not a mutex, or has no owner.

    :param data: :data:`MUTEX_BYTES` from its futex on.
    :param shared: Whether other processes may use the futex, by its key.
    """
    lock, count, owner, users, kind, _, before, after = _MUTEX.unpack(data)
    # Waiters on robust mutexes use shared keys: the kernel has to wake them when the
    # owner dies, and assumes such keys.
    if kind > _KINDS or shared != bool(kind & (_SHARED | _ROBUST)):
        return None
    # The futex of PTHREAD_PRIO_INHERIT is a PI futex, not handled here. The lock of
    # PTHREAD_PRIO_PROTECT includes its priority ceiling.
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
    """Return the address of the rwlock that has a futex as one of its two futexes."""
    return address - (_WRITERS_OFFSET if address % 8 else _PHASE_OFFSET)


def rwlock(data: bytes, offset: int, shared: bool) -> Rwlock | None:
    """
    Decode a rwlock; ``None`` if it is not a rwlock, or just changes its owner.

    :param data: :data:`RWLOCK_BYTES` from its start on.
    :param offset: Offset of the futex that is waited on.
    :param shared: Whether other processes may use the futex, by its key.
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
    mode = _mode(offset, readers, phase, writers)
    if mode is None:
        return None
    if readers & _WRITE_PHASE:
        if phase & _SET and 0 < writer < PID_MAX_LIMIT:
            return Rwlock(writer, 0, mode)
    elif not phase & _SET and not writer and readers >> _READERS_SHIFT:
        return Rwlock(None, readers >> _READERS_SHIFT, mode)
    return None


def condition_starts(address: int) -> tuple[int, int]:
    """Return the address that the condition variable of a futex would have.

    :return: In the layout up to glibc 2.40, and in that since 2.41.
    """
    first = address & ~7
    return first - _FUTEXES_OFFSET, first - _FUTEXES_OFFSET_241


def condition(
    data: bytes, newer: bool, waiters: tuple[int, int], shared: bool | None
) -> bool:
    """
    Return whether data is that of a condition variable that tasks wait on.

    It has no magic number, so all of its members have to be consistent:

    - The first group starts and ends before the sequence number of the next waiter. A
      group has at most 2 to the power of 29 sequence numbers; then all are woken.
    - The number of current waiters is at most that of all waiters so far, and at least
      that of queued tasks. Up to 2.40 the latter holds for each group, too, and the
      users of both groups together are not more than the current waiters.
    - The first group has at most as many remaining waiters as its original size. The
      second group is not counted yet; its size is 0, less the waiters that gave up.
      While the internal lock is taken, sizes may be inconsistent.
    - The shared flag is that of its futexes.
    - Since 2.41: the last 8 bytes are zeros.

    :param data: :data:`CONDITION_BYTES` from its start on.
    :param newer: Whether to decode the layout since 2.41.
    :param waiters: Number of tasks that are queued on each futex, or about to leave it.
    :param shared: Whether other processes may use the futexes, by their keys; ``None``
        if unknown.
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
    gave_up = -newest & _U32_MASK
    return oldest <= had and gave_up <= _MAX_GROUP


def _mode(offset: int, readers: int, phase: int, writers: int) -> Mode | None:
    """Return the mode of waiters at an offset; ``None`` if nobody can wait there."""
    if offset == _WRITERS_OFFSET:
        return "write" if writers & _USED else None
    if offset == _PHASE_OFFSET and phase & _USED:
        # While a writer owns the lock, readers wait for the end of its phase.
        return "read" if phase & _SET else "write"
    if offset == 0 and readers & _READERS_WAIT:
        return "read"
    return None
