# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the words of a sleeping lock say: who has it, and whether somebody waits.

kernel/locking/mutex.c, rwsem.c, semaphore.c. Words that have to agree come with one
read: on a kernel that runs they may change from one read to the next.
"""

from msatools.locks.lock import LockType
from msatools.locks.struct_reader import Layout

_TASK = (1 << 64) - 1 & ~0b111
"""The owner of a mutex or a rwsem, which flags lie below (``MUTEX_FLAGS``,
``RWSEM_OWNER_FLAGS_MASK``). "rwsem: Remove reader optimistic spinning" (in v5.11) left
two of a rwsem's three."""

_MUTEX_WAITERS = 0b001
_MUTEX_PICKUP = 0b100
"""The lock was handed to who is named, but that task sleeps yet: it counts as waiting
(``MUTEX_FLAG_PICKUP``)."""

_READER_OWNED = 0b001
"""Of a rwsem's owner: it is the last reader, which may be gone."""

_WRITER = 1 << 0
_RWSEM_WAITERS = 1 << 1
_READERS_SHIFT = 8
_READERS_MASK = (1 << 55) - 1
"""Below the bit that makes readers fail (``RWSEM_FLAG_READFAIL``)."""


def owner(layout: Layout, type_: LockType, lock: int) -> int | None:
    """
    Read who has a lock, where it tells exactly.

    Of a rwsem that is a writer. Who takes one sets the count first: until it is named,
    the owner is nobody, or the last reader.

    :return: The address of its ``struct task_struct``.
    :raises drgn.FaultError: if it cannot be read
    :raises LookupError: if nothing tells the type
    """
    if type_ in ("mutex", "ww_mutex"):
        word = layout.member(lock, "mutex", "owner")
        return None if word & _MUTEX_PICKUP else word & _TASK or None
    if type_ == "rwsem" and _counts(layout):
        count, word = layout.members(lock, "rw_semaphore", "count", "owner")
        written = count & _WRITER and not word & _READER_OWNED
        return word & _TASK or None if written else None
    return None


def last_owner(layout: Layout, type_: LockType, lock: int) -> int | None:
    """
    Read who was the last to take a lock that somebody has, if it may be gone since.

    Of a rwsem that is the last reader, while it has any.

    :raises drgn.FaultError: if it cannot be read
    :raises LookupError: if nothing tells the type
    """
    if type_ == "rwsem" and _counts(layout):
        count, word = layout.members(lock, "rw_semaphore", "count", "owner")
        return word & _TASK or None if _readers(count) else None
    # "hung_task: show the blocker task if the task is hung on semaphore" (in v6.16)
    if type_ == "semaphore" and layout.has("semaphore", "last_holder"):
        return layout.member(lock, "semaphore", "last_holder") or None
    return None


def readers(layout: Layout, lock: int) -> int | None:
    """
    Read how many have a rwsem for reading; ``None`` if it does not count them alone.

    :raises drgn.FaultError: if it cannot be read
    """
    if not _counts(layout):
        return None
    return _readers(layout.member(lock, "rw_semaphore", "count"))


def has_waiters(layout: Layout, type_: LockType, lock: int) -> bool:
    """
    Tell whether the words of a lock agree that somebody waits for it.

    It keeps what is no lock from being told as one.

    :raises drgn.FaultError: if it cannot be read
    """
    if type_ in ("mutex", "ww_mutex"):
        return bool(layout.member(lock, "mutex", "owner") & _MUTEX_WAITERS)
    if type_ == "rwsem" and _counts(layout):
        return bool(layout.member(lock, "rw_semaphore", "count") & _RWSEM_WAITERS)
    if type_ == "semaphore":
        return layout.member(lock, "semaphore", "count") == 0
    return True


def _readers(count: int) -> int:
    return 0 if count & _WRITER else count >> _READERS_SHIFT & _READERS_MASK


def _counts(layout: Layout) -> bool:
    """Tell whether a rwsem's count is as above.

    "locking/rwsem: Implement a new locking scheme" (in v5.3), with "locking/rwsem: Make
    rwsem->owner an atomic_long_t".
    """
    return layout.has("rw_semaphore", "count") and layout.has(
        "rw_semaphore", "owner.counter"
    )
