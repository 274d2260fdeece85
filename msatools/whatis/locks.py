# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks and futexes at addresses, with owners and waiters."""

import contextlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.report import Loss
from msatools.locks.c_library import CONDITION_BYTES
from msatools.locks.futexes import Waiter, find_futex, futex_queues, requested_futexes
from msatools.locks.lock_types import holders_of, queue_of, readers_of
from msatools.locks.locks import collect_locks
from msatools.locks.report import FutexKey, Holder, Lock, LockRow, LockTypeName
from msatools.locks.report_builder import LocksOptions
from msatools.locks.user_locks import futex_requests
from msatools.locks.user_memory import SharedFile, user_memory
from msatools.program import TargetError
from msatools.program.model import Address, Target
from msatools.whatis.lookup import LOCKS, Lookup
from msatools.whatis.model import LockOwner, LockThere

# --- Locks that lie at an address: their owners and waiters, as the locks record them.


def read_lock(lookup: Lookup, type_: LockTypeName, address: int) -> LockThere | None:
    """Return a lock by its type and address; ``None`` if it cannot be read."""
    lock = Lock(type_, address)
    try:
        return make_lock(lookup, lock, address, f"{type_} {address:#x}")
    except LOST as error:
        lookup.losses.lose(Loss.LOCKS, f"a lock cannot be read: {error}")
        return None


def make_lock(lookup: Lookup, lock: Lock, address: int, id_: str) -> LockThere:
    """Read the owners and waiters of a lock.

    :param address: Address to report; *lock* itself may have none, as a shared futex.
    :raises drgn.FaultError: if it cannot be read
    :raises MissingError: if its types are unknown
    """
    context = lookup.locks
    holders = holders_of(context, lock)
    queue = queue_of(context, lock)
    waiters = None
    if queue is not None:
        pids = (context.pid(waiter.task) for waiter in queue)
        waiters = tuple(pid for pid in pids if pid is not None)
    return LockThere(
        id=id_,
        type=lock.type,
        address=Address(address),
        owners=tuple(_owner(lookup, holder) for holder in holders),
        waiters=waiters,
        readers=readers_of(context, lock),
    )


def from_waits(row: LockRow) -> LockThere | None:
    """Convert a lock of msa-locks; return ``None`` if it has no address."""
    if row.address is None:
        return None
    return LockThere(
        id=row.id,
        type=row.type,
        address=row.address,
        owners=tuple(
            LockOwner(pid=owner.pid, comm=owner.comm, confidence=owner.confidence)
            for owner in row.owners
        ),
        waiters=row.waiters,
        readers=row.readers,
    )


def _owner(lookup: Lookup, holder: Holder) -> LockOwner:
    task = lookup.task(holder.task)
    return LockOwner(pid=task.pid, comm=task.comm, confidence=holder.confidence)


# --- Locks in memory of unknown type, known by a task that waits for them.
#
# BTF has no types of the kernel's variables, but for per-CPU ones: nothing says that
# cgroup_mutex is a mutex. But it links to its first waiter, on the stack of a task, and
# that task is in mutex_lock().


_LOCK_BYTES = 128
"""Upper bound of the size of a lock, without options that debug locks."""

_MAX_TASKS = 4


class WaitedLocks:
    """Finds locks that tasks wait for; only those tasks' waits are read."""

    def __init__(self, lookup: Lookup, target: Target) -> None:
        self._lookup = lookup
        self._target = target
        self._rows = lru_cache(maxsize=None)(self._read)

    def find(self, start: int, offset: int) -> LockThere | None:
        """Return the lock that begins at an address, if a task waits for it.

        :param start: Where a variable or an object begins.
        :param offset: Offset of the address from *start*, which has to be in the lock.
        """
        if offset >= _LOCK_BYTES:
            return None
        for row in self._rows(start):
            if row.address == start and offset < _size(self._lookup, row):
                return from_waits(row)
        return None

    def _read(self, start: int) -> tuple[LockRow, ...]:
        """Return the locks that the tasks wait for whose stacks an address links to."""
        tasks = _linked_tasks(self._lookup, start)
        if not tasks:
            return ()
        try:
            # Idle tasks have no PID, and wait for no lock.
            pids = [pid for task in tasks if (pid := self._lookup.task(task).pid)]
            if not pids:
                return ()
            options = LocksOptions(pids=tuple(pids[:_MAX_TASKS]))
            prog = self._lookup.prog
            return collect_locks(prog, target=self._target, options=options).locks
        except (*LOST, TargetError) as error:
            # Such as a task that has ended since.
            self._lookup.losses.lose(
                Loss.LOCKS, f"cannot read the waiters of a lock: {error}"
            )
            return ()


