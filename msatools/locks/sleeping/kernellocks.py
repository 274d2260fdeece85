# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which sleeping lock of the kernel a task waits for, and who else does.

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
from msatools.kernel.report import LossLog
from msatools.locks.base.lock import LockType, QueuedWaiter
from msatools.locks.base.lock_context import MAX_WAITERS, LockContext, per_context
from msatools.locks.base.model import Mode
from msatools.locks.base.ownstack import OwnStack
from msatools.locks.base.rings import Entry, Ring, Rings, Shape, may_be_task
from msatools.locks.base.struct_reader import Layout
from msatools.locks.sleeping import lockwords
from msatools.locks.sleeping.locksorts import (
    FIRST,
    LISTS,
    Record,
    Sort,
    blocked_on_type,
    shape_of,
    sort_of,
)
from msatools.locks.sleeping.rtmutexes import RtMutex, RtMutexes
from msatools.target.addresses import KERNEL_HALF

MAX_WORDS = 96
"""Of a stack, that are tried for the address of a lock."""

_TRIES = 3
"""More walks of a ring that changes meanwhile."""

_MANY = 256
"""On a ring that is not to be followed again, whoever asks."""

_MODES: tuple[Mode, Mode] = ("write", "read")
"""By ``enum rwsem_waiter_type``."""


@dataclass(frozen=True)
class KernelLock:
    """A lock that a task waits for."""

    type: LockType

    address: int | None
    """``None`` if it is not to be found."""

    mode: Mode | None
    """How this task wants it."""

    waiters: int | None
    """How many wait, this one included; ``None`` if they were not all seen."""

    owner: int | None
    """The ``struct task_struct`` that has it, only if the lock tells exactly."""


