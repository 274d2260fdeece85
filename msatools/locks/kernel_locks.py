# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks with a list of waiters: mutexes, rwsems, semaphores, rt_mutexes.

Each type has a function that finds its owner, such as ``_rwsem_owner``.
:class:`KernelLocks` finds the lock that a task sleeps for, and its other waiters.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.pids import PID_MAX_LIMIT
from msatools.kernel.reader import U64
from msatools.kernel.report import Loss, LossLog
from msatools.locks.context import MAX_WAITERS, LockContext, per_context
from msatools.locks.report import (
    Holder,
    Lock,
    LockTypeName,
    Mode,
    OwnerConfidence,
    QueuedWaiter,
    Request,
)
from msatools.locks.struct_reader import (
    Entry,
    Layout,
    OwnStack,
    Ring,
    Rings,
    Shape,
    may_be_task,
)
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_type, member_of

# --- The description of a lock type that has a list of waiters.
#
# All such types are in LIST_LOCKS, below. Members of a lock that have to be
# consistent are read with one read: on a running kernel they may change between two.


TASK = (1 << 64) - 1 & ~0b111
"""Mask of the task in the owner of a mutex or a rwsem; the low bits are flags
(``MUTEX_FLAGS``, ``RWSEM_OWNER_FLAGS_MASK``). "locking/rwsem: Remove reader optimistic
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
    """Maps prefixes of names of functions that wait to the mode of the request."""

    blockers: Mapping[int, Mode | None]
    """Maps the type bits of ``task_struct.blocker`` to the mode of the request
    (include/linux/hung_task.h: v6.16; of rwsems v6.17)."""

    kind: str = ""
    """Member of a waiter that identifies the mode of its request; empty if there is
    only one mode."""

    modes: tuple[Mode | None, ...] = (None,)
    """The modes, indexed by the value of the member :attr:`kind`."""

    has_waiters: Callable[[Layout, int], bool]
    """Return whether the state of a lock shows that it has waiters. If not, the address
    is probably not that of a lock."""

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


# --- Mutexes, also those in a ww_mutex: owner and waiters (kernel/locking/mutex.c).


_MUTEX_WAITERS = 0b001
_PICKUP = 0b100
"""``MUTEX_FLAG_PICKUP``: the lock was handed to the owner, which still sleeps. That
task counts as a waiter."""


def _mutex_owner(layout: Layout, lock: int) -> int | None:
    word = layout.member(lock, "mutex", "owner")
    return None if word & _PICKUP else word & TASK or None


def _mutex_has_waiters(layout: Layout, lock: int) -> bool:
    return bool(layout.member(lock, "mutex", "owner") & _MUTEX_WAITERS)


MUTEX = ListLock(
    name="mutex",
    struct="mutex",
    waiter="mutex_waiter",
    slow_paths={"__mutex_lock": None},
    blockers={0: None},
    has_waiters=_mutex_has_waiters,
    owner=_mutex_owner,
)
WW_MUTEX = replace(MUTEX, name="ww_mutex", slow_paths={"__ww_mutex_lock": None})


# --- Rwsems: owner, readers, waiters (kernel/locking/rwsem.c).


_READER_OWNED = 0b001
"""``RWSEM_READER_OWNED``: the owner is the last reader, which may be gone."""

_WRITER = 1 << 0
_RWSEM_WAITERS = 1 << 1
_READERS_SHIFT = 8
_READERS_MASK = (1 << 55) - 1
"""Mask of the shifted number of readers: the bits below ``RWSEM_FLAG_READFAIL``."""


def _rwsem_owner(layout: Layout, lock: int) -> int | None:
    """Read the writer that owns a rwsem; ``None`` if there is none.

    A writer first sets its bit in the count, then the owner. In between the owner is 0,
    or the last reader.
    """
    if not _has_count(layout):
        return None
    count, word = layout.members(lock, "rw_semaphore", "count", "owner")
    written = count & _WRITER and not word & _READER_OWNED
    return word & TASK or None if written else None


def _rwsem_last_owner(layout: Layout, lock: int) -> int | None:
    """Read the reader that entered last; ``None`` if there are no readers."""
    if not _has_count(layout):
        return None
    count, word = layout.members(lock, "rw_semaphore", "count", "owner")
    return word & TASK or None if _readers(count) else None


def _count_readers(layout: Layout, lock: int) -> int | None:
    if not _has_count(layout):
        return None
    return _readers(layout.member(lock, "rw_semaphore", "count"))


def _rwsem_has_waiters(layout: Layout, lock: int) -> bool:
    if not _has_count(layout):
        return True
    return bool(layout.member(lock, "rw_semaphore", "count") & _RWSEM_WAITERS)


def _readers(count: int) -> int:
    return 0 if count & _WRITER else count >> _READERS_SHIFT & _READERS_MASK


def _has_count(layout: Layout) -> bool:
    """Return whether ``rw_semaphore.count`` has the bits above.

    It has since "locking/rwsem: Implement a new locking scheme" (in v5.3). The type of
    the owner shows that: "locking/rwsem: Make rwsem->owner an atomic_long_t" (in v5.3).
    """
    return layout.has("rw_semaphore", "count") and layout.has(
        "rw_semaphore", "owner.counter"
    )


RWSEM = ListLock(
    name="rwsem",
    struct="rw_semaphore",
    waiter="rwsem_waiter",
    slow_paths={"rwsem_down_read": "read", "rwsem_down_write": "write"},
    blockers={2: "read", 3: "write"},
    kind="type",
    modes=("write", "read"),
    has_waiters=_rwsem_has_waiters,
    owner=_rwsem_owner,
    last_owner=_rwsem_last_owner,
    readers=_count_readers,
)


# --- Semaphores: last owner and waiters (kernel/locking/semaphore.c).


def _semaphore_last_owner(layout: Layout, lock: int) -> int | None:
    # Since "hung_task: show the blocker task if the task is hung on semaphore" (v6.16)
    if layout.has("semaphore", "last_holder"):
        return layout.member(lock, "semaphore", "last_holder") or None
    return None


def _semaphore_has_waiters(layout: Layout, lock: int) -> bool:
    return layout.member(lock, "semaphore", "count") == 0


SEMAPHORE = ListLock(
    name="semaphore",
    struct="semaphore",
    waiter="semaphore_waiter",
    slow_paths={"__down": None},
    blockers={1: None},
    has_waiters=_semaphore_has_waiters,
    last_owner=_semaphore_last_owner,
)


# --- All lock types with a list of waiters, and the request of a task for one of them.
#
# To add a type, define a ListLock above and add it to LIST_LOCKS.


LIST_LOCKS: dict[LockTypeName, ListLock] = {
    lock.name: lock for lock in (RWSEM, MUTEX, WW_MUTEX, SEMAPHORE)
}

FIRST = "first_waiter"
"""Member that replaces the list head since "locking/mutex: Remove the list_head from
struct mutex" and similar commits (in v7.1): the ring consists of waiters only."""