def _linked_tasks(lookup: Lookup, start: int) -> list[int]:
    """Return the tasks to whose stacks the words at an address point."""
    try:
        data = lookup.reader.read(start, _LOCK_BYTES)
    except UNREADABLE:
        return []
    words = np.frombuffer(data, np.uint64)
    stacks = words & np.uint64(-lookup.stack_bytes & (1 << 64) - 1)
    known = lookup.stacks
    tasks = {known[stack]: None for stack in stacks.tolist() if stack in known}
    return [*tasks]


def _size(lookup: Lookup, row: LockRow) -> int:
    sizes = [1]
    for tag, type_ in LOCKS.items():
        if type_ == row.type:
            with contextlib.suppress(MissingError):
                sizes.append(lookup.structs.size(tag))
    return max(sizes)


# --- Futexes that lie at addresses of processes, if tasks wait for them.


_WORD = 4
"""Bytes of a futex."""


def futex_at(lookup: Lookup, mm: int, address: int) -> LockThere | None:
    """Return the futex at an address of a process; ``None`` if no task waits for one.

    :param mm: Address of the ``struct mm_struct`` of the process.
    """
    context = lookup.locks
    word = address - address % _WORD
    try:
        queues = futex_queues(context)
        file = None
        if any(key.of_inode for key in queues):
            file = user_memory(context).shared_file(mm, word)
        for key, waiters in queues.items():
            there = _address(lookup, key, waiters[0], mm, file)
            if there is None or not 0 <= there - word < CONDITION_BYTES:
                continue
            for lock in _locks(lookup, waiters[0]):
                start = there - _bytes_before(key, lock)
                if word in (there, start):
                    return make_lock(lookup, lock, start, _id(lookup, lock, mm, file))
    except LOST as error:
        lookup.losses.lose(Loss.LOCKS, f"a futex cannot be read: {error}")
    return None


def _address(
    lookup: Lookup, key: FutexKey, waiter: Waiter, mm: int, file: SharedFile | None
) -> int | None:
    """Return the address of a futex in a process; ``None`` if it is not mapped."""
    if key.file_offset is not None:
        if file is None or file.sequence != key.object:
            return None
        return file.start + key.file_offset - file.first
    place = find_futex(lookup.locks, waiter)
    return place.address if place is not None and place.mm == mm else None


def _locks(lookup: Lookup, waiter: Waiter) -> Iterator[Lock]:
    """Yield the lock that a waiter waits for; a condition variable has two futexes."""
    words = requested_futexes(lookup.locks).words
    for request in futex_requests(lookup.locks, waiter.task):
        key = request.lock.key
        if isinstance(key, FutexKey) and waiter.key in words.get(key, (key,)):
            yield request.lock


def _bytes_before(key: FutexKey, lock: Lock) -> int:
    """Return the number of bytes from the start of a lock to one of its futexes."""
    start = lock.key
    assert isinstance(start, FutexKey)
    if key.file_offset is not None:
        return key.file_offset - (start.file_offset or 0)
    return (key.address or 0) - (start.address or 0)


def _id(lookup: Lookup, lock: Lock, mm: int, file: SharedFile | None) -> str:
    """Return the ID of a futex, as in msa-locks."""
    key = lock.key
    if lock.address is None and file is not None and isinstance(key, FutexKey):
        inode = lookup.structs.member(file.inode, "inode", "i_ino")
        return f"{lock.type} inode {inode}+{key.file_offset or 0:#x}"
    process = lookup.process_of(mm)
    pid = 0 if process is None else process.pid
    return f"{lock.type} {pid}:{lock.address or 0:#x}"