class KernelLocks:
    """Finds locks; a ring of waiters is followed once, whoever asks."""

    def __init__(self, layout: Layout, findings: LossLog) -> None:
        self._layout = layout
        self._findings = findings
        self._rings = Rings(layout, findings)
        self._locks: dict[int, int] = {}
        """The address of the lock by each node of its ring."""

        self._lost: set[int] = set()
        """Nodes of long rings of which the lock was not found."""

        self.queues: dict[tuple[LockType, int], list[QueuedWaiter] | None] = {}
        """Who waits for locks that were looked at, by type and address."""

        self._queued_tasks: dict[tuple[LockType, int], frozenset[int]] = {}
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
        :param limit: How many other waiters are looked at.
        """
        sort = sort_of(names)
        if sort is None:
            return None
        record = record or Record()
        address = self._recorded(sort, stack.task, limit, record)
        if address is None:
            address = self._by_waiter(sort, stack, limit, record)
        if address is None:
            return KernelLock(sort.type, None, sort.mode, None, None)
        queue = self.queue(sort.type, address, limit)
        waiters = None if queue is None else len(queue)
        owner = self._owner(sort.type, address)
        return KernelLock(sort.type, address, sort.mode, waiters, owner)

    def queue(
        self, type_: LockType, address: int, limit: int = MAX_WAITERS
    ) -> list[QueuedWaiter] | None:
        """
        Tell who waits for a lock, in the order of its list.

        :param limit: How many at most.
        :return: ``None`` if there are more, if it is lost, or if the lock keeps no list
            that is known.
        """
        key = (type_, address)
        if key not in self.queues:
            self.queues[key] = self._read_queue(type_, address, limit)
        return self.queues[key]

    def is_queued(self, type_: LockType, address: int, task: int) -> bool | None:
        """Tell whether a task waits for a lock that was looked at.

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
        :raises LookupError: if nothing tells the types
        """
        if address not in self._rt_mutexes:
            self._rt_mutexes[address] = self._rt_reader.read(address)
        return self._rt_mutexes[address]

    @cached_property
    def _rt_reader(self) -> RtMutexes:
        return RtMutexes(self._layout, self._findings)

    def _recorded(
        self, sort: Sort, task: int, limit: int, record: Record
    ) -> int | None:
        """Take the lock that a task's record names, if that lock's queue has the task.

        Where the queue cannot be seen, the record is enough.
        """
        for address in record.locks(sort, self._blocked_on):
            self.queue(sort.type, address, limit)
            if self.is_queued(sort.type, address, task) is not False:
                return address
        return None

    @cached_property
    def _blocked_on(self) -> str | None:
        return blocked_on_type(self._layout)

    def _by_waiter(
        self, sort: Sort, stack: OwnStack, limit: int, record: Record
    ) -> int | None:
        """Find the lock by the ring that a waiter on the task's own stack is on."""
        struct, member = LISTS[sort.type]
        on_ring = self._layout.has(struct, member)
        if not (on_ring or self._layout.has(struct, FIRST)):
            return None
        shape = shape_of(self._layout, sort.type)
        starts = list(stack.own(sort.waiter, "task"))
        if self._blocked_on == sort.waiter and record.blocked_on in starts:
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
            address = self._of_ring(sort.type, ring, stack, shape)
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
        self, type_: LockType, ring: Ring, stack: OwnStack, shape: Shape
    ) -> int | None:
        """Find the lock of the waiters on a ring, and keep their order."""
        struct, member = LISTS[type_]
        order = None
        if self._layout.has(struct, member):
            list_at = self._layout.offset(struct, member)
            head = self._head(type_, ring, stack, list_at)
            if head is None:
                return None
            address = head - list_at
            order = ring.after(head) if ring.whole else None
        else:
            pointing = self._pointing(type_, ring, stack, shape)
            if pointing is None:
                return None
            address, first = pointing
            order = ring.begin(first) if ring.whole else None
        if order is not None:
            self.queues[type_, address] = self._queued(type_, order)
        self._locks.update((entry.node, address) for entry in ring.entries)
        return address

    def _head(
        self, type_: LockType, ring: Ring, stack: OwnStack, list_at: int
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
                agrees = self._has_waiters(type_, heads[0] - list_at)
                return heads[0] if agrees else None
        return None

    def _pointing(
        self, type_: LockType, ring: Ring, stack: OwnStack, shape: Shape
    ) -> tuple[int, int] | None:
        """Find the one lock that the task knows and that points at a waiter.

        :return: The lock, and the node of its first waiter.
        """
        struct, _ = LISTS[type_]
        nodes = ring.nodes
        found: list[tuple[int, int]] = []
        tried = (word for word in known_to(stack) if word + shape.node not in nodes)
        for word in islice(tried, MAX_WORDS):
            try:
                first = self._layout.member(word, struct, FIRST) + shape.node
            except drgn.FaultError:
                continue
            if first in nodes and self._has_waiters(type_, word):
                found.append((word, first))
        return found[0] if len(found) == 1 else None

    def _read_queue(
        self, type_: LockType, address: int, limit: int
    ) -> list[QueuedWaiter] | None:
        struct, member = LISTS[type_]
        on_ring = self._layout.has(struct, member)
        if not (on_ring or self._layout.has(struct, FIRST)):
            return None
        shape = shape_of(self._layout, type_)
        if on_ring:
            head = address + self._layout.offset(struct, member)
            entries = self._rings.walk(head, shape, limit)
        else:
            entries = self._read_ring(address, struct, shape, limit)
        return None if entries is None else self._queued(type_, entries)

    def _read_ring(
        self, lock: int, struct: str, shape: Shape, limit: int
    ) -> list[Entry] | None:
        try:
            first = self._layout.member(lock, struct, FIRST)
        except drgn.FaultError as error:
            self._findings.lose(Loss.WAITERS, f"a lock is lost: {error}")
            return None
        if not first:
            return []
        ring = self._follow(first + shape.node, shape, limit)
        if ring.cut:
            self._rings.note_cut(limit)
        elif not ring.whole:
            self._findings.lose(
                Loss.WAITERS, "a ring of waiters changed, or is damaged"
            )
        return ring.entries if ring.whole else None

    def _queued(
        self, type_: LockType, entries: list[Entry]
    ) -> list[QueuedWaiter] | None:
        queue = []
        for entry in entries:
            task = entry.task or 0
            if not may_be_task(task) or entry.kind >= len(_MODES):
                self._findings.lose(
                    Loss.WAITERS, "a list of waiters has one that is none"
                )
                return None
            queue.append(
                QueuedWaiter(task, _MODES[entry.kind] if type_ == "rwsem" else None)
            )
        return queue

    def _has_waiters(self, type_: LockType, lock: int) -> bool:
        try:
            return lockwords.has_waiters(self._layout, type_, lock)
        except drgn.FaultError:
            return False

    def _owner(self, type_: LockType, lock: int) -> int | None:
        try:
            return lockwords.owner(self._layout, type_, lock)
        except (drgn.FaultError, LookupError):
            return None

    def _note_not_found(self, limit: int) -> None:
        self._findings.note(
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
    """Give what a task has pointers to, variables included; innermost first."""
    words = stack.words[stack.words >= np.uint64(KERNEL_HALF)].tolist()
    return {word: None for word in words if word not in stack}


@per_context
def kernel_locks(look: LockContext) -> KernelLocks:
    """Return what finds the locks that tasks of a context wait for."""
    return KernelLocks(look.layout, look.findings)
