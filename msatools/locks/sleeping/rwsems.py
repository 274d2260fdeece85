# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rwsems: owner, readers, waiters (kernel/locking/rwsem.c)."""

from msatools.locks.base.struct_reader import Layout
from msatools.locks.sleeping.list_lock import TASK, ListLock

_READER_OWNED = 0b001
"""``RWSEM_READER_OWNED``: the owner is the last reader, which may be gone."""

_WRITER = 1 << 0
_WAITERS = 1 << 1
_READERS_SHIFT = 8
_READERS_MASK = (1 << 55) - 1
"""The bits below ``RWSEM_FLAG_READFAIL``."""


def _owner(layout: Layout, lock: int) -> int | None:
    """Read the writer that owns the lock.

    A writer first sets its bit in the count, then the owner. In between the owner is 0,
    or the last reader.
    """
    if not _has_count(layout):
        return None
    count, word = layout.members(lock, "rw_semaphore", "count", "owner")
    written = count & _WRITER and not word & _READER_OWNED
    return word & TASK or None if written else None


def _last_owner(layout: Layout, lock: int) -> int | None:
    """Read the reader that entered last; ``None`` if there are no readers."""
    if not _has_count(layout):
        return None
    count, word = layout.members(lock, "rw_semaphore", "count", "owner")
    return word & TASK or None if _readers(count) else None


def _count_readers(layout: Layout, lock: int) -> int | None:
    if not _has_count(layout):
        return None
    return _readers(layout.member(lock, "rw_semaphore", "count"))


def _has_waiters(layout: Layout, lock: int) -> bool:
    if not _has_count(layout):
        return True
    return bool(layout.member(lock, "rw_semaphore", "count") & _WAITERS)


def _readers(count: int) -> int:
    return 0 if count & _WRITER else count >> _READERS_SHIFT & _READERS_MASK


def _has_count(layout: Layout) -> bool:
    """Return whether ``rw_semaphore.count`` has the bits above.

    "locking/rwsem: Implement a new locking scheme" (in v5.3), with "locking/rwsem: Make
    rwsem->owner an atomic_long_t".
    """
    return layout.has("rw_semaphore", "count") and layout.has(
        "rw_semaphore", "owner.counter"
    )


RWSEM = ListLock(
    name="rwsem",
    struct="rw_semaphore",
    waiter="rwsem_waiter",
    slow_paths={"rwsem_down_read": "read", "rwsem_down_write": "write"},
    blockers={2: "read", 3: "write"},
    kind="type",
    modes=("write", "read"),
    has_waiters=_has_waiters,
    owner=_owner,
    last_owner=_last_owner,
    readers=_count_readers,
)
