# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which lock of the kernel a task waits for, who else does, and who has it.

kernel/locking: a waiter lies on the stack of who waits, on a ring of all that wait for
the lock, in which the lock's own list head is the one node that is no waiter.
"""

from dataclasses import dataclass, replace

import drgn

from msatools.kernel.report import Findings
from msatools.locks.layout import KERNEL, Layout
from msatools.locks.model import Mode
from msatools.locks.ownstack import OwnStack, WaitEntry
from msatools.locks.storage import Storage

MAX_WAITERS = 1 << 22
"""On one ring: all tasks that there can be."""

_FLAGS = 0b111
"""Below the owner of a mutex or a rwsem (``MUTEX_FLAGS``, ``RWSEM_FLAGS...``)."""

_WRITER = 1
"""Of the count of a rwsem: a writer has it, which its owner then names."""

_BLOCKER_KIND = 0b11

# By what is on the stack: the lock's type, its waiter's, and how it is wanted.
_BY_FUNCTION: tuple[tuple[str, tuple[str, str, Mode | None]], ...] = (
    ("rwsem_down_read", ("rwsem", "rwsem_waiter", "read")),
    ("rwsem_down_write", ("rwsem", "rwsem_waiter", "write")),
    ("__mutex_lock", ("mutex", "mutex_waiter", None)),
    ("__ww_mutex_lock", ("ww_mutex", "mutex_waiter", None)),
    ("__down", ("semaphore", "semaphore_waiter", None)),
)
# The structures of those types, and their list of waiters.
_LOCKS = {
    "rwsem": ("rw_semaphore", "wait_list"),
    "mutex": ("mutex", "wait_list"),
    "ww_mutex": ("mutex", "wait_list"),
    "semaphore": ("semaphore", "wait_list"),
}


@dataclass(frozen=True)
class KernelLock:
    """A lock that a task waits for."""

    type: str
    """Of contract ``locks``."""

    address: int | None
    """``None`` if it is not to be found."""

    mode: Mode | None
    """How this task wants it."""

    waiters: int | None
    """How many wait, this one included; ``None`` if they were not all seen."""

    owner: int | None
    """The ``struct task_struct`` that has it, only if the lock tells exactly."""


@dataclass(frozen=True)
class Place:
    """What a lock is in."""

    name: str | None
    """The member or variable that it is."""

    inode: int | None = None
    """The address of a ``struct inode``."""

    super_block: int | None = None
    mm: int | None = None


@dataclass
class _Ring:
    nodes: set[int]
    whole: bool = False
    """Whether these are all nodes; if not, they are the nearest."""

    cut: bool = False
    """Whether more was not looked at."""

    head: int | None = None


class KernelLocks:
    """Finds locks; a ring of waiters is followed once, whoever asks."""

    def __init__(self, layout: Layout, storage: Storage, findings: Findings) -> None:
        self._layout = layout
        self._storage = storage
        self._findings = findings
        self._rings: dict[int, _Ring] = {}
        """By each node of a ring that was followed to its end."""

        self._places: dict[int, Place | None] = {}

    def find(
        self, names: tuple[str, ...], stack: OwnStack, limit: int = MAX_WAITERS
    ) -> KernelLock | None:
        """
        Find the lock that a task waits for; ``None`` if no such lock is waited for.

        :param names: The functions on its stack, innermost first.
        :param limit: How many other waiters are looked at.
        """
        if any(name.startswith("percpu_rwsem_wait") for name in names):
            return self._percpu_rwsem(stack, limit)
        for prefix, (type_, waiter, mode) in _BY_FUNCTION:
            if any(name.startswith(prefix) for name in names):
                found = self._by_waiter(type_, waiter, stack, limit)
                return replace(found, mode=mode)
        return None

    def by_blocker(self, lock: KernelLock, blocker: int) -> KernelLock:
        """
        Tell a lock that a task's own record names, where its ring does not.

        :param blocker: ``task_struct.blocker``, which has the lock's kind in its last
            bits: a mutex, a semaphore, a rwsem for a reader and one for a writer.
        """
        types = ("mutex", "semaphore", "rwsem", "rwsem")
        type_, address = types[blocker & _BLOCKER_KIND], blocker & ~_BLOCKER_KIND
        if lock.address is not None or not address or lock.type != type_:
            return lock
        return replace(lock, address=address, owner=self._owner(type_, address))

    def head_of_queue(
        self, entry: WaitEntry, stack: OwnStack, limit: int = MAX_WAITERS
    ) -> tuple[int, int | None] | None:
        """
        Find the ``struct wait_queue_head`` that an entry is on, and how many are.

        ``None`` if it is not to be found. The count is ``None`` past the limit.
        """
        node = entry.address + self._layout.offset("wait_queue_entry", "entry")
        head = self._layout.offset("wait_queue_head", "head")
        if not self._is_linked(node, entry.next, entry.previous):
            return None
        found = self._ring(node, head, stack, limit)
        return None if found is None else (found[0] - head, found[1])

    def place(self, lock: KernelLock, mm: int = 0) -> Place | None:
        """
        Tell what a lock is in, if it is one of those that are known.

        :param mm: An address space that is likely.
        """
        if lock.address is None:
            return None
        if lock.address not in self._places:
            self._places[lock.address] = self._find_place(lock, mm)
        return self._places[lock.address]

    def _by_waiter(
        self, type_: str, waiter: str, stack: OwnStack, limit: int
    ) -> KernelLock:
        lock_type, member = _LOCKS[type_]
        nowhere = KernelLock(type_, None, None, None, None)
        if not self._layout.has(lock_type, member):
            # "locking/mutex: Remove the list_head from struct mutex" and the like
            # (in v7.1): the ring has waiters only.
            return nowhere
        node_at = self._layout.offset(waiter, "list")
        list_at = self._layout.offset(lock_type, member)
        for start in stack.own(waiter, "task"):
            node = start + node_at
            following, before = stack.word(node), stack.word(node + 8)
            if following is None or before is None:
                continue
            if min(following, before) < KERNEL or following == node:
                continue
            if not self._is_linked(node, following, before):
                continue
            found = self._ring(node, list_at, stack, limit)
            if found is not None:
                address = found[0] - list_at
                owner = self._owner(type_, address)
                return KernelLock(type_, address, None, found[1], owner)
        return nowhere

    def _is_linked(self, node: int, following: int, before: int) -> bool:
        try:
            return (
                self._layout.word(following + 8) == node
                and self._layout.word(before) == node
            )
        except drgn.FaultError:
            return False

    def _ring(
        self, node: int, head_at: int, stack: OwnStack, limit: int
    ) -> tuple[int, int | None] | None:
        """Find the head of the ring that a node is on, and how many others are.

        Of a ring of two it is the other. Else it is the one node whose structure the
        task has a pointer to, as it was asked to wait for that.
        """
        ring = self._rings.get(node)
        if ring is None:
            ring = self._walk(node, limit)
            if ring.whole:
                self._rings.update(dict.fromkeys(ring.nodes, ring))
        if ring.head is None:
            ring.head = self._head(ring, node, head_at, stack)
        if ring.head is None:
            if ring.cut:
                self._findings.note(
                    "lock-not-found",
                    f"more than {limit} wait for one lock, which is not told; a look "
                    "at all tasks tells it",
                )
            return None
        if not ring.whole:
            self._findings.note(
                "waiters-not-counted",
                f"more than {limit} wait for one lock; they were not counted",
            )
            return ring.head, None
        return ring.head, len(ring.nodes) - 1

    @staticmethod
    def _head(ring: "_Ring", node: int, head_at: int, stack: OwnStack) -> int | None:
        if ring.whole and len(ring.nodes) == 2:
            (other,) = ring.nodes - {node}
            return other
        heads = [
            pointer + head_at
            for pointer in stack.pointers
            if pointer + head_at in ring.nodes
        ]
        return heads[0] if len(heads) == 1 else None

    def _walk(self, node: int, limit: int) -> "_Ring":
        """Follow a ring forwards, and where that is too long backwards as well."""
        ring = _Ring({node})
        back = limit // 3
        for direction, steps in ((0, limit - back), (8, back)):
            at = node
            for _ in range(steps):
                try:
                    at = self._layout.word(at + direction)
                except drgn.FaultError as error:
                    self._findings.lose(
                        "waiters", f"a ring of waiters is lost: {error}"
                    )
                    return ring
                if at == node:
                    ring.whole = True
                    return ring
                if at in ring.nodes or at < KERNEL:
                    # Backwards it comes to where the way forwards has ended.
                    ring.whole = bool(direction) and at in ring.nodes
                    return ring
                ring.nodes.add(at)
        ring.cut = True
        return ring

    def _owner(self, type_: str, lock: int) -> int | None:
        """Read who has a lock, if it tells exactly.

        Of a rwsem that readers have, it names one that has or had it: not told.
        """
        try:
            if type_ in ("mutex", "ww_mutex"):
                return self._layout.member(lock, "mutex", "owner") & ~_FLAGS or None
            if type_ == "rwsem":
                count, owner = self._layout.members(
                    lock, "rw_semaphore", "count", "owner"
                )
                return (owner & ~_FLAGS or None) if count & _WRITER else None
        except (drgn.FaultError, LookupError):
            pass
        return None

    def _percpu_rwsem(self, stack: OwnStack, limit: int) -> KernelLock:
        wakes = self._layout.symbol("percpu_rwsem_wake_function")
        for entry in stack.wait_entries():
            if entry.function != wakes:
                continue
            found = self.head_of_queue(entry, stack, limit)
            if found is not None:
                waiters = self._layout.offset("percpu_rw_semaphore", "waiters")
                address = found[0] - waiters
                return KernelLock("percpu_rwsem", address, None, found[1], None)
        return KernelLock("percpu_rwsem", None, None, None, None)

    def _find_place(self, lock: KernelLock, mm: int) -> Place | None:
        """Look whether a lock is in one of the structures that are easily known."""
        address = lock.address or 0
        if lock.type == "rwsem":
            found = (
                self._inode_lock(address)
                or self._super_block_lock(address, "s_umount")
                or self._mm_lock(address, mm)
            )
        elif lock.type == "mutex":
            found = self._super_block_lock(address, "s_vfs_rename_mutex")
        else:
            found = self._frozen(address) if lock.type == "percpu_rwsem" else None
        return found or self._variable(address)

    def _inode_lock(self, address: int) -> Place | None:
        inode = address - self._layout.offset("inode", "i_rwsem")
        if self._storage.is_inode(inode):
            return Place("i_rwsem", inode=inode)
        return None

    def _super_block_lock(self, address: int, member: str) -> Place | None:
        super_block = address - self._layout.offset("super_block", member)
        if self._storage.is_super_block(super_block):
            return Place(member, super_block=super_block)
        return None

    def _mm_lock(self, address: int, mm: int) -> Place | None:
        # "mmap locking API: rename mmap_sem to mmap_lock" (in v5.8)
        space = address - self._layout.offset("mm_struct", "mmap_lock", "mmap_sem")
        if space == mm or self.owner_of_mm(space):
            return Place("mmap_lock", mm=space)
        return None

    def owner_of_mm(self, mm: int) -> int | None:
        """Find the ``struct task_struct`` that an address space belongs to."""
        try:
            owner = self._layout.member(mm, "mm_struct", "owner")
            if owner >= KERNEL:
                own = self._layout.member(owner, "task_struct", "mm")
                return owner if own == mm else None
        except (drgn.FaultError, LookupError):  # without CONFIG_MEMCG: no owner
            pass
        return None

    def _frozen(self, address: int) -> Place | None:
        """Tell the file system that a lock keeps writers out of while it is frozen."""
        size = self._layout.size("percpu_rw_semaphore")
        first = self._layout.offset("super_block", "s_writers.rw_sem")
        # SB_FREEZE_LEVELS: write, page fault, internal.
        for number in range(3):
            super_block = address - first - number * size
            if self._storage.is_super_block(super_block):
                return Place("s_writers", super_block=super_block)
        return None

    def _variable(self, address: int) -> Place | None:
        try:
            symbol = self._layout.reader.prog.symbol(address)
        except LookupError:
            return None
        return Place(symbol.name) if symbol.address == address else None
