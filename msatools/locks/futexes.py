# SPDX-License-Identifier: LGPL-2.1-or-later

"""Futexes: the kernel's hash tables of waiters, their memory, and possible owners."""

import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.pids import MAX_LEVEL, PidTree
from msatools.kernel.reader import (
    LIST_HEAD,
    PAGE,
    U32,
    U64,
    Addresses,
    column,
    unsigned,
)
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.walks import tree_records
from msatools.locks.context import (
    FEW_READS,
    MAX_CANDIDATES,
    MAX_WAITERS,
    BlockedTask,
    LockContext,
    per_context,
)
from msatools.locks.places import lock_places
from msatools.locks.report import FutexKey, Lock, LockTypeName
from msatools.locks.struct_reader import Layout
from msatools.locks.user_memory import user_memory
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_variable

# --- Reads waiters on futexes from the kernel's hash tables.
#
# kernel/futex: the struct futex_q of a waiter is on the chain of the bucket that its
# key hashes to. It is on the waiter's stack, or, for futex_waitv(), on the heap.


_MAX_BUCKETS = 1 << 22
"""Maximum number of buckets of a table: twice 256 (futex_init()) for each of 8,192 CPUs
(the maximum of x86)."""

_KEY = struct.Struct("<QQI")
_PREVIOUS = 8
"""Offset of ``prev`` in a ``struct list_head``."""


_HASHES = ("__futex_hash", "futex_hash")
"""Functions that find the bucket of a key; compilers may inline the first one."""

_CODE_BYTES = 1024
"""More bytes than such a function has."""

_CONSTANT = re.compile(rb"(?=[\x48\x49][\xb8-\xbf](.{8}))", re.DOTALL)
"""``mov $imm64, %reg`` of x86-64: a runtime constant that is a pointer."""


class Waiter(Struct, frozen=True):
    """A ``struct futex_q``: the wait of a task on a futex."""

    address: int
    task: int
    lock: int
    """Address of the spinlock of its hash bucket."""

    key: FutexKey
    pi_state: int
    """Address of the ``struct futex_pi_state`` of a PI futex, otherwise 0."""

    bitset: int


