# SPDX-License-Identifier: LGPL-2.1-or-later

"""The description of a lock type that has a list of waiters.

:mod:`msatools.locks.sleeping.list_locks` has all such types. Members of a lock that
have to be consistent are read at once: on a running kernel they may change between two
reads.
"""

from collections.abc import Callable, Mapping

from msgspec import Struct

from msatools.locks.base.lock import LockTypeName
from msatools.locks.base.model import Mode
from msatools.locks.base.rings import Shape
from msatools.locks.base.struct_reader import Layout

TASK = (1 << 64) - 1 & ~0b111
"""Mask of the task in the owner of a mutex or a rwsem; the low bits are flags
(``MUTEX_FLAGS``, ``RWSEM_OWNER_FLAGS_MASK``). "rwsem: Remove reader optimistic
spinning" (in v5.11) left two of the three flags of a rwsem."""


def _unknown(layout: Layout, lock: int) -> int | None:
    return None


class ListLock(Struct, frozen=True, kw_only=True):
    """A type of locks that have a list of waiters.

    The functions take the address of a lock. They raise ``drgn.FaultError`` if it
    cannot be read, and ``MissingError`` if its type is unknown.
    """

    name: LockTypeName
    struct: str
    """Tag of the structure of the lock."""

    head: str = "wait_list"
    """Member of the structure that is the list head."""

    waiter: str
    """Tag of the structure of a waiter, which is on the stack of the waiting task."""

    slow_paths: Mapping[str, Mode | None]
    """Maps the start of the names of functions that wait to the mode of the request."""

    blockers: Mapping[int, Mode | None]
    """Maps the type bits of ``task_struct.blocker`` to the mode of the request:
    include/linux/hung_task.h (v6.16)."""

    kind: str = ""
    """Member of a waiter that identifies the mode of its request; empty if there is
    only one mode."""

    modes: tuple[Mode | None, ...] = (None,)
    """The modes, indexed by the value of that member."""

    has_waiters: Callable[[Layout, int], bool]
    """Return whether the state of a lock shows that it has waiters. This rejects
    addresses that are not those of a lock."""

    owner: Callable[[Layout, int], int | None] = _unknown
    """Return the address of the owner's ``struct task_struct``, if the lock records it
    exactly."""

    last_owner: Callable[[Layout, int], int | None] = _unknown
    """Return the task that took the lock last, if the lock is held. That task may have
    released it since, or have exited."""

    readers: Callable[[Layout, int], int | None] = _unknown
    """Return the number of readers; ``None`` if the lock does not count them."""

    def shape(self, layout: Layout) -> Shape:
        """Return the layout of a waiter.

        :raises MissingError: if it is unknown
        """
        return Shape.of(layout, self.waiter, "list", "task", self.kind)
