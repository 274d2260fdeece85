# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds wait queues and their waiters (include/linux/wait.h, swait.h).

A waiter is on the stack of its task. It is a node of a ring, together with all other
waiters and the list head of the queue. Only waiters have a pointer to a task (swait.h)
or to a wake function (wait.h) next to the node.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.reader import column
from msatools.kernel.report import LossLog
from msatools.locks.base.lock import Lock, QueuedWaiter
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.ownstack import OwnStack, WaitEntry
from msatools.locks.base.rings import Entry, Rings, Shape
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF
from msatools.tasks.stackmemory import stack_bytes

_LOW_32 = (1 << 32) - 1

_TRIES = 3
"""Maximum number of walks of a ring that changes while it is read."""

_MANY = 256
"""An inconsistent ring is not followed again if it has more nodes than this."""

_Test = Callable[[Entry], bool]


class Queue(Struct, frozen=True):
    """A wait queue."""

    head: int
    """Address of the list head."""

    waiters: tuple[Entry, ...] | None
    """The waiters in order; ``None`` if there are too many to read."""


class QueueKey(Struct, frozen=True):
    """Offsets of the key in a waiter whose queue is a hashed bucket."""

    wait: int
    """Offset of the ``struct wait_queue_entry``."""

    of: int
    """Offset of a pointer to the word or folio that has the bit."""

    bit: int
    """Offset of the number of the bit, an int."""