class Futexes:
    """Reads waiters on futexes of one kernel.

    :raises MissingError: if the types are unknown
    """

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._reader = layout.reader
        self._losses = losses
        offset = layout.offset
        self._node = offset("futex_q", "list.node_list")
        self._task = offset("futex_q", "task")
        self._lock = offset("futex_q", "lock_ptr")
        self._key = offset("futex_q", "key")
        self._pi_state = offset("futex_q", "pi_state")
        self._bitset = offset("futex_q", "bitset")
        self._size = layout.size("futex_q")
        self._bucket_lock = offset("futex_hash_bucket", "lock")
        self._chain = offset("futex_hash_bucket", "chain.node_list")
        self._bucket_size = layout.size("futex_hash_bucket")
        self._page_size = layout.page_size

    def waiter(self, address: int, data: bytes) -> Waiter:
        """Decode a ``struct futex_q``."""
        task, lock, pi_state = (
            U64.unpack_from(data, offset)[0]
            for offset in (self._task, self._lock, self._pi_state)
        )
        key = self._decoded(data, self._key)
        (bitset,) = U32.unpack_from(data, self._bitset)
        return Waiter(address, task, lock, key, pi_state, bitset)

    def read(self, address: int) -> Waiter:
        """Read a ``struct futex_q``.

        :raises drgn.FaultError: if it cannot be read
        """
        return self.waiter(address, self._reader.read(address, self._size))

    def key(self, address: int) -> FutexKey:
        """Read a ``union futex_key``.

        :raises drgn.FaultError: if it cannot be read
        """
        return self._decoded(self._reader.read(address, _KEY.size), 0)

    def _decoded(self, data: bytes, start: int) -> FutexKey:
        """Decode a ``union futex_key``."""
        owner, word, offset = _KEY.unpack_from(data, start)
        return FutexKey(owner, word, offset, self._page_size)

    def on_stack(self, base: int, words: Addresses, task: int) -> Iterator[Waiter]:
        """Yield possible waiters of a task on its own stack, innermost first.

        Only one that is on the chain of its bucket is real: see :meth:`chain`.

        :param base: Address of the first word.
        """
        data = words.tobytes()
        for row in np.flatnonzero(words == np.uint64(task)).tolist():
            start = 8 * row - self._task
            if start < 0 or start + self._size > len(data):
                continue
            # Most pointers to the task are in no waiter.
            following, previous = LIST_HEAD.unpack_from(data, start + self._node)
            if min(following, previous) < KERNEL_HALF:
                continue
            waiter = self.waiter(base + start, data[start : start + self._size])
            linked = waiter.lock >= KERNEL_HALF
            # For a file the word is the index of a page, otherwise its address.
            page_size = self._page_size
            aligned = waiter.key.of_inode or waiter.key.word % page_size == 0
            if linked and aligned and waiter.key.offset < page_size:
                yield waiter

    def chain(self, lock: int, limit: int = MAX_WAITERS) -> Iterator[Waiter]:
        """Read the waiters on the chain of a bucket.

        On a running kernel a chain may change: reading ends at another bucket's waiter.

        :param lock: Address of the lock of the bucket.
        :param limit: Maximum number of waiters.
        """
        head = lock - self._bucket_lock + self._chain
        try:
            (node,) = U64.unpack(self._reader.read(head, 8))
        except UNREADABLE as error:
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
            except UNREADABLE as error:
                self._broken(f"a chain of waiters breaks off: {error}")
                return
            waiter = self.waiter(address, data)
            if waiter.lock != lock:
                self._broken("a chain of waiters changed, or is damaged")
                return
            yield waiter
            (node,) = U64.unpack_from(data, self._node)

    def all(self, mms: Iterable[int] = ()) -> Iterator[Waiter]:
        """Read all waiters, in the tables of all processes and in private tables.

        :param mms: Address of each ``struct mm_struct`` that may have a private table.
        """
        tables = self._private_tables(mms)
        try:
            tables = [*self._common_tables(), *tables]
        except MissingError as error:
            self._broken(f"the hash table of waiters was not found: {error}")
        except UNREADABLE as error:
            self._broken(f"cannot read the hash tables of waiters: {error}")
        for start, count in tables:
            yield from self._table(start, count)

    def _table(self, start: int, count: int) -> Iterator[Waiter]:
        """Read all waiters of one array of buckets."""
        if not start or not 0 < count <= _MAX_BUCKETS:
            self._broken("a hash table of waiters is damaged")
            return
        size = count * self._bucket_size
        granule = PAGE // self._bucket_size * self._bucket_size or self._bucket_size
        data, gaps = self._reader.read_around_gaps(start, size, granule)
        if gaps:
            self._broken("cannot read a part of a hash table of waiters")
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
        """Return address and number of buckets of each table that processes share.

        :raises drgn.FaultError: if a structure that leads to them cannot be read
        :raises MissingError: if the kernel has no such tables
        """
        prog = self._reader.prog
        try:
            # This variable is new in "futex: Use runtime constants for __futex_hash()
            # hot path" (after v7.1).
            mask = find_variable(prog, "__futex_mask").value_()
        except MissingError:
            pass
        else:
            return [(table, mask + 1) for table in self._nodes(self._queues())]
        data = find_variable(prog, "__futex_data")
        if data.type_.has_member("hashmask"):
            # One table per node: "futex: Implement FUTEX2_NUMA" (in v6.16)
            mask = data.hashmask.value_()
            queues = data.queues.address_
            return [(table, mask + 1) for table in self._nodes(queues)]
        return [(data.queues.value_(), data.hashsize.value_())]

    def _queues(self) -> int:
        """Find the array of pointers to the shared tables, one per NUMA node.

        :raises drgn.FaultError: if the variable or code with its address cannot be read
        :raises MissingError: if its address is unknown
        """
        try:
            queues: int = find_variable(self._reader.prog, "__futex_queues").value_()
        except MissingError:
            # Compilers drop the variable, as only runtime constants in code are used.
            return self._queues_in_code()
        return queues

    def _queues_in_code(self) -> int:
        for name in _HASHES:
            start = self._layout.symbol(name)
            if start is None:
                continue
            code = self._reader.read(start, _CODE_BYTES)
            for constant in _CONSTANT.findall(code):
                (queues,) = U64.unpack(constant)
                if self._has_tables(queues):
                    return int(queues)
        raise MissingError("no variable has its address, and no known code")

    def _has_tables(self, queues: int) -> bool:
        """Return whether an array points at tables, by the chains of first buckets."""
        try:
            heads = [table + self._chain for table in self._nodes(queues)]
            firsts = [self._layout.word(head) for head in heads]
            return bool(heads) and heads == [
                self._layout.word(first + _PREVIOUS) for first in firsts
            ]
        except UNREADABLE:
            return False

    def _nodes(self, queues: int) -> list[int]:
        """Read the pointers to tables, one per NUMA node; skip null pointers."""
        prog = self._reader.prog
        try:
            count = int(find_variable(prog, "nr_node_ids").value_())
        except MissingError:
            count = 1
        tables = self._reader.words(queues, min(max(count, 1), 1024))
        return [table for table in tables.tolist() if table]

    def _private_tables(self, mms: Iterable[int]) -> list[tuple[int, int]]:
        """Return address and number of buckets of each private table.

        They exist since "futex: Add basic infrastructure for local task local hash" (in
        v6.16). Newer kernels have the pointer to the table in nested structures.
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
            except UNREADABLE as error:
                self._broken(f"cannot read a process's hash table of waiters: {error}")
        return found

    def _broken(self, text: str) -> None:
        self._losses.lose(Loss.FUTEX_CHAINS, text)


@per_context
def futexes(context: LockContext) -> Futexes:
    """Return the reader of waiters on futexes.

    :raises MissingError: if the types are unknown
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
    """Return all waiters by address of the task, and the number of waiters by futex.

    :raises MissingError: if the types are unknown
    """
    by_task: dict[int, list[Waiter]] = {}
    for waiter in _all_waiters(context):
        by_task.setdefault(waiter.task, []).append(waiter)
    return by_task, Counter(waiter.key for waiter in _all_waiters(context))


