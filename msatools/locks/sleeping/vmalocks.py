# SPDX-License-Identifier: LGPL-2.1-or-later

"""Per-VMA locks that are a reference count in the mapping itself.

mm/mmap_lock.c: "mm: replace vm_lock and detached flag with a reference count" (in
v6.15). A writer, which has the ``mmap_lock``, sets a bit of ``vm_refcnt`` to keep new
readers out, and sleeps until those that are in a fault of the mapping have left. They
are not recorded: see :mod:`msatools.locks.positions`.
"""

from itertools import islice

from msatools.errors import UNREADABLE
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock, Request
from msatools.locks.base.lock_context import MAX_CANDIDATES, LockContext
from msatools.locks.base.lock_type import LockType, at_most_one

_WAITS = (
    *("__vma_start_exclude_readers", "__vma_enter_locked", "__vma_start_write"),
    *("vma_mark_detached", "__vma_exclude_readers_for_detach"),
)
"""Functions in which a writer waits, of all versions; others may be inlined."""

_EXCLUDES = 0x4000_0000
"""``VM_REFCNT_EXCLUDE_READERS_FLAG``, before ``VMA_LOCK_OFFSET``, of ``vm_refcnt``."""


def request(context: LockContext, case: BlockedTask) -> Request | None:
    """
    Return the mapping whose readers a task waits for.

    :raises MissingError: if the types are unknown
    """
    layout = context.layout
    if not case.is_in(*_WAITS) or not layout.has("vm_area_struct", "vm_refcnt"):
        return None
    for address in islice(case.stack.data_pointers(), MAX_CANDIDATES):
        try:
            mm, count = layout.members(address, "vm_area_struct", "vm_mm", "vm_refcnt")
        except UNREADABLE:
            continue
        if mm == case.mm and count & _EXCLUDES:
            return Request(Lock("vma", address), "write")
    return None


VMA_LOCK = LockType(names=frozenset({"vma"}), requests=at_most_one(request))
