# SPDX-License-Identifier: LGPL-2.1-or-later

"""All lock types with a list of waiters, and the request of a task for one of them.

A new type is a file that makes a :class:`ListLock`, and a line here.
"""

from typing import NamedTuple

from msgspec import Struct

from msatools.errors import MissingError
from msatools.locks.base.lock import LockTypeName
from msatools.locks.base.model import Mode
from msatools.locks.base.struct_reader import Layout
from msatools.locks.sleeping.list_lock import ListLock
from msatools.locks.sleeping.mutexes import MUTEX, WW_MUTEX
from msatools.locks.sleeping.rwsems import RWSEM
from msatools.locks.sleeping.semaphores import SEMAPHORE
from msatools.selfdesc.find import find_type, member_of
from msatools.target.addresses import KERNEL_HALF

LIST_LOCKS: dict[LockTypeName, ListLock] = {
    lock.name: lock for lock in (RWSEM, MUTEX, WW_MUTEX, SEMAPHORE)
}

FIRST = "first_waiter"
"""Member that replaces the list head since "locking/mutex: Remove the list_head from
struct mutex" and the like (in v7.1): the ring consists of waiters only."""

_BLOCKER_TYPE = 0b11
"""``BLOCKER_TYPE_MASK`` (include/linux/hung_task.h)."""


class Sought(NamedTuple):
    """The type and mode of a task's request, by the functions on its stack."""

    lock: ListLock
    mode: Mode | None


class Record(Struct, frozen=True):
    """Members of a task that point at the lock it waits for; 0 if unset."""

    blocker: int = 0
    """``task_struct.blocker``: the address of a lock, with its type in the low bits."""

    blocked_on: int = 0
    """``task_struct.blocked_on``: a mutex, or the task's waiter for one."""

    def locks(self, sought: Sought, blocked_on: str | None) -> list[int]:
        """
        Return the addresses of the recorded locks that match a request.

        :param blocked_on: Tag of the structure that ``blocked_on`` points at.
        """
        addresses = []
        type_ = self.blocker & _BLOCKER_TYPE
        blockers = sought.lock.blockers
        if type_ in blockers and blockers[type_] == sought.mode:
            addresses.append(self.blocker & ~_BLOCKER_TYPE)
        if sought.lock.struct == blocked_on:
            addresses.append(self.blocked_on)
        # blocked_on is PROXY_WAKING (-1) while a task is being woken.
        return [
            address
            for address in addresses
            if address >= KERNEL_HALF and not address % 4
        ]


def sought_by(names: tuple[str, ...]) -> Sought | None:
    """Return the request of a task, by the innermost function that waits for a lock."""
    for name in names:
        for lock in LIST_LOCKS.values():
            for prefix, mode in lock.slow_paths.items():
                if name.startswith(prefix):
                    return Sought(lock, mode)
    return None


def blocked_on_type(layout: Layout) -> str | None:
    """Return the tag of the structure that ``task_struct.blocked_on`` points at.

    "locking/mutex: Rework task_struct::blocked_on" (in v6.17) made it the mutex;
    before, with CONFIG_DEBUG_MUTEXES, it was the waiter.
    """
    try:
        task = find_type(layout.reader.prog, "struct task_struct")
        tag: str | None = member_of(task, "blocked_on").type.type.tag
    except MissingError:
        return None
    return tag