@per_context
def futex_queues(context: LockContext) -> dict[FutexKey, list[Waiter]]:
    """Return all waiters on futexes by futex, in the order of the chain.

    :raises MissingError: if the types are unknown
    """
    by_key: dict[FutexKey, list[Waiter]] = {}
    for waiter in _all_waiters(context):
        by_key.setdefault(waiter.key, []).append(waiter)
    return by_key


# --- The futexes that a task waits on, and the waiters on a futex.


_MAX_VECTOR = 128
"""``FUTEX_WAITV_MAX``."""


class RequestedFutexes:
    """The futexes that tasks of one context were found to wait on."""

    def __init__(self) -> None:
        self.waiters: dict[tuple[LockTypeName, object], Waiter] = {}
        """Maps type and key of each requested lock to one of its waiters."""

        self.words: dict[FutexKey, tuple[FutexKey, FutexKey]] = {}
        """Maps the key of a condition variable's start to the keys of its futexes."""


@per_context
def requested_futexes(context: LockContext) -> RequestedFutexes:
    """Return the futexes that tasks of a context were found to wait on."""
    return RequestedFutexes()


def waiters_on(context: LockContext, lock: Lock) -> list[Waiter]:
    """Return the waiters on a futex or condition variable; empty if not found."""
    key = lock.key
    if not isinstance(key, FutexKey):
        return []
    words = requested_futexes(context).words.get(key)
    if words is not None:
        # The two futexes hash to different buckets, so all tables are read.
        queues = futex_queues(context)
        waiters = [waiter for word in words for waiter in queues.get(word, ())]
    elif not context.alone:
        waiters = futex_queues(context).get(key, [])
    else:
        first = requested_futexes(context).waiters.get((lock.type, key))
        chain = futexes(context).chain(first.lock) if first else ()
        waiters = [waiter for waiter in chain if waiter.key == key]
    # Waiters that will be requeued to a PI futex do not have its pi_state yet.
    return [w for w in waiters if bool(w.pi_state) == (lock.type == "pi_futex")]


