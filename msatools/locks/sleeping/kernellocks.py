# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the kernel lock that a task sleeps for, and its other waiters.

kernel/locking: a waiter is on the stack of its task. It is a node of the ring of all
waiters for the lock. Up to v7.0 the list head in the lock is a node of that ring, too;
since v7.1 the lock points at its first waiter instead.
"""

from functools import cached_property
from itertools import islice

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.report import LossLog
from msatools.locks.base.lock import (
    Holder,
    Lock,
    LockTypeName,
    OwnerConfidence,
    QueuedWaiter,
    Request,
)
from msatools.locks.base.lock_context import MAX_WAITERS, LockContext, per_context
from msatools.locks.base.model import Mode
from msatools.locks.base.ownstack import OwnStack
from msatools.locks.base.rings import Entry, Ring, Rings, Shape, may_be_task
from msatools.locks.base.struct_reader import Layout
from msatools.locks.sleeping.list_lock import ListLock
from msatools.locks.sleeping.list_locks import (
    FIRST,
    LIST_LOCKS,
    Record,
    Sought,
    blocked_on_type,
    sought_by,
)
from msatools.locks.sleeping.rtmutexes import RtMutex, RtMutexes
from msatools.target.addresses import KERNEL_HALF

MAX_WORDS = 96
"""Maximum number of words of a stack that are tried as the address of a lock."""

_TRIES = 3
"""Maximum number of further walks of a ring that changes while it is read."""

_MANY = 256
"""A ring without a known lock is not followed again if it has more nodes than this."""


class KernelLock(Struct, frozen=True):
    """A lock that a task waits for."""

    type: LockTypeName

    address: int | None
    """Address of the lock; ``None`` if not found."""

    mode: Mode | None
    """The mode that this task waits for."""

    waiters: int | None
    """Number of waiters, this task included; ``None`` if not all were read."""

    owner: int | None
    """Address of the owner's ``struct task_struct``, only if the lock records it."""

    @property
    def request(self) -> Request | None:
        """The request of the task; ``None`` if the lock is not found."""
        if self.address is None:
            return None
        return Request(Lock(self.type, self.address), self.mode)


