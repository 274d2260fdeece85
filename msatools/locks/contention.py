# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Locks that are hot and short: what looks within an interval meet.

A wait that is shorter than a look is in no report of who waits for whom, as all that
has changed while it was looked at is left out there. Each task that a look meets in a
wait was in it at some moment, all the same, and with many looks their number tells as
much as lockstat does: by Little's law the time that tasks wait for a lock, in each
second, is the mean number of them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msatools.locks.base.lock import Lock
from msatools.locks.report import Contended, OwnerSeen
from msatools.locks.wait_snapshot import WaitSnapshot
from msatools.tasks.classes import TaskClass
from msatools.tasks.identity import comm_text

MAX_OWNERS = 8
"""Owners of one lock that are told, those first that were met most often."""


@dataclass(frozen=True)
class Met:
    """What one look met of one lock."""

    lock: Lock
    waiters: int
    owners: Sequence["SeenOwner"]


@dataclass(frozen=True)
class SeenOwner:
    """Who had it, and what it was doing."""

    pid: int
    comm: str
    where: str


def met(scene: WaitSnapshot) -> Iterator[Met]:
    """Tell which locks a look has met."""
    tasks = scene.tasks
    for want in scene.crowds:
        owners = [
            SeenOwner(
                int(tasks["pid"][own.row]),
                comm_text(tasks["comm"][own.row]),
                _where(scene, own.row),
            )
            for own in want.owners
        ]
        yield Met(want.lock, len(want.rows), owners)


def _where(scene: WaitSnapshot, row: int) -> str:
    """Say where a task stands: in which function it sleeps, or that it does not."""
    task_class = TaskClass(int(scene.now.classes[row]))
    wait = scene.now.waits[int(scene.now.stacks.index[row])]
    function = wait.caller or wait.function
    return f"{task_class.name} {function}" if function else task_class.name


@dataclass
class _LockSums:
    looks: int = 0
    waiters: int = 0
    squares: int = 0
    most: int = 0
    owners: Counter[SeenOwner] = field(default_factory=Counter)


class Contention:
    """Sums up the looks of an interval."""

    def __init__(self) -> None:
        self._looks = 0
        self._locks: dict[Lock, _LockSums] = {}

    def add(self, met: Iterable[Met]) -> None:
        """Add one look, with the locks that tasks waited for."""
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
        """How many there were."""
        return self._looks

    def ranked(self) -> list[Lock]:
        """Give the locks, those first for which most time was waited."""
        return sorted(
            self._locks, key=lambda lock: (-self._locks[lock].waiters, str(lock))
        )

    def tell(
        self, lock: Lock, id_: str, name: str | None, interval_ns: int
    ) -> Contended:
        """Tell what was met of a lock.

        :param id_: What the report calls it.
        :param interval_ns: The time over which looks were taken.
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
    """Tell the standard error of the mean number of waiters."""
    if looks < 2:
        return float(sums.waiters)
    variance = (sums.squares - sums.waiters**2 / looks) / (looks - 1)
    return math.sqrt(max(variance, 0) / looks)