class WaitQueues:
    """Finds wait queues; follows each once."""

    def __init__(self, layout: Layout, losses: LossLog, limit: int) -> None:
        """
        Set up.

        :param limit: Maximum number of waiters to read of one queue.
        """
        self._layout = layout
        self._losses = losses
        self._limit = limit
        self._rings = Rings(layout, losses)
        self._queues: dict[int, Queue | None] = {}
        """Maps each node of a ring to its queue."""

        self._stacks: dict[int, int] = {}
        """Maps a task to the start of its stack."""

        self.buckets: dict[Lock, int] = {}
        """Maps a lock whose queue is a hashed bucket to the list head of that."""

        self.lookups: set[Lock] = set()
        """Locks whose waiters are woken at the end of a lookup of a dentry."""

    def of_entry(self, entry: WaitEntry) -> Queue | None:
        """Find the queue of a waiter on a stack; ``None`` if it is on no queue."""
        node = entry.address + self._entries.node
        if not self._is_queued(entry):
            return None
        return self._queue(node, self._entries, self._is_entry)

    def _is_queued(self, entry: WaitEntry) -> bool:
        node = entry.address + self._entries.node
        return node in self._queues or self._rings.is_linked(
            node, entry.next, entry.previous
        )

    def of_head(self, head: int) -> Queue | None:
        """Read a wait queue by its list head; ``None`` if it cannot be read."""
        return self._queue(head, self._entries, self._is_entry)

    def of_simple_head(self, head: int) -> Queue | None:
        """Read a simple wait queue by its list head; ``None`` if it cannot be read."""
        return self._queue(head, self._simple, self._is_simple)

    def simple(self, stack: OwnStack) -> Queue | None:
        """Find the simple wait queue (``struct swait_queue_head``) of a task."""
        for start in stack.own("swait_queue", "task"):
            node = start + self._simple.node
            following, previous = stack.word(node), stack.word(node + 8)
            # A node that is on no list points at itself.
            if following is None or previous is None or following == node:
                continue
            if self._rings.is_linked(node, following, previous):
                queue = self._queue(node, self._simple, self._is_simple)
                if queue is not None:
                    return queue
        return None

    def innermost(self, stack: OwnStack) -> tuple[WaitEntry, Queue] | None:
        """Find the innermost waiter on a stack that is queued, and its queue.

        :return: ``None`` also if that queue is not found; outer waiters are not tried.
        """
        for entry in stack.wait_entries():
            if self._is_queued(entry):
                queue = self.of_entry(entry)
                return None if queue is None else (entry, queue)
        return None

    def head_of(self, entry: WaitEntry) -> tuple[int, int | None] | None:
        """
        Find the ``struct wait_queue_head`` that a waiter is on.

        :return: Its address, and the number of waiters, which is ``None`` if there are
            too many to read. ``None`` if not found.
        """
        queue = self.of_entry(entry)
        if queue is None:
            return None
        address = queue.head - self._layout.offset("wait_queue_head", "head")
        return address, None if queue.waiters is None else len(queue.waiters)

    def tasks(self, waiters: Iterable[Entry]) -> list[QueuedWaiter]:
        """Return the tasks of waiters, in order.

        The ``private`` of an entry may point at a task, or at data of a poll. It is a
        task if the entry is on its stack.
        """
        return [
            QueuedWaiter(waiter.task)
            for waiter in waiters
            if waiter.task is not None and self.is_on_stack(waiter.node, waiter.task)
        ]

    def is_on_stack(self, address: int, task: int) -> bool:
        """Return whether an address is on the stack of a task.

        :param task: What may be the address of a ``struct task_struct``.
        """
        if task not in self._stacks:
            try:
                stack = self._layout.member(task, "task_struct", "stack")
            except UNREADABLE:
                stack = 0
            self._stacks[task] = stack
        stack = self._stacks[task]
        return stack >= KERNEL_HALF and stack <= address < stack + self.stack_bytes

    def bucket(
        self, lock: Lock, key: QueueKey, functions: Iterable[int | None]
    ) -> list[QueuedWaiter] | None:
        """
        Return the waiters of a lock whose queue is a hashed bucket, in order.

        :param functions: Wake functions of waiters that have such a key.
        :return: ``None`` if the bucket is unknown, too long, or cannot be read.
        """
        head = self.buckets.get(lock)
        queue = self.of_head(head) if head else None
        if queue is None or queue.waiters is None:
            return None
        kinds = {function & _LOW_32 for function in functions if function}
        waiters = [waiter for waiter in queue.waiters if waiter.kind in kinds]
        nodes = np.array([waiter.node for waiter in waiters], np.uint64)
        starts = nodes - np.uint64(key.wait + self._entries.node)
        reader = self._layout.reader
        records, readable = reader.read_records(starts, max(key.of + 8, key.bit + 4))
        bit = lock.key if isinstance(lock.key, int) else 0
        same = readable & (column(records, key.of) == np.uint64(lock.address or 0))
        same &= column(records, key.bit, 4) == np.uint64(bit & _LOW_32)
        return self.tasks(waiters[row] for row in np.flatnonzero(same).tolist())

    @cached_property
    def stack_bytes(self) -> int:
        """The size of a kernel stack."""
        return stack_bytes(self._layout.reader.prog)

    @cached_property
    def _entries(self) -> Shape:
        return Shape.of(self._layout, "wait_queue_entry", "entry", "private", "func")

    @cached_property
    def _simple(self) -> Shape:
        return Shape.of(self._layout, "swait_queue", "task_list", "task")

    def _is_entry(self, entry: Entry) -> bool:
        return self._layout.is_low_code(entry.kind)

    def _is_simple(self, entry: Entry) -> bool:
        task = entry.task or 0
        return task >= KERNEL_HALF and self.is_on_stack(entry.node, task)

    def _queue(self, node: int, shape: Shape, is_waiter: _Test) -> Queue | None:
        if node not in self._queues:
            queue, nodes = self._find(node, shape, is_waiter)
            self._queues.update(dict.fromkeys(nodes, queue))
        return self._queues[node]

    def _find(
        self, node: int, shape: Shape, is_waiter: _Test
    ) -> tuple[Queue | None, set[int]]:
        """Follow a ring; return its queue, and the nodes to store that for."""
        for _ in range(_TRIES):
            ring = self._rings.follow(node, shape, self._limit)
            if ring.whole or ring.cut:
                break
        else:
            self._losses.lose(Loss.WAITERS, "cannot read a queue of waiters")
            return None, ring.nodes if len(ring.entries) > _MANY else {node}
        heads = [entry.node for entry in ring.entries if not is_waiter(entry)]
        if ring.whole and len(heads) == 1:
            return Queue(heads[0], tuple(ring.after(heads[0]))), ring.nodes
        if len(heads) > 1:
            # Only the list head is no waiter, so this ring is of another kind.
            return None, {node}
        if heads:
            self._rings.note_cut(self._limit)
            return Queue(heads[0], None), {node}
        if ring.cut:
            self._losses.note(
                "lock-not-found",
                f"more than {self._limit} wait for one lock, which is left out; a "
                "report of all tasks finds it",
            )
        return None, {node}


@per_context
def wait_queues(context: LockContext) -> WaitQueues:
    """Return the finder of wait queues of a context."""
    return WaitQueues(context.layout, context.losses, context.limit)
