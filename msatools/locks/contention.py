# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Contention of locks, by samples within an interval.

A wait that is shorter than a snapshot takes is in no report of waits, as waits that
change while they are read are left out. But each waiter in a sample did wait at some
moment. With many samples their number is as good as lockstat: by Little's law, the time
per second that tasks wait for a lock is the mean number of waiters.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, field

from msatools.locks.base.lock import Lock
from msatools.locks.report import Contended, OwnerSeen
from msatools.locks.wait_snapshot import WaitSnapshot
from msatools.tasks.classes import TaskClass
from msatools.tasks.identity import comm_text

MAX_OWNERS = 8
"""Maximum number of owners of one lock to report, the most frequent first."""


class Met(Struct, frozen=True):
    """The waiters and owners of one lock in one sample."""

    lock: Lock
    waiters: int
    owners: Sequence["SeenOwner"]


class SeenOwner(Struct, frozen=True):
    """An owner of a lock, and what it was doing."""

    pid: int
    comm: str
    where: str


def met(snapshot: WaitSnapshot) -> Iterator[Met]:
    """Yield the locks that tasks wait for in a snapshot."""
    tasks = snapshot.tasks
    for want in snapshot.crowds:
        owners = [
            SeenOwner(
                int(tasks["pid"][own.row]),
                comm_text(tasks["comm"][own.row]),
                _where(snapshot, own.row),
            )
            for own in want.owners
        ]
        yield Met(want.lock, len(want.rows), owners)


def _where(snapshot: WaitSnapshot, row: int) -> str:
    """Return the class of a task, and the function that it sleeps in."""
    task_class = TaskClass(int(snapshot.now.classes[row]))
    wait = snapshot.now.waits[int(snapshot.now.stacks.index[row])]
    function = wait.caller or wait.function
    return f"{task_class.name} {function}" if function else task_class.name


class _LockSums(Struct):
    looks: int = 0
    waiters: int = 0
    squares: int = 0
    most: int = 0
    owners: Counter[SeenOwner] = field(default_factory=Counter)


class Contention:
    """Sums up the samples of an interval."""

    def __init__(self) -> None:
        self._looks = 0
        self._locks: dict[Lock, _LockSums] = {}

    def add(self, met: Iterable[Met]) -> None:
        """Add one sample: the locks that tasks waited for."""
        self._looks += 1
        for each in met:
            sums = self._locks.setdefault(each.lock, _LockSums())
            sums.looks += 1
            sums.waiters += each.waiters
            sums.squares += each.waiters**2
            sums.most = max(sums.most, each.waiters)
            sums.owners.update(each.owners)

    @property
    def looks(self) -> int:
        """Number of samples that were added."""
        return self._looks

    def ranked(self) -> list[Lock]:
        """Return the locks, the one with the longest waits first."""
        return sorted(
            self._locks, key=lambda lock: (-self._locks[lock].waiters, str(lock))
        )

    def contended(
        self, lock: Lock, id_: str, name: str | None, interval_ns: int
    ) -> Contended:
        """Return the contention of a lock.

        :param id_: Its ID in the report.
        :param interval_ns: The time over which samples were taken.
        """
        sums, looks = self._locks[lock], self._looks
        mean = sums.waiters / looks
        return Contended(
            lock=id_,
            type=lock.type,
            name=name,
            looks=looks,
            share=sums.looks / looks,
            mean_queue=mean,
            max_queue=sums.most,
            wait_ns=round(mean * interval_ns),
            error_ns=round(_error(sums, looks) * interval_ns),
            owners=tuple(
                OwnerSeen(
                    pid=owner.pid, comm=owner.comm, looks=count, where=owner.where
                )
                for owner, count in sums.owners.most_common(MAX_OWNERS)
            ),
        )


def _error(sums: _LockSums, looks: int) -> float:
    """Return the standard error of the mean number of waiters."""
    if looks < 2:
        return float(sums.waiters)
    variance = (sums.squares - sums.waiters**2 / looks) / (looks - 1)
    return math.sqrt(max(variance, 0) / looks)
