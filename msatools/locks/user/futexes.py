# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waiters on futexes, from the kernel's hash tables.

kernel/futex: each waiter's ``struct futex_q`` is on the chain of the bucket that its
key hashes to. It lies on the waiter's stack, or on the heap for ``futex_waitv()``.
"""

import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import drgn
import numpy as np

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, column
from msatools.kernel.report import LossLog
from msatools.locks.base.futexkey import FutexKey
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.struct_reader import Layout
from msatools.selfdesc.variables import find_variable
from msatools.target.addresses import KERNEL_HALF

MAX_WAITERS = 1 << 22
"""On one chain: all tasks that there can be."""

_MAX_BUCKETS = 1 << 22
"""Twice 256 for each of 8,192 CPUs (futex_init()), the most that x86 can have."""

_PAGE = 4096
_WORD = struct.Struct("<Q")
_KEY = struct.Struct("<QQI")
_PREVIOUS = 8
"""Where ``struct list_head`` has ``prev``."""


_HASHES = ("__futex_hash", "futex_hash")
"""Functions that find the bucket of a key; compilers inline the first one."""

_CODE_BYTES = 1024
"""More than such a function has."""

_CONSTANT = re.compile(rb"(?=[\x48\x49][\xb8-\xbf](.{8}))", re.DOTALL)
"""``mov $imm64, %reg`` of x86-64: a runtime constant that is a pointer."""


@dataclass(frozen=True)
class Waiter:
    """One ``struct futex_q``."""

    address: int
    task: int
    lock: int
    """The lock of its bucket."""

    key: FutexKey
    pi_state: int
    """``struct futex_pi_state`` of a futex that inherits priority, else 0."""

    bitset: int


class Futexes:
    """Reads waiters on futexes of one kernel.

    :raises LookupError: if the types are unknown
    """

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._reader = layout.reader
        self._losses = losses
        at = layout.offset
        self._node = at("futex_q", "list.node_list")
        self._task = at("futex_q", "task")
        self._lock = at("futex_q", "lock_ptr")
        self._key = at("futex_q", "key")
        self._pi_state = at("futex_q", "pi_state")
        self._bitset = at("futex_q", "bitset")
        self._size = layout.size("futex_q")
        self._bucket_lock = at("futex_hash_bucket", "lock")
        self._chain = at("futex_hash_bucket", "chain.node_list")
        self._bucket_size = layout.size("futex_hash_bucket")

    def waiter(self, address: int, data: bytes) -> Waiter:
        """Take a ``struct futex_q`` apart."""
        task, lock, pi_state = (
            _WORD.unpack_from(data, offset)[0]
            for offset in (self._task, self._lock, self._pi_state)
        )
        key = FutexKey(*_KEY.unpack_from(data, self._key))
        (bitset,) = struct.unpack_from("<I", data, self._bitset)
        return Waiter(address, task, lock, key, pi_state, bitset)

    def read(self, address: int) -> Waiter:
        """Read the ``struct futex_q`` at an address.

        :raises drgn.FaultError: if it cannot be read
        """
        return self.waiter(address, self._reader.read(address, self._size))

    def key(self, address: int) -> FutexKey:
        """Read the ``union futex_key`` at an address.

        :raises drgn.FaultError: if it cannot be read
        """
        return FutexKey(*_KEY.unpack(self._reader.read(address, _KEY.size)))

    def on_stack(self, base: int, words: Addresses, task: int) -> Iterator[Waiter]:
        """Find what looks like a waiter of a task on its own stack, innermost first.

        It is one if the chain that it names has it, too: see :meth:`chain`.

        :param base: The address of the first word.
        """
        data = words.tobytes()
        for place in np.flatnonzero(words == np.uint64(task)).tolist():
            start = 8 * place - self._task
            if start < 0 or start + self._size > len(data):
                continue
            waiter = self.waiter(base + start, data[start : start + self._size])
            following, before = struct.unpack_from("<QQ", data, start + self._node)
            linked = min(following, before, waiter.lock) >= KERNEL_HALF
            # Of a file it is a page's number, else its address.
            aligned = waiter.key.of_inode or waiter.key.word % _PAGE == 0
            if linked and aligned and waiter.key.offset < _PAGE:
                yield waiter

    def chain(self, lock: int, limit: int = MAX_WAITERS) -> Iterator[Waiter]:
        """Read the waiters of the bucket that has the lock at an address.

        The chain of a live kernel may change: what is not of this bucket ends it.

        :param limit: How many at most.
        """
        head = lock - self._bucket_lock + self._chain
        try:
            (node,) = _WORD.unpack(self._reader.read(head, 8))
        except drgn.FaultError as error:
            self._broken(f"a chain of waiters cannot be read: {error}")
            return
        yield from self._follow(node, head, lock, limit)

    def _follow(self, node: int, head: int, lock: int, limit: int) -> Iterator[Waiter]:
        seen: set[int] = set()
        while node != head and len(seen) < limit:
            if node in seen:
                self._broken("a chain of waiters is a loop")
                return
            seen.add(node)
            address = node - self._node
            try:
                data = self._reader.read(address, self._size)
            except drgn.FaultError as error:
                self._broken(f"a chain of waiters breaks off: {error}")
                return
            waiter = self.waiter(address, data)
            if waiter.lock != lock:
                self._broken("a chain of waiters changed, or is damaged")
                return
            yield waiter
            (node,) = _WORD.unpack_from(data, self._node)

    def all(self, mms: Iterable[int] = ()) -> Iterator[Waiter]:
        """Read all waiters of the common tables, and of the tables of address spaces.

        :param mms: Addresses of ``struct mm_struct``.
        """
        tables = self._private_tables(mms)
        try:
            tables = [*self._common_tables(), *tables]
        except LookupError as error:
            self._broken(f"the hash table of waiters is not to be found: {error}")
        except drgn.FaultError as error:
            self._broken(f"the hash tables of waiters are lost: {error}")
        for start, count in tables:
            yield from self._table(start, count)

    def _table(self, start: int, count: int) -> Iterator[Waiter]:
        """Read all waiters of one array of buckets, which comes with few reads."""
        if not start or not 0 < count <= _MAX_BUCKETS:
            self._broken("a hash table of waiters is damaged")
            return
        size = count * self._bucket_size
        granule = _PAGE // self._bucket_size * self._bucket_size or self._bucket_size
        data, gaps = self._reader.read_around_gaps(start, size, granule)
        if gaps:
            self._broken("a part of a hash table of waiters is lost")
        buckets = np.frombuffer(data, np.uint8).reshape(count, self._bucket_size)
        firsts = column(buckets, self._chain)
        starts = start + self._bucket_size * np.arange(count, dtype=np.uint64)
        heads = starts + np.uint64(self._chain)
        for row in np.flatnonzero((firsts != heads) & (firsts != 0)).tolist():
            lock = int(starts[row]) + self._bucket_lock
            yield from self._follow(
                int(firsts[row]), int(heads[row]), lock, MAX_WAITERS
            )

    def _common_tables(self) -> list[tuple[int, int]]:
        """Find the tables that all processes share: their buckets, and how many.

        :raises drgn.FaultError: if a structure on the way cannot be read
        :raises LookupError: if the kernel has no such tables
        """
        prog = self._reader.prog
        try:
            # "futex: Use runtime constants for __futex_hash() hot path" (after v7.1)
            mask = find_variable(prog, "__futex_mask").value_()
        except LookupError:
            pass
        else:
            return [(table, mask + 1) for table in self._nodes(self._queues())]
        data = find_variable(prog, "__futex_data")
        if data.type_.has_member("hashmask"):
            # A table a node: "futex: Implement FUTEX2_NUMA" (in v6.16)
            mask = data.hashmask.value_()
            place = data.queues.address_
            return [(table, mask + 1) for table in self._nodes(place)]
        return [(data.queues.value_(), data.hashsize.value_())]

    def _queues(self) -> int:
        """Find the array of pointers to the common tables, one a node.

        :raises drgn.FaultError: if what tells cannot be read
        :raises LookupError: if nothing tells
        """
        try:
            queues: int = find_variable(self._reader.prog, "__futex_queues").value_()
        except LookupError:
            # Compilers leave the variable out, as only constants in code are used.
            return self._queues_in_code()
        return queues

    def _queues_in_code(self) -> int:
        for name in _HASHES:
            start = self._layout.symbol(name)
            if start is None:
                continue
            code = self._reader.read(start, _CODE_BYTES)
            for constant in _CONSTANT.findall(code):
                (place,) = _WORD.unpack(constant)
                if self._has_tables(place):
                    return int(place)
        raise LookupError("no variable has its address, and no known code")

    def _has_tables(self, place: int) -> bool:
        """Whether there is an array of pointers to tables, by their first buckets."""
        try:
            heads = [table + self._chain for table in self._nodes(place)]
            firsts = [self._layout.word(head) for head in heads]
            return bool(heads) and heads == [
                self._layout.word(first + _PREVIOUS) for first in firsts
            ]
        except drgn.FaultError:
            return False

    def _nodes(self, place: int) -> list[int]:
        """Read an array of pointers to tables, one a node; few nodes have none."""
        prog = self._reader.prog
        try:
            count = int(find_variable(prog, "nr_node_ids").value_())
        except LookupError:
            count = 1
        tables = self._reader.words(place, min(max(count, 1), 1024))
        return [table for table in tables.tolist() if table]

    def _private_tables(self, mms: Iterable[int]) -> list[tuple[int, int]]:
        """Find the tables that address spaces have of their own.

        "futex: Add basic infrastructure for local task local hash" (in v6.16); the
        pointer has moved into structures of their own since.
        """
        layout = self._layout
        names = ("futex.phash.hash", "futex.phash", "futex_phash")
        if not layout.has("mm_struct", *names):
            return []
        mask = layout.offset("futex_private_hash", "hash_mask")
        queues = layout.offset("futex_private_hash", "queues")
        found = []
        for mm in mms:
            try:
                table = layout.member(mm, "mm_struct", *names)
                if table:
                    data = self._reader.read(table + mask, 4)
                    count = int.from_bytes(data, "little") + 1
                    found.append((table + queues, count))
            except drgn.FaultError as error:
                self._broken(f"a process's hash table of waiters is lost: {error}")
        return found

    def _broken(self, text: str) -> None:
        self._losses.lose(Loss.FUTEX_CHAINS, text)


@per_context
def futexes(context: LockContext) -> Futexes:
    """Return the reader of waiters on futexes.

    :raises LookupError: if the types are unknown
    """
    return Futexes(context.layout, context.losses)


@per_context
def _all_waiters(context: LockContext) -> list[Waiter]:
    mms = sorted(set(context.tasks["mm"].tolist()) - {0})
    return list(futexes(context).all(mms))


@per_context
def futex_waiters(
    context: LockContext,
) -> tuple[dict[int, list[Waiter]], Counter[FutexKey]]:
    """Return all waiters on futexes by task, and how many each futex has.

    :raises LookupError: if the types are unknown
    """
    by_task: dict[int, list[Waiter]] = {}
    for waiter in _all_waiters(context):
        by_task.setdefault(waiter.task, []).append(waiter)
    return by_task, Counter(waiter.key for waiter in _all_waiters(context))


@per_context
def futex_queues(context: LockContext) -> dict[FutexKey, list[Waiter]]:
    """Return all waiters on futexes by futex, in the order of their chain.

    :raises LookupError: if the types are unknown
    """
    by_key: dict[FutexKey, list[Waiter]] = {}
    for waiter in _all_waiters(context):
        by_key.setdefault(waiter.key, []).append(waiter)
    return by_key