_BLOCKER_TYPE = 0b11
"""``BLOCKER_TYPE_MASK`` (include/linux/hung_task.h)."""


class Sought(NamedTuple):
    """The type and mode of a task's request, by the functions on its stack."""

    lock: ListLock
    mode: Mode | None


class Record(Struct, frozen=True):
    """Members of a task that point at the lock it waits for; 0 if unset."""

    blocker: int = 0
    """``task_struct.blocker``: the address of a lock, with its type in the low bits."""

    blocked_on: int = 0
    """``task_struct.blocked_on``: a mutex, or the task's waiter for one."""

    def locks(self, sought: Sought, blocked_on: str | None) -> list[int]:
        """
        Return the addresses of the recorded locks that match a request.

        :param blocked_on: Tag of the structure that ``blocked_on`` points at.
        """
        addresses = []
        type_ = self.blocker & _BLOCKER_TYPE
        blockers = sought.lock.blockers
        if type_ in blockers and blockers[type_] == sought.mode:
            addresses.append(self.blocker & ~_BLOCKER_TYPE)
        if sought.lock.struct == blocked_on:
            addresses.append(self.blocked_on)
        # blocked_on is PROXY_WAKING (-1) while a task is being woken.
        return [
            address
            for address in addresses
            if address >= KERNEL_HALF and not address % 4
        ]


def sought_by(names: tuple[str, ...]) -> Sought | None:
    """Return the request of a task, by the innermost function that waits for a lock.

    :param names: Functions on the task's stack, innermost first.
    """
    for name in names:
        for lock in LIST_LOCKS.values():
            for prefix, mode in lock.slow_paths.items():
                if name.startswith(prefix):
                    return Sought(lock, mode)
    return None


def blocked_on_type(layout: Layout) -> str | None:
    """Return the tag of the structure that ``task_struct.blocked_on`` points at.

    It is ``None`` if the kernel has no such member.
    "locking/mutex: Rework task_struct::blocked_on" (in v6.17) made it the mutex;
    before, with CONFIG_DEBUG_MUTEXES, it was the waiter.
    """
    try:
        task = find_type(layout.reader.prog, "struct task_struct")
        tag: str | None = member_of(task, "blocked_on").type.type.tag
    except MissingError:
        return None
    return tag


# --- Reads the owner and the waiters of an rt_mutex.
#
# kernel/locking/rtmutex.c: a waiter is on the stack of its task, in a red-black tree
# that is sorted by priority; equals are in order of arrival. Ordinary tasks are equal,
# whatever their nice value, since "locking/rtmutex: Squash !RT tasks to DEFAULT_PRIO"
# (in v5.15).


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
        # Nested since "locking/rtmutex: Fix task->pi_waiters integrity" (in v6.5)
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
                if node < KERNEL_HALF or count > MAX_WAITERS:
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


# --- Finds the kernel lock that a task sleeps for, and its other waiters.
#
# kernel/locking: a waiter is on the stack of its task. It is a node of the ring of all
# waiters for the lock. Up to v7.0 the list head in the lock is a node of that ring,
# too; since v7.1 the lock points at its first waiter instead.


MAX_WORDS = 96
"""Maximum number of words of a stack that are tried as the address of a lock."""

_TRIES = 3
"""Maximum number of further walks of a ring that changes while it is read."""

_MANY = 256
"""A ring whose lock was not found is not followed again if it has more nodes."""


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
    """Finds the locks that tasks sleep for; follows each ring of waiters once."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses
        self._rings = Rings(layout, losses)
        self._locks: dict[int, int] = {}
        """Maps each node of a ring to the address of its lock."""

        self._without_lock: set[int] = set()
        """Nodes of long rings whose lock was not found."""

        self.queues: dict[tuple[LockTypeName, int], list[QueuedWaiter] | None] = {}
        """Maps type and address of a lock to its waiters: see :meth:`queue`."""

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
            # A node that points at itself is on no list, or the only waiter if the ring
            # has no list head.
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

        Every other node is a waiter, with a pointer to a task. The memory after a list
        head may look like such a pointer, too; but the stack usually has the address of
        the lock, as an argument of the function that takes it.
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

    Addresses of variables and functions are included, those on the stack itself not.
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
