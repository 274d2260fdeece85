# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waiters of an ``rt_mutex``, in the order in which they will get it.

kernel/locking/rtmutex.c: waiters lie on their own stacks, in a red-black tree by
priority; of those that are as urgent as each other the first to come is first.
"""

import struct
from dataclasses import dataclass

import drgn

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

_MAX_WAITERS = 1 << 22
"""Of one lock: all tasks that there can be."""

_WORD = struct.Struct("<Q")


@dataclass(frozen=True)
class RtMutex:
    """The owner and the waiters of an ``rt_mutex``."""

    owner: int
    """The ``struct task_struct`` that has it; 0 if none has, or is to have it."""

    waiters: tuple[int, ...] | None
    """Tasks, the first to have it first; ``None`` if they are lost."""


class RtMutexes:
    """Reads such locks of one kernel.

    :raises LookupError: if the types are unknown
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
        """Read the lock at an address.

        :param lock: Of its ``struct rt_mutex_base``, or older ``struct rt_mutex``.
        :raises drgn.FaultError: if it cannot be read
        """
        owner, root = self._layout.members(
            lock, self._type, "owner", "waiters.rb_root.rb_node"
        )
        try:
            waiters: tuple[int, ...] | None = tuple(self._in_order(lock, root))
        except drgn.FaultError as error:
            self._losses.lose(
                Loss.WAITERS, f"waiters for an rt_mutex are lost: {error}"
            )
            waiters = None
        # Its last bit says that somebody waits.
        return RtMutex(owner & ~1, waiters)

    def _in_order(self, lock: int, root: int) -> list[int]:
        """Read a tree from left to right.

        :raises drgn.FaultError: if it is damaged, or has changed meanwhile
        """
        tasks: list[int] = []
        above: list[tuple[int, int]] = []
        node, seen = root, 0
        while node or above:
            if node:
                seen += 1
                if node < KERNEL_HALF or seen > _MAX_WAITERS:
                    raise drgn.FaultError("no tree of waiters", node)
                data = self._layout.reader.read(node - self._node, self._size)
                task, own, left, right = (
                    _WORD.unpack_from(data, offset)[0]
                    for offset in (
                        self._task,
                        self._lock,
                        self._node + self._left,
                        self._node + self._right,
                    )
                )
                if own != lock:
                    raise drgn.FaultError("a waiter for another lock", node)
                above.append((task, right))
                node = left
            else:
                task, node = above.pop()
                tasks.append(task)
        return tasks


def _has_base(layout: Layout) -> bool:
    return layout.has("rt_mutex_base", "owner")
