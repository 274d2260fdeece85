# SPDX-License-Identifier: LGPL-2.1-or-later

"""IDs and names of the locks of a snapshot."""

from collections.abc import Iterable

import numpy as np

from msatools.locks.base.blocked_tasks import read_cases
from msatools.locks.base.lock import Lock
from msatools.locks.names.names import LockNames, Name
from msatools.locks.user.userlocks import FUTEX
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted


class LockIds:
    """The IDs and names of locks, each looked up once."""

    def __init__(self, snapshot: WaitSnapshot, stack_size: int) -> None:
        """
        :param stack_size: Bytes of a kernel stack.
        """
        self._snapshot = snapshot
        self._stack_size = stack_size
        self._lookup = LockNames(snapshot.context)
        self._ids: dict[Lock, str] = {}
        self._names: dict[Lock, Name] = {}
        self._taken: set[str] = set()

    def __getitem__(self, lock: Lock) -> str:
        """Return the ID of a lock that was added."""
        return self._ids[lock]

    def __contains__(self, lock: Lock) -> bool:
        return lock in self._ids

    def name(self, lock: Lock) -> Name:
        """Return the name of a lock that was added."""
        return self._names[lock]

    def add(self, locks: Iterable[Wanted]) -> None:
        """Look up the names of locks, each by its first waiter."""
        wanted = [want for want in locks if want.lock not in self._ids]
        snapshot = self._snapshot
        firsts = np.array(sorted({want.rows[0] for want in wanted}), np.intp)
        cases = read_cases(snapshot.context, snapshot.now, firsts, self._stack_size)
        by_row = {case.row: case for case in cases}
        for want in wanted:
            name = self._lookup.name(want.lock, [by_row[want.rows[0]]])
            id_ = self._unique(lock_id(snapshot, want, name))
            # The crowd that waits for a futex has the ID of the futex.
            for lock in (want.lock, snapshot.crowd_lock(want)):
                self._ids.setdefault(lock, id_)
                self._names.setdefault(lock, name)

    def _unique(self, id_: str) -> str:
        if id_ in self._taken:
            id_ = f"{id_} ({len(self._taken)})"
        self._taken.add(id_)
        return id_


def lock_id(snapshot: WaitSnapshot, want: Wanted, name: Name | None = None) -> str:
    """
    Return the ID of a lock: its type and address, or the file that it is in.

    :param name: The name of a futex in a file has the number of its inode.
    """
    lock = want.lock
    if lock.type not in FUTEX.names:
        bit = f" bit {lock.key}" if lock.type == "bit_wait" else ""
        return f"{lock.type} {lock.address or 0:#x}{bit}"
    if lock.address is not None:
        tgid = int(snapshot.tasks["tgid"][want.rows[0]])
        return f"{lock.type} {tgid}:{lock.address:#x}"
    key = lock.key
    assert key is not None
    assert not isinstance(key, int)
    number = name.inode if name else None
    inode = f"{key.object:#x}" if number is None else number
    return f"{lock.type} inode {inode}+{key.file_offset or 0:#x}"
