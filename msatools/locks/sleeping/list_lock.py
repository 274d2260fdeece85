# SPDX-License-Identifier: LGPL-2.1-or-later

"""The protocol of a type of locks with a list of waiters.

:mod:`msatools.locks.sleeping.list_locks` lists them. Words of a lock that have to agree
come with one read: on a running kernel they may change from one read to the next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msatools.locks.base.lock import LockTypeName
from msatools.locks.base.model import Mode
from msatools.locks.base.rings import Shape
from msatools.locks.base.struct_reader import Layout

TASK = (1 << 64) - 1 & ~0b111
"""The owner of a mutex or a rwsem, which flags lie below (``MUTEX_FLAGS``,
``RWSEM_OWNER_FLAGS_MASK``). "rwsem: Remove reader optimistic spinning" (in v5.11) left
two of a rwsem's three."""


def _nothing(layout: Layout, lock: int) -> int | None:
    return None


@dataclass(frozen=True, kw_only=True)
class ListLock:
    """A type of locks that have a list of waiters.

    Its functions read a lock at an address; they raise ``drgn.FaultError`` if it cannot
    be read, and ``LookupError`` if the type is unknown.
    """

    name: LockTypeName
    struct: str
    """Its structure."""

    head: str = "wait_list"
    """The member of it that is the head of the list."""

    waiter: str
    """The structure of a waiter, on the stack of the task that waits."""

    slow_paths: Mapping[str, Mode | None]
    """How the functions begin in which tasks wait, and how they want the lock there."""

    blockers: Mapping[int, Mode | None]
    """The same by the last bits of ``task_struct.blocker``: include/linux/hung_task.h
    (v6.16)."""

    kind: str = ""
    """The member of a waiter that says how it wants the lock."""

    modes: tuple[Mode | None, ...] = (None,)
    """By the value of that member."""

    has_waiters: Callable[[Layout, int], bool]
    """Tell whether the words of a lock agree that somebody waits for it; it keeps what
    is no lock from being told as one."""

    owner: Callable[[Layout, int], int | None] = _nothing
    """Read who has a lock, where it tells exactly: the ``struct task_struct``."""

    last_owner: Callable[[Layout, int], int | None] = _nothing
    """Read who took a lock last that somebody has, if that task may be gone since."""

    readers: Callable[[Layout, int], int | None] = _nothing
    """Count who has a lock for reading; ``None`` if it does not count them alone."""

    def shape(self, layout: Layout) -> Shape:
        """Return where the members of its waiters are.

        :raises LookupError: if they are unknown
        """
        return Shape.of(layout, self.waiter, "list", "task", self.kind)