def waiters_of(
    context: LockContext, case: BlockedTask
) -> tuple[list[Waiter], Counter[FutexKey] | None]:
    """Find the ``struct futex_q`` of a task, and the number of waiters on each futex.

    :return: One, or those of ``futex_waitv()`` in the order of the call; empty if not
        found. The counts are ``None`` if there are too many waiters to read.
    """
    if context.alone:
        return _own_futexes(context, case)
    by_task, counts = futex_waiters(context)
    waiters = by_task.get(case.address, [])
    if not waiters:
        # The chain is damaged, or the task was queued after the chain was read.
        found = _found_by_stack(context)
        stack = case.address, case.stack.base
        if stack not in found:
            found[stack], _ = _own_futexes(context, case)
        waiters = found[stack]
    if len(waiters) < 2:
        return waiters, counts
    # Several waiters are in an array, so addresses are in the order of the call.
    return sorted(waiters, key=lambda waiter: waiter.address), counts


@per_context
def _found_by_stack(context: LockContext) -> dict[tuple[int, int], list[Waiter]]:
    """Maps a task and the first address of its stack to the waiters found there."""
    return {}


def _own_futexes(
    context: LockContext, case: BlockedTask
) -> tuple[list[Waiter], Counter[FutexKey] | None]:
    """Find what :func:`waiters_of` returns without reading all tables."""
    stack = case.stack
    for waiter in futexes(context).on_stack(stack.base, stack.words, case.address):
        # If not, it is left over from an earlier call, with the chain of that one.
        if not _is_queued(context, waiter):
            continue
        others = list(futexes(context).chain(waiter.lock, FEW_READS))
        counts = Counter(other.key for other in others)
        if len(others) >= FEW_READS:
            return [waiter], None
        if any(other.address == waiter.address for other in others):
            return [waiter], counts
    if case.call == "futex_waitv":
        return _vector(context, case), None
    return [], None


def _is_queued(context: LockContext, waiter: Waiter) -> bool:
    """Return whether the list neighbours of a waiter point back at it."""
    layout = context.layout
    node = waiter.address + layout.offset("futex_q", "list.node_list")
    try:
        following, previous = layout.word(node), layout.word(node + 8)
        return layout.word(following + 8) == node == layout.word(previous)
    except UNREADABLE:
        return False


def _vector(context: LockContext, case: BlockedTask) -> list[Waiter]:
    """Find the ``struct futex_q`` of a ``futex_waitv()``: an array on the heap."""
    count = case.arguments[1]
    if not 0 < count <= _MAX_VECTOR:
        return []
    size = context.layout.size("futex_vector")
    first = context.layout.offset("futex_vector", "q")
    for pointer in case.stack.data_pointers()[:MAX_CANDIDATES]:
        try:
            head = futexes(context).read(pointer + first)
            if head.task != case.address or head.lock < KERNEL_HALF:
                continue
            addresses = range(pointer + first, pointer + first + count * size, size)
            waiters = [futexes(context).read(address) for address in addresses]
        except UNREADABLE:
            continue
        if all(w.task == case.address and w.lock >= KERNEL_HALF for w in waiters):
            return waiters
    return []


# --- The addresses of futexes in user memory, and the threads that can own them.


_FEW_WAITERS = 8
"""Maximum number of waiters whose mappings are searched for a futex in a file."""

_MAX_PROCESSES = 4096
"""Maximum number of processes that map a file with a futex."""


class FutexPlace(Struct, frozen=True):
    """The address of a futex in the memory of one of its waiters."""

    task: int
    mm: int
    address: int
    inode: int
    """Address of the ``struct inode`` of the file with the futex; 0 if in no file."""


class _Users(Struct, frozen=True):
    """The processes that map a file."""

    mms: frozenset[int]
    spaces: frozenset[int]
    """Their PID namespaces, if known."""


class _MappedBy:
    """The processes that map files, and the tasks by ID, kept for one context."""

    def __init__(self, context: LockContext) -> None:
        self.users: dict[int, _Users] = {}
        """Maps the address of a ``struct inode`` to the processes that map it."""

        self.tasks: dict[tuple[int, int], int | None] = {}
        """Maps PID namespace and ID to a task."""

        tasks = context.tasks
        addresses: list[int] = tasks["address"].tolist()
        self.by_pid: dict[int, int] = dict(
            zip(tasks["pid"].tolist(), addresses, strict=True)
        )
        self.mms: dict[int, int] = dict(
            zip(addresses, tasks["mm"].tolist(), strict=True)
        )


