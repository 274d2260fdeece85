# SPDX-License-Identifier: LGPL-2.1-or-later

"""Locks in memory of unknown type, known by a task that waits for them.

BTF has no types of the kernel's variables, but for per-CPU ones: nothing says that
``cgroup_mutex`` is a mutex. But it links to its first waiter, on the stack of a task,
and that task is in mutex_lock().
"""

import contextlib
from functools import lru_cache

import numpy as np

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.locks.report import LockRow
from msatools.target import TargetError
from msatools.target.model import Target
from msatools.whatis.locks import from_waits
from msatools.whatis.lookup import Lookup
from msatools.whatis.members import LOCKS
from msatools.whatis.model import LockThere

_LOCK_BYTES = 128
"""No lock is larger, without the options that debug locks."""

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
        :param offset: The offset in it that is asked for, which has to be in the lock.
        """
        if offset >= _LOCK_BYTES:
            return None
        for row in self._rows(start):
            if row.address == start and offset < _size(self._lookup, row):
                return from_waits(row)
        return None

    def _read(self, start: int) -> tuple[LockRow, ...]:
        """Return the locks that tasks wait for that are linked from an address."""
        tasks = _linked_tasks(self._lookup, start)
        if not tasks:
            return ()
        # It is rarely asked for, and slow to import.
        from msatools.locks.locks import collect_locks
        from msatools.locks.options import LocksOptions

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
    """Return the tasks on whose stacks words at an address point."""
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
