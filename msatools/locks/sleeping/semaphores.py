# SPDX-License-Identifier: LGPL-2.1-or-later

"""Semaphores: last owner and waiters (kernel/locking/semaphore.c)."""

from msatools.locks.base.struct_reader import Layout
from msatools.locks.sleeping.list_lock import ListLock


def _last_owner(layout: Layout, lock: int) -> int | None:
    # "hung_task: show the blocker task if the task is hung on semaphore" (in v6.16)
    if layout.has("semaphore", "last_holder"):
        return layout.member(lock, "semaphore", "last_holder") or None
    return None


def _has_waiters(layout: Layout, lock: int) -> bool:
    return layout.member(lock, "semaphore", "count") == 0


SEMAPHORE = ListLock(
    name="semaphore",
    struct="semaphore",
    waiter="semaphore_waiter",
    slow_paths={"__down": None},
    blockers={1: None},
    has_waiters=_has_waiters,
    last_owner=_last_owner,
)