@per_context
def _cache(context: LockContext) -> _MappedBy:
    return _MappedBy(context)


def find_futex(context: LockContext, waiter: Waiter) -> FutexPlace | None:
    """Find a futex in the memory of one of its waiters; ``None`` if not found."""
    key = waiter.key
    if key.address is not None:
        mm = _mm(context, waiter.task)
        return FutexPlace(waiter.task, mm, key.address, 0) if mm else None
    others = waiters_on(context, Lock("futex", None, key))[:_FEW_WAITERS]
    for task in dict.fromkeys([waiter.task, *(other.task for other in others)]):
        mm = _mm(context, task)
        for file in user_memory(context).shared_files(mm) if mm else ():
            address = file.start + (key.file_offset or 0) - file.first
            if file.sequence == key.object and file.start <= address < file.end:
                return FutexPlace(task, mm, address, file.inode)
    return None


def _mm(context: LockContext, task: int) -> int:
    """Return the address space of a task; 0 for a kernel thread."""
    known = _cache(context).mms.get(task)
    return context.layout.member(task, "task_struct", "mm") if known is None else known


def find_owner(context: LockContext, place: FutexPlace, tid: int) -> int | None:
    """Find the thread that has an ID and can use a futex; ``None`` unless it is unique.

    The ID is valid in the PID namespace of the owner. For a futex in a file, this may
    be any process that maps the file, also in another PID namespace than the waiter's.
    """
    mms, spaces = {place.mm}, {_namespace(context, place.task)}
    if place.inode:
        users = _users(context, place.inode)
        mms, spaces = mms | users.mms, spaces | users.spaces
    tasks = {_task(context, space, tid) for space in spaces - {0}} - {None}
    fits = [task for task in tasks if task is not None and _mm(context, task) in mms]
    return fits[0] if len(fits) == 1 else None


def _users(context: LockContext, inode: int) -> _Users:
    """Find the processes that map a file.

    :raises UNREADABLE: if there are too many, or a mapping cannot be read
    """
    users = _cache(context).users
    if inode not in users:
        mms = frozenset(_mapped_by(context, inode))
        owners = (lock_places(context).owner_of_mm(mm) for mm in mms)
        spaces = frozenset(_namespace(context, owner) for owner in owners if owner)
        users[inode] = _Users(mms, spaces)
    return users[inode]


def _mapped_by(context: LockContext, inode: int) -> set[int]:
    """Find the address spaces that map a file."""
    layout = context.layout
    mapping = layout.member(inode, "inode", "i_mapping")
    root = mapping + layout.offset("address_space", "i_mmap.rb_root", "i_mmap")
    node, mm = (
        layout.offset("vm_area_struct", member) for member in ("shared.rb", "vm_mm")
    )
    size = max(node + layout.size("rb_node"), mm + 8)
    name = "the mappings of a file with futexes"
    found: set[int] = set()
    records = tree_records(context.reader, root, node, size, context.losses, name)
    for count, (_, data) in enumerate(records):
        if count >= _MAX_PROCESSES:
            raise DamagedDataError("too many processes map it", inode)
        found.add(unsigned(data, mm, 8))
    return found


def _namespace(context: LockContext, task: int) -> int:
    """Return the PID namespace of a task; 0 if the task is dead."""
    layout = context.layout
    pid = layout.member(task, "task_struct", "thread_pid")
    if pid < KERNEL_HALF:
        return 0
    level = layout.member(pid, "pid", "level")
    first = pid + layout.offset("pid", "numbers[0].ns")
    return layout.word(first + level * layout.size("upid"))


def _task(context: LockContext, space: int, tid: int) -> int | None:
    """Find the thread with an ID in a PID namespace."""
    cache = _cache(context)
    if (space, tid) in cache.tasks:
        return cache.tasks[space, tid]
    initial = space == context.layout.symbol("init_pid_ns")
    task = cache.by_pid.get(tid) if initial else None
    if task is None:
        level = context.layout.member(space, "pid_namespace", "level")
        if level > MAX_LEVEL:
            raise DamagedDataError("a namespace of no known level", space)
        task = PidTree(context.reader, space, level).linked(tid)
    cache.tasks[space, tid] = task
    return task
