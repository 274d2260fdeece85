# SPDX-License-Identifier: LGPL-2.1-or-later

"""All locks with a list of waiters, and which of them a task waits for.

By the functions on its stack and by its own record. A new type is a file that makes a
:class:`ListLock`, and a line here.
"""

from dataclasses import dataclass
from typing import NamedTuple

from msatools.locks.base.lock import LockTypeName
from msatools.locks.base.model import Mode
from msatools.locks.base.struct_reader import Layout
from msatools.locks.sleeping.list_lock import ListLock
from msatools.locks.sleeping.mutexes import MUTEX, WW_MUTEX
from msatools.locks.sleeping.rwsems import RWSEM
from msatools.locks.sleeping.semaphores import SEMAPHORE
from msatools.target.addresses import KERNEL_HALF

LIST_LOCKS: dict[LockTypeName, ListLock] = {
    lock.name: lock for lock in (RWSEM, MUTEX, WW_MUTEX, SEMAPHORE)
}

FIRST = "first_waiter"
"""What they have in place of the list since "locking/mutex: Remove the list_head from
struct mutex" and the like (in v7.1): the ring has waiters only."""

_BLOCKER_KIND = 0b11


class Sought(NamedTuple):
    """What a task waits for, by what is on its stack."""

    lock: ListLock
    mode: Mode | None


@dataclass(frozen=True)
class Record:
    """What a task's own record says that it waits for; 0 where it says nothing."""

    blocker: int = 0
    """``task_struct.blocker``: the lock, with its kind in the last bits."""

    blocked_on: int = 0
    """``task_struct.blocked_on``: a mutex, or the task's waiter for one."""

    def locks(self, sought: Sought, blocked_on: str | None) -> list[int]:
        """
        Return the locks that it names and that are what is sought.

        :param blocked_on: The structure that ``blocked_on`` points at.
        """
        named = []
        kind = self.blocker & _BLOCKER_KIND
        blockers = sought.lock.blockers
        if kind in blockers and blockers[kind] == sought.mode:
            named.append(self.blocker & ~_BLOCKER_KIND)
        if sought.lock.struct == blocked_on:
            named.append(self.blocked_on)
        # Who is just woken is blocked on -1 (PROXY_WAKING).
        return [word for word in named if word >= KERNEL_HALF and not word % 4]


def sought_by(names: tuple[str, ...]) -> Sought | None:
    """Return what a task waits for, by the innermost function that tells it."""
    for name in names:
        for lock in LIST_LOCKS.values():
            for prefix, mode in lock.slow_paths.items():
                if name.startswith(prefix):
                    return Sought(lock, mode)
    return None


def blocked_on_type(layout: Layout) -> str | None:
    """Return the structure that ``task_struct.blocked_on`` points at.

    "locking/mutex: Rework task_struct::blocked_on" (in v6.17) made it the mutex;
    before, with CONFIG_DEBUG_MUTEXES, it was the waiter.
    """
    try:
        task = layout.reader.prog.type("struct task_struct")
        tag: str | None = task.member("blocked_on").type.type.tag
    except LookupError:
        return None
    return tag