class KernelLocks:
    """Finds locks; follows each ring of waiters once."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses
        self._rings = Rings(layout, losses)
        self._locks: dict[int, int] = {}
        """Maps each node of a ring to the address of its lock."""

        self._without_lock: set[int] = set()
        """Nodes of long rings whose lock was not found."""

        self.queues: dict[tuple[LockTypeName, int], list[QueuedWaiter] | None] = {}
        """Maps the type and address of a lock to its waiters."""

        self._queued_tasks: dict[tuple[LockTypeName, int], frozenset[int]] = {}
        self._rt_mutexes: dict[int, RtMutex] = {}

    def find(
        self,
        names: tuple[str, ...],
        stack: OwnStack,
        limit: int = MAX_WAITERS,
        record: Record | None = None,
    ) -> KernelLock | None:
        """
        Find the lock that a task waits for; ``None`` if it waits for no such lock.

        A lock that *record* names is preferred if the task is in its queue.

        :param names: Functions on the stack, innermost first.
        :param limit: Maximum number of other waiters to read.
        """
        sought = sought_by(names)
        if sought is None:
            return None
        record = record or Record()
        address = self._recorded(sought, stack.task, limit, record)
        if address is None:
            address = self._find_by_waiter(sought, stack, limit, record)
        if address is None:
            return KernelLock(sought.lock.name, None, sought.mode, None, None)
        queue = self.queue(sought.lock.name, address, limit)
        waiters = None if queue is None else len(queue)
        owner = self._owner(sought.lock, address)
        return KernelLock(sought.lock.name, address, sought.mode, waiters, owner)

    def queue(
        self, type_: LockTypeName, address: int, limit: int = MAX_WAITERS
    ) -> list[QueuedWaiter] | None:
        """
        Return the waiters of a lock, in the order of its list.

        :param limit: Maximum number of waiters.
        :return: ``None`` if there are more, the list cannot be read, or its layout is
            unknown.
        """
        key = (type_, address)
        if key not in self.queues:
            self.queues[key] = self._read_queue(LIST_LOCKS[type_], address, limit)
        return self.queues[key]

    def is_queued(self, type_: LockTypeName, address: int, task: int) -> bool | None:
        """Return whether a task is in the queue of a lock.

        :return: ``None`` if the queue was not or could not be read.
        """
        key = (type_, address)
        queue = self.queues.get(key)
        if queue is None:
            return None
        if key not in self._queued_tasks:
            self._queued_tasks[key] = frozenset(waiter.task for waiter in queue)
        return task in self._queued_tasks[key]

    def rt_mutex(self, address: int) -> RtMutex:
        """
        Read an ``rt_mutex``, once.

        :param address: Address of a ``struct rt_mutex_base``; before v5.15 of a
            ``struct rt_mutex``.
        :raises drgn.FaultError: if it cannot be read
        :raises MissingError: if the types are unknown
        """
        if address not in self._rt_mutexes:
            self._rt_mutexes[address] = self._rt_reader.read(address)
        return self._rt_mutexes[address]

    @cached_property
    def _rt_reader(self) -> RtMutexes:
        return RtMutexes(self._layout, self._losses)

    def _recorded(
        self, sought: Sought, task: int, limit: int, record: Record
    ) -> int | None:
        """Return the lock that a record names, unless its queue lacks the task.

        If the queue cannot be read, the record is trusted.
        """
        for address in record.locks(sought, self._blocked_on):
            self.queue(sought.lock.name, address, limit)
            if self.is_queued(sought.lock.name, address, task) is not False:
                return address
        return None

    @cached_property
    def _blocked_on(self) -> str | None:
        return blocked_on_type(self._layout)

    def _find_by_waiter(
        self, sought: Sought, stack: OwnStack, limit: int, record: Record
    ) -> int | None:
        """Find the lock of the ring that a waiter on the task's stack is on."""
        lock = sought.lock
        struct, member = lock.struct, lock.head
        on_ring = self._layout.has(struct, member)
        if not (on_ring or self._layout.has(struct, FIRST)):
            return None
        shape = lock.shape(self._layout)
        starts = list(stack.own(lock.waiter, "task"))
        if self._blocked_on == lock.waiter and record.blocked_on in starts:
            starts = [record.blocked_on]
        for start in starts:
            entry = _entry_on(stack, start, shape)
            if entry is None:
                continue
            if entry.node in self._locks:
                return self._locks[entry.node]
            if entry.node in self._without_lock:
                continue
            # A node that points at itself is on no list. Where the list head is in the
            # waiters' ring, no waiter does that.
            if on_ring and entry.next == entry.node:
                continue
            ring = self._follow(entry.node, shape, limit, entry)
            address = self._lock_of_ring(lock, ring, stack, shape)
            if address is not None:
                return address
            if ring.cut:
                self._note_not_found(limit)
            elif len(ring.entries) > _MANY:
                self._without_lock |= ring.nodes
        return None

    def _follow(
        self, node: int, shape: Shape, limit: int, first: Entry | None = None
    ) -> Ring:
        ring = self._rings.follow(node, shape, limit, first)
        for _ in range(_TRIES):
            # If no neighbour points back at it, *first* is no list node.
            if ring.whole or ring.cut or (first and len(ring.entries) == 1):
                break
            ring = self._rings.follow(node, shape, limit)
        return ring

    def _lock_of_ring(
        self, lock: ListLock, ring: Ring, stack: OwnStack, shape: Shape
    ) -> int | None:
        """Find the lock of a ring of waiters, and store its queue."""
        struct, member = lock.struct, lock.head
        order = None
        if self._layout.has(struct, member):
            head_offset = self._layout.offset(struct, member)
            head = self._find_head(lock, ring, stack, head_offset)
            if head is None:
                return None
            address = head - head_offset
            order = ring.after(head) if ring.whole else None
        else:
            pointing = self._find_pointing(lock, ring, stack, shape)
            if pointing is None:
                return None
            address, first = pointing
            order = ring.begin(first) if ring.whole else None
        if order is not None:
            self.queues[lock.name, address] = self._queued(lock, order)
        self._locks.update((entry.node, address) for entry in ring.entries)
        return address

    def _find_head(
        self, lock: ListLock, ring: Ring, stack: OwnStack, head_offset: int
    ) -> int | None:
        """Find the node that is the list head in the lock.

        A waiter has a pointer to a task. What follows a lock in memory may look like
        one, too; but the stack usually has a pointer to the lock, as an argument of the
        function that takes it.
        """
        known = known_to(stack)
        others = ring.entries[1:]
        pointed = [entry.node for entry in others if entry.node - head_offset in known]
        no_waiters = [entry.node for entry in others if not may_be_task(entry.task)]
        both = [node for node in pointed if node in no_waiters]
        for heads in (both, pointed, no_waiters if ring.whole else []):
            if len(heads) == 1:
                agrees = self._has_waiters(lock, heads[0] - head_offset)
                return heads[0] if agrees else None
        return None

    def _find_pointing(
        self, lock: ListLock, ring: Ring, stack: OwnStack, shape: Shape
    ) -> tuple[int, int] | None:
        """Find the only lock whose address is on the stack and that points at a waiter.

        :return: Address of the lock, and the node of its first waiter.
        """
        nodes = ring.nodes
        locks: list[tuple[int, int]] = []
        candidates = (
            word for word in known_to(stack) if word + shape.node not in nodes
        )
        for address in islice(candidates, MAX_WORDS):
            try:
                first = self._layout.member(address, lock.struct, FIRST) + shape.node
            except UNREADABLE:
                continue
            if first in nodes and self._has_waiters(lock, address):
                locks.append((address, first))
        return locks[0] if len(locks) == 1 else None

    def _read_queue(
        self, lock: ListLock, address: int, limit: int
    ) -> list[QueuedWaiter] | None:
        struct, member = lock.struct, lock.head
        on_ring = self._layout.has(struct, member)
        if not (on_ring or self._layout.has(struct, FIRST)):
            return None
        shape = lock.shape(self._layout)
        if on_ring:
            head = address + self._layout.offset(struct, member)
            entries = self._rings.walk(head, shape, limit)
        else:
            entries = self._read_ring(address, struct, shape, limit)
        return None if entries is None else self._queued(lock, entries)

    def _read_ring(
        self, lock: int, struct: str, shape: Shape, limit: int
    ) -> list[Entry] | None:
        try:
            first = self._layout.member(lock, struct, FIRST)
        except UNREADABLE as error:
            self._losses.lose(Loss.WAITERS, f"cannot read a lock: {error}")
            return None
        if not first:
            return []
        ring = self._follow(first + shape.node, shape, limit)
        if ring.cut:
            self._rings.note_cut(limit)
        elif not ring.whole:
            self._losses.lose(Loss.WAITERS, "a ring of waiters changed, or is damaged")
        return ring.entries if ring.whole else None

    def _queued(
        self, lock: ListLock, entries: list[Entry]
    ) -> list[QueuedWaiter] | None:
        queue = []
        for entry in entries:
            task = entry.task or 0
            if not may_be_task(task) or entry.kind >= len(lock.modes):
                self._losses.lose(Loss.WAITERS, "a list of waiters has a damaged entry")
                return None
            queue.append(QueuedWaiter(task, lock.modes[entry.kind]))
        return queue

    def _has_waiters(self, lock: ListLock, address: int) -> bool:
        try:
            return lock.has_waiters(self._layout, address)
        except UNREADABLE:
            return False

    def _owner(self, lock: ListLock, address: int) -> int | None:
        try:
            return lock.owner(self._layout, address)
        except LOST:
            return None

    def _note_not_found(self, limit: int) -> None:
        self._losses.note(
            "lock-not-found",
            f"more than {limit} wait for one lock, which is left out; a "
            "report of all tasks finds it",
        )


