# SPDX-License-Identifier: LGPL-2.1-or-later

"""Mutexes, also those in a ``ww_mutex``: owner and waiters (kernel/locking/mutex.c)."""

from msgspec.structs import replace

from msatools.locks.base.struct_reader import Layout
from msatools.locks.sleeping.list_lock import TASK, ListLock

_WAITERS = 0b001
_PICKUP = 0b100
"""``MUTEX_FLAG_PICKUP``: the lock was handed to the owner, which still sleeps. That
task counts as a waiter."""


def _owner(layout: Layout, lock: int) -> int | None:
    word = layout.member(lock, "mutex", "owner")
    return None if word & _PICKUP else word & TASK or None


def _has_waiters(layout: Layout, lock: int) -> bool:
    return bool(layout.member(lock, "mutex", "owner") & _WAITERS)


MUTEX = ListLock(
    name="mutex",
    struct="mutex",
    waiter="mutex_waiter",
    slow_paths={"__mutex_lock": None},
    blockers={0: None},
    has_waiters=_has_waiters,
    owner=_owner,
)
WW_MUTEX = replace(MUTEX, name="ww_mutex", slow_paths={"__ww_mutex_lock": None})
