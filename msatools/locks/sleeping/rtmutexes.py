# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads the owner and the waiters of an ``rt_mutex``.

kernel/locking/rtmutex.c: a waiter is on the stack of its task, in a red-black tree that
is sorted by real-time priority. Ordinary tasks count as equal, whatever their nice
value; equals are in order of arrival.
"""

from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.words import U64
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

_MAX_WAITERS = 1 << 22
"""Maximum number of waiters of one lock: as many as there can be tasks."""


class RtMutex(Struct, frozen=True):
    """The owner and the waiters of an ``rt_mutex``."""

    owner: int
    """Address of the owner's ``struct task_struct``; 0 if there is no owner."""

    waiters: tuple[int, ...] | None
    """Addresses of the waiting tasks, the most urgent first; ``None`` if they could
    not be read."""


class RtMutexes:
    """Reads ``rt_mutex`` locks of one kernel.

    :raises MissingError: if the types are unknown
    """

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses
        # "locking/rtmutex: Split out the inner parts of 'struct rtmutex'" (in v5.15)
        self._type = "rt_mutex_base" if _has_base(layout) else "rt_mutex"
        # "locking/rtmutex: Fix task->pi_waiters integrity" (in v6.5)
        self._node = layout.offset("rt_mutex_waiter", "tree.entry", "tree_entry")
        self._task = layout.offset("rt_mutex_waiter", "task")
        self._lock = layout.offset("rt_mutex_waiter", "lock")
        self._right = layout.offset("rb_node", "rb_right")
        self._left = layout.offset("rb_node", "rb_left")
        self._size = layout.size("rt_mutex_waiter")

    def read(self, lock: int) -> RtMutex:
        """Read a lock.

        :param lock: Address of a ``struct rt_mutex_base``; before v5.15 of a
            ``struct rt_mutex``.
        :raises drgn.FaultError: if the lock cannot be read
        """
        owner, root = self._layout.members(
            lock, self._type, "owner", "waiters.rb_root.rb_node"
        )
        try:
            waiters: tuple[int, ...] | None = tuple(self._in_order(lock, root))
        except UNREADABLE as error:
            self._losses.lose(
                Loss.WAITERS, f"cannot read waiters for an rt_mutex: {error}"
            )
            waiters = None
        # Bit 0 is RT_MUTEX_HAS_WAITERS.
        return RtMutex(owner & ~1, waiters)

    def _in_order(self, lock: int, root: int) -> list[int]:
        """Return the tasks of a tree of waiters, in order.

        :raises UNREADABLE: if the tree is damaged, or changed while it was read
        """
        tasks: list[int] = []
        parents: list[tuple[int, int]] = []
        node, count = root, 0
        while node or parents:
            if node:
                count += 1
                if node < KERNEL_HALF or count > _MAX_WAITERS:
                    raise DamagedDataError("no tree of waiters", node)
                data = self._layout.reader.read(node - self._node, self._size)
                task, waited_for, left, right = (
                    U64.unpack_from(data, offset)[0]
                    for offset in (
                        self._task,
                        self._lock,
                        self._node + self._left,
                        self._node + self._right,
                    )
                )
                if waited_for != lock:
                    raise DamagedDataError("a waiter for another lock", node)
                parents.append((task, right))
                node = left
            else:
                task, node = parents.pop()
                tasks.append(task)
        return tasks


def _has_base(layout: Layout) -> bool:
    return layout.has("rt_mutex_base", "owner")