def _entry_on(stack: OwnStack, start: int, shape: Shape) -> Entry | None:
    """Return the waiter at an address on a task's stack; ``None`` if there is none."""
    node = start + shape.node
    following, previous = stack.word(node), stack.word(node + 8)
    kind = 0 if shape.kind is None else stack.half(node + shape.kind)
    if following is None or previous is None or kind is None:
        return None
    if min(following, previous) < KERNEL_HALF or (following | previous) % 8:
        return None
    return Entry(node, following, previous, stack.task, kind)


def known_to(stack: OwnStack) -> dict[int, None]:
    """Return the kernel addresses on a stack, innermost first, as the keys of a dict.

    Addresses of variables are included, those on the stack itself are not.
    """
    words = stack.words[stack.words >= np.uint64(KERNEL_HALF)].tolist()
    return {word: None for word in words if word not in stack}


@per_context
def kernel_locks(context: LockContext) -> KernelLocks:
    """Return the finder of the locks that tasks of a context wait for."""
    return KernelLocks(context.layout, context.losses)


def holders_at(
    context: LockContext, task: int | None, confidence: OwnerConfidence
) -> list[Holder]:
    """Return the task that a lock points at as its holder; empty if it is no task.

    :raises drgn.FaultError: if the task cannot be read
    """
    if task is None or not may_be_task(task):
        return []
    if confidence == "exact":
        pid = context.pid(task)
        if pid is None or not 0 < pid <= PID_MAX_LIMIT:
            return []
    return [Holder(task, confidence)]
