# SPDX-License-Identifier: LGPL-2.1-or-later

"""Queues that tasks wait on until somebody wakes them: who is queued, and on what.

A waiter lies on the stack of who waits, on a ring with all that wait with it. The
queue's own head is on that ring, too: the one node with a spinlock where waiters name
their task (swait.h) or what wakes them (wait.h).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import drgn
import numpy as np

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

_TEXT = 0x8000_0000
_END_OF_TEXT = 0xFF00_0000
"""The low half of where code begins, and of where that of modules ends (x86-64)."""

_HALF = (1 << 32) - 1

_TRIES = 3
"""Walks of a ring that changes meanwhile."""

_MANY = 256
"""On a ring that is not followed again."""

_Test = Callable[[Entry], bool]


@dataclass(frozen=True)
class Queue:
    """A queue as it was seen."""

    head: int
    """The list head."""

    waiters: tuple[Entry, ...] | None
    """In order; ``None`` if there are more than may be read."""


@dataclass(frozen=True)
class QueueKey:
    """Where an entry that shares its queue with others says what it waits for."""

    wait: int
    """The ``struct wait_queue_entry``."""

    of: int
    """A pointer to what has the bit."""

    bit: int
    """The bit's number, an int."""


class WaitQueues:
    """Finds queues; each is followed once."""

    def __init__(self, layout: Layout, losses: LossLog, limit: int) -> None:
        """
        Set up.

        :param limit: How many waiters of one queue are read.
        """
        self._layout = layout
        self._losses = losses
        self._limit = limit
        self._rings = Rings(layout, losses)
        self._queues: dict[int, Queue | None] = {}
        """By the nodes of a ring that was followed."""

        self._stacks: dict[int, int] = {}
        self.buckets: dict[Lock, int] = {}
        """Of locks whose waiters are on a queue that others share: its head."""

        self.lookups: set[Lock] = set()
        """Those of which it was seen that who looks up a name wakes them."""

    def of_entry(self, entry: WaitEntry) -> Queue | None:
        """Find the queue that a waiter on a stack is on; ``None`` if on none."""
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
        """Follow a queue from its list head on; ``None`` if it is lost."""
        return self._queue(head, self._entries, self._is_entry)

    def of_simple_head(self, head: int) -> Queue | None:
        """Follow a simple queue from its list head on; ``None`` if it is lost."""
        return self._queue(head, self._simple, self._is_simple)

    def simple(self, stack: OwnStack) -> Queue | None:
        """Find the simple queue (``struct swait_queue_head``) that a task is on."""
        for start in stack.own("swait_queue", "task"):
            node = start + self._simple.node
            following, before = stack.word(node), stack.word(node + 8)
            # One that is on no queue points at itself.
            if following is None or before is None or following == node:
                continue
            if self._rings.is_linked(node, following, before):
                found = self._queue(node, self._simple, self._is_simple)
                if found is not None:
                    return found
        return None

    def innermost(self, stack: OwnStack) -> tuple[WaitEntry, Queue] | None:
        """Find what a task waits on that it has queued for last.

        If its queue is not to be found, what it has queued for before does not count.
        """
        for entry in stack.wait_entries():
            if self._is_queued(entry):
                found = self.of_entry(entry)
                return None if found is None else (entry, found)
        return None

    def head_of(self, entry: WaitEntry) -> tuple[int, int | None] | None:
        """
        Find the ``struct wait_queue_head`` that a waiter is on, and how many are.

        ``None`` if it is not found. The count is ``None`` if there are more than
        may be looked at.
        """
        found = self.of_entry(entry)
        if found is None:
            return None
        address = found.head - self._layout.offset("wait_queue_head", "head")
        return address, None if found.waiters is None else len(found.waiters)

    def tasks(self, waiters: Iterable[Entry]) -> list[QueuedWaiter]:
        """Return the tasks of waiters, in their order.

        What an entry keeps may be a task, or belong to whoever polls: it is a task if
        the entry lies on its stack.
        """
        return [
            QueuedWaiter(waiter.task)
            for waiter in waiters
            if waiter.task is not None and self.is_on_stack(waiter.node, waiter.task)
        ]

    def is_on_stack(self, address: int, task: int) -> bool:
        """Return whether an address is on the stack of a task, if it is a task."""
        if task not in self._stacks:
            try:
                stack = self._layout.member(task, "task_struct", "stack")
            except drgn.FaultError:
                stack = 0
            self._stacks[task] = stack
        stack = self._stacks[task]
        return stack >= KERNEL_HALF and stack <= address < stack + self.stack_bytes

    def bucket(
        self, lock: Lock, key: QueueKey, functions: Iterable[int | None]
    ) -> list[QueuedWaiter] | None:
        """
        Return the waiters of a lock whose queue others share, in order.

        :param functions: What wakes those that have such a key.
        :return: ``None`` if the queue is not known, too long, or lost.
        """
        head = self.buckets.get(lock)
        found = self.of_head(head) if head else None
        if found is None or found.waiters is None:
            return None
        kinds = {function & _HALF for function in functions if function}
        waiters = [waiter for waiter in found.waiters if waiter.kind in kinds]
        nodes = np.array([waiter.node for waiter in waiters], np.uint64)
        starts = nodes - np.uint64(key.wait + self._entries.node)
        reader = self._layout.reader
        records, readable = reader.read_records(starts, max(key.of + 8, key.bit + 4))
        bit = lock.key if isinstance(lock.key, int) else 0
        alike = readable & (column(records, key.of) == np.uint64(lock.address or 0))
        alike &= column(records, key.bit, 4) == np.uint64(bit & _HALF)
        return self.tasks(waiters[row] for row in np.flatnonzero(alike).tolist())

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
        return _TEXT <= entry.kind < _END_OF_TEXT

    def _is_simple(self, entry: Entry) -> bool:
        task = entry.task or 0
        return task >= KERNEL_HALF and self.is_on_stack(entry.node, task)

    def _queue(self, node: int, shape: Shape, waits: _Test) -> Queue | None:
        if node not in self._queues:
            found, nodes = self._find(node, shape, waits)
            self._queues.update(dict.fromkeys(nodes, found))
        return self._queues[node]

    def _find(
        self, node: int, shape: Shape, waits: _Test
    ) -> tuple[Queue | None, set[int]]:
        """Follow a ring; tell its queue, and of which nodes that is the queue."""
        for _ in range(_TRIES):
            ring = self._rings.follow(node, shape, self._limit)
            if ring.whole or ring.cut:
                break
        else:
            self._losses.lose(Loss.WAITERS, "a queue of waiters is lost")
            return None, ring.nodes if len(ring.entries) > _MANY else {node}
        heads = [entry.node for entry in ring.entries if not waits(entry)]
        if ring.whole and len(heads) == 1:
            return Queue(heads[0], tuple(ring.after(heads[0]))), ring.nodes
        if len(heads) > 1:
            # Of one kind all but the head are waiters: it is another kind.
            return None, {node}
        if heads:
            self._rings.note_cut(self._limit)
            return Queue(heads[0], None), {node}
        if ring.cut:
            self._losses.note(
                "lock-not-found",
                f"more than {self._limit} wait for one lock, which is not told; a look "
                "at all tasks tells it",
            )
        return None, {node}


@per_context
def wait_queues(context: LockContext) -> WaitQueues:
    """Return the finder of the wait queues that tasks of a context are on."""
    return WaitQueues(context.layout, context.losses, context.limit)
