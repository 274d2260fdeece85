# SPDX-License-Identifier: LGPL-2.1-or-later

"""The sleeping lock of the kernel that a task waits for, and its other waiters.

kernel/locking: a waiter lies on the stack of who waits, on a ring of all that wait for
the lock, in which the lock's own list head is the one node that is no waiter; newer
locks are not on the ring, but point at its first waiter.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import drgn
import numpy as np

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
"""Of a stack, that are tried for the address of a lock."""

_TRIES = 3
"""More walks of a ring that changes meanwhile."""

_MANY = 256
"""On a ring that is not followed again."""


@dataclass(frozen=True)
class KernelLock:
    """A lock that a task waits for."""

    type: LockTypeName

    address: int | None
    """``None`` if it is not found."""

    mode: Mode | None
    """How this task wants it."""

    waiters: int | None
    """How many wait, this one included; ``None`` if they were not all seen."""

    owner: int | None
    """The ``struct task_struct`` that has it, only if the lock tells exactly."""

    @property
    def request(self) -> Request | None:
        """What the task waits for; ``None`` if it is not found."""
        if self.address is None:
            return None
        return Request(Lock(self.type, self.address), self.mode)


class KernelLocks:
    """Finds locks; a ring of waiters is followed once."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses
        self._rings = Rings(layout, losses)
        self._locks: dict[int, int] = {}
        """The address of the lock by each node of its ring."""

        self._lost: set[int] = set()
        """Nodes of long rings of which the lock was not found."""

        self.queues: dict[tuple[LockTypeName, int], list[QueuedWaiter] | None] = {}
        """Who waits for locks whose queues were read, by type and address."""

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
        Find the lock that a task waits for; ``None`` if no such lock is waited for.

        What the task's own record says goes first, where the lock's queue agrees.

        :param names: The functions on its stack, innermost first.
        :param limit: How many other waiters are read.
        """
        sought = sought_by(names)
        if sought is None:
            return None
        record = record or Record()
        address = self._recorded(sought, stack.task, limit, record)
        if address is None:
            address = self._by_waiter(sought, stack, limit, record)
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

        :param limit: How many at most.
        :return: ``None`` if there are more, if it is lost, or if the lock keeps no list
            that is known.
        """
        key = (type_, address)
        if key not in self.queues:
            self.queues[key] = self._read_queue(LIST_LOCKS[type_], address, limit)
        return self.queues[key]

    def is_queued(self, type_: LockTypeName, address: int, task: int) -> bool | None:
        """Return whether a task waits for a lock whose queue was read.

        :return: ``None`` if it is not known who does.
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

        :param address: Of its ``struct rt_mutex_base``, or older ``struct rt_mutex``.
        :raises drgn.FaultError: if it cannot be read
        :raises LookupError: if the types are unknown
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
        """Take the lock that a task's record names, if that lock's queue has the task.

        Where the queue cannot be seen, the record is enough.
        """
        for address in record.locks(sought, self._blocked_on):
            self.queue(sought.lock.name, address, limit)
            if self.is_queued(sought.lock.name, address, task) is not False:
                return address
        return None

    @cached_property
    def _blocked_on(self) -> str | None:
        return blocked_on_type(self._layout)

    def _by_waiter(
        self, sought: Sought, stack: OwnStack, limit: int, record: Record
    ) -> int | None:
        """Find the lock by the ring that a waiter on the task's own stack is on."""
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
            if entry.node in self._lost:
                continue
            # Where the lock is on the ring, who points at itself is on none.
            if on_ring and entry.next == entry.node:
                continue
            ring = self._follow(entry.node, shape, limit, entry)
            address = self._of_ring(lock, ring, stack, shape)
            if address is not None:
                return address
            if ring.cut:
                self._note_not_found(limit)
            elif len(ring.entries) > _MANY:
                self._lost |= ring.nodes
        return None

    def _follow(
        self, node: int, shape: Shape, limit: int, first: Entry | None = None
    ) -> Ring:
        ring = self._rings.follow(node, shape, limit, first)
        for _ in range(_TRIES):
            # What has no neighbour that knows it was none of a ring.
            if ring.whole or ring.cut or (first and len(ring.entries) == 1):
                break
            ring = self._rings.follow(node, shape, limit)
        return ring

    def _of_ring(
        self, lock: ListLock, ring: Ring, stack: OwnStack, shape: Shape
    ) -> int | None:
        """Find the lock of the waiters on a ring, and keep their order."""
        struct, member = lock.struct, lock.head
        order = None
        if self._layout.has(struct, member):
            list_at = self._layout.offset(struct, member)
            head = self._head(lock, ring, stack, list_at)
            if head is None:
                return None
            address = head - list_at
            order = ring.after(head) if ring.whole else None
        else:
            pointing = self._pointing(lock, ring, stack, shape)
            if pointing is None:
                return None
            address, first = pointing
            order = ring.begin(first) if ring.whole else None
        if order is not None:
            self.queues[lock.name, address] = self._queued(lock, order)
        self._locks.update((entry.node, address) for entry in ring.entries)
        return address

    def _head(
        self, lock: ListLock, ring: Ring, stack: OwnStack, list_at: int
    ) -> int | None:
        """Find the node that is no waiter, but the list head in the lock.

        A waiter names a task, which what follows a lock may do as well; but the task
        mostly has a pointer to the lock, as it was asked to take that.
        """
        known = known_to(stack)
        others = ring.entries[1:]
        pointed = [entry.node for entry in others if entry.node - list_at in known]
        no_waiters = [entry.node for entry in others if not may_be_task(entry.task)]
        both = [node for node in pointed if node in no_waiters]
        for heads in (both, pointed, no_waiters if ring.whole else []):
            if len(heads) == 1:
                agrees = self._has_waiters(lock, heads[0] - list_at)
                return heads[0] if agrees else None
        return None

    def _pointing(
        self, lock: ListLock, ring: Ring, stack: OwnStack, shape: Shape
    ) -> tuple[int, int] | None:
        """Find the one lock that the task knows and that points at a waiter.

        :return: The lock, and the node of its first waiter.
        """
        nodes = ring.nodes
        found: list[tuple[int, int]] = []
        tried = (word for word in known_to(stack) if word + shape.node not in nodes)
        for word in islice(tried, MAX_WORDS):
            try:
                first = self._layout.member(word, lock.struct, FIRST) + shape.node
            except drgn.FaultError:
                continue
            if first in nodes and self._has_waiters(lock, word):
                found.append((word, first))
        return found[0] if len(found) == 1 else None

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
        except drgn.FaultError as error:
            self._losses.lose(Loss.WAITERS, f"a lock is lost: {error}")
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
                self._losses.lose(
                    Loss.WAITERS, "a list of waiters has one that is none"
                )
                return None
            queue.append(QueuedWaiter(task, lock.modes[entry.kind]))
        return queue

    def _has_waiters(self, lock: ListLock, address: int) -> bool:
        try:
            return lock.has_waiters(self._layout, address)
        except drgn.FaultError:
            return False

    def _owner(self, lock: ListLock, address: int) -> int | None:
        try:
            return lock.owner(self._layout, address)
        except (drgn.FaultError, LookupError):
            return None

    def _note_not_found(self, limit: int) -> None:
        self._losses.note(
            "lock-not-found",
            f"more than {limit} wait for one lock, which is not told; a look "
            "at all tasks tells it",
        )


