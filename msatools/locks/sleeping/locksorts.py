# SPDX-License-Identifier: LGPL-2.1-or-later

"""What sort of lock a task waits for, by its stack and its own record.

kernel/locking/mutex.c, rwsem.c, semaphore.c: locks with a list of waiters.
"""

from dataclasses import dataclass
from typing import NamedTuple

from msatools.locks.base.lock import LockType
from msatools.locks.base.model import Mode
from msatools.locks.base.rings import Shape
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF


class Sort(NamedTuple):
    """What a task waits for, by what is on its stack."""

    type: LockType
    waiter: str
    """The type of its waiter."""

    mode: Mode | None


_BY_FUNCTION: tuple[tuple[str, Sort], ...] = (
    ("rwsem_down_read", Sort("rwsem", "rwsem_waiter", "read")),
    ("rwsem_down_write", Sort("rwsem", "rwsem_waiter", "write")),
    ("__mutex_lock", Sort("mutex", "mutex_waiter", None)),
    ("__ww_mutex_lock", Sort("ww_mutex", "mutex_waiter", None)),
    ("__down", Sort("semaphore", "semaphore_waiter", None)),
)
_WAITERS = {sort.type: sort.waiter for _, sort in _BY_FUNCTION}

LISTS: dict[LockType, tuple[str, str]] = {
    "rwsem": ("rw_semaphore", "wait_list"),
    "mutex": ("mutex", "wait_list"),
    "ww_mutex": ("mutex", "wait_list"),
    "semaphore": ("semaphore", "wait_list"),
}
"""The structures of those types, and the head of their list of waiters."""

FIRST = "first_waiter"
"""What they have in its place since "locking/mutex: Remove the list_head from struct
mutex" and the like (in v7.1): the ring has waiters only."""

_MUTEXES = ("mutex", "ww_mutex")
_BLOCKER_KIND = 0b11
# By those last bits of task_struct.blocker: include/linux/hung_task.h (v6.16)
_BLOCKERS: tuple[tuple[LockType, Mode | None], ...] = (
    ("mutex", None),
    ("semaphore", None),
    ("rwsem", "read"),
    ("rwsem", "write"),
)


@dataclass(frozen=True)
class Record:
    """What a task's own record says that it waits for; 0 where it says nothing."""

    blocker: int = 0
    """``task_struct.blocker``: the lock, with its kind in the last bits."""

    blocked_on: int = 0
    """``task_struct.blocked_on``: a mutex, or the task's waiter for one."""

    def locks(self, sort: Sort, blocked_on: str | None) -> list[int]:
        """
        Give the locks that it names and that are of a sort.

        :param blocked_on: The structure that ``blocked_on`` points at.
        """
        named = []
        type_, mode = _BLOCKERS[self.blocker & _BLOCKER_KIND]
        fits = _MUTEXES if type_ == "mutex" else (type_,)
        if sort.type in fits and sort.mode == mode:
            named.append(self.blocker & ~_BLOCKER_KIND)
        if sort.type in _MUTEXES and blocked_on == "mutex":
            named.append(self.blocked_on)
        # Who is just woken is blocked on -1 (PROXY_WAKING).
        return [word for word in named if word >= KERNEL_HALF and not word % 4]


def sort_of(names: tuple[str, ...]) -> Sort | None:
    """Tell what a task waits for, by the innermost function that tells it."""
    for name in names:
        for prefix, sort in _BY_FUNCTION:
            if name.startswith(prefix):
                return sort
    return None


def shape_of(layout: Layout, type_: LockType) -> Shape:
    """Tell where the members of waiters for a type of lock are.

    :raises LookupError: if nothing tells them
    """
    kind = "type" if type_ == "rwsem" else ""
    return Shape.of(layout, _WAITERS[type_], "list", "task", kind)


def blocked_on_type(layout: Layout) -> str | None:
    """Tell what structure ``task_struct.blocked_on`` points at.

    "locking/mutex: Rework task_struct::blocked_on" (in v6.17) made it the mutex;
    before, with CONFIG_DEBUG_MUTEXES, it was the waiter.
    """
    try:
        task = layout.reader.prog.type("struct task_struct")
        tag: str | None = task.member("blocked_on").type.type.tag
    except LookupError:
        return None
    return tag