def _entry_on(stack: OwnStack, start: int, shape: Shape) -> Entry | None:
    """Take the waiter that may be on a task's own stack."""
    node = start + shape.node
    following, before = stack.word(node), stack.word(node + 8)
    kind = 0 if shape.kind is None else stack.half(node + shape.kind)
    if following is None or before is None or kind is None:
        return None
    if min(following, before) < KERNEL_HALF or (following | before) % 8:
        return None
    return Entry(node, following, before, stack.task, kind)


def known_to(stack: OwnStack) -> dict[int, None]:
    """Return what a task has pointers to, variables included; innermost first."""
    words = stack.words[stack.words >= np.uint64(KERNEL_HALF)].tolist()
    return {word: None for word in words if word not in stack}


@per_context
def kernel_locks(context: LockContext) -> KernelLocks:
    """Return the finder of the locks that tasks of a context wait for."""
    return KernelLocks(context.layout, context.losses)


def holders_at(
    context: LockContext, task: int | None, confidence: OwnerConfidence
) -> list[Holder]:
    """Return the task at an address that a lock names, if it is one.

    :raises drgn.FaultError: if it cannot be read
    """
    if task is None or not may_be_task(task):
        return []
    if confidence == "exact":
        pid = context.pid(task)
        if pid is None or not 0 < pid <= PID_MAX_LIMIT:
            return []
    return [Holder(task, confidence)]
