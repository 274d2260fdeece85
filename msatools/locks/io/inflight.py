# SPDX-License-Identifier: LGPL-2.1-or-later

"""The I/O in flight of disks, and the way from a stacked disk to the hardware."""

from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, DamagedDataError
from msatools.kernel.losses import Loss
from msatools.kernel.percpu import read_percpu
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.io.bios import all_bios
from msatools.locks.io.disks import Disk, Disks, all_disks
from msatools.locks.io.model import DiskIo
from msatools.locks.io.requests import QueueState, all_requests
from msatools.target.addresses import KERNEL_HALF

STUCK_NS = 30 * 10**9
"""Age of I/O that is stuck for certain: drivers usually give up after as long."""

_MAX_HEIGHT = 32
"""Maximum number of disks stacked on each other."""


class Way(Struct, frozen=True):
    """The way from a disk down to the one that holds its I/O."""

    disks: tuple[Disk, ...]
    """The first is the one that was asked for; the last holds the I/O."""

    below: tuple[Disk, ...]
    """Disks further down, which have nothing of it; a single one each."""


class InFlightIo:
    """The I/O of disks, each read once per context."""

    def __init__(self, context: LockContext, disks: Disks) -> None:
        self._context = context
        self._disks = disks
        self._known: dict[int, DiskIo] = {}

    def all(self) -> tuple[DiskIo, ...]:
        """Return all disks: those with the oldest I/O first, idle ones last."""
        return self._rows(self._disks.all)

    def named(self, names: Container[str]) -> tuple[DiskIo, ...]:
        """Return some disks, in the same order."""
        return self._rows(disk for disk in self._disks.all if disk.name in names)

    def _rows(self, disks: Iterable[Disk]) -> tuple[DiskIo, ...]:
        return tuple(sorted(map(self.of_disk, disks), key=_weight))

    def of_disk(self, disk: Disk) -> DiskIo:
        """Return a disk with its I/O in flight; what cannot be read is a loss."""
        if disk.address not in self._known:
            self._known[disk.address] = self._read(disk)
        return self._known[disk.address]

    def _read(self, disk: Disk) -> DiskIo:
        context = self._context
        queue: QueueState | None = None
        reads = writes = None
        try:
            queue = all_requests(context).of_disk(disk)
            if queue is not None:
                reads, writes = queue.reads, queue.writes
            else:
                reads, writes = self._counted(disk)
        except LOST as error:
            context.losses.lose(Loss.DISKS, f"cannot read I/O of {disk.name}: {error}")
        held = all_bios(context).of_disk(disk)
        return DiskIo(
            name=disk.name,
            device=disk.numbers,
            reads=reads,
            writes=writes,
            scheduler=queue.scheduler if queue else None,
            depth=queue.depth if queue else None,
            is_suspended=self._disks.is_suspended(disk),
            is_frozen=bool(queue and queue.is_frozen),
            is_quiesced=bool(queue and queue.is_quiesced),
            no_completion_ns=self._no_completion_ns(disk),
            below=tuple(each.name for each in self._disks.below(disk)),
            requests=(*(queue.requests if queue else ()), *held),
        )

    def _counted(self, disk: Disk) -> tuple[int, int]:
        """Sum the counters of a disk without requests, as part_in_flight_rw() does."""
        layout, reader = self._context.layout, self._context.reader
        stats = layout.member(disk.part0, "block_device", "bd_stats")
        start = layout.offset("disk_stats", "in_flight")
        if stats == 0:
            raise DamagedDataError("no statistics", disk.part0)
        places = read_percpu(reader, self._context.losses).at(stats + start)
        records, readable = reader.read_records(places, 16)
        if not readable.all():
            raise DamagedDataError("statistics of some CPUs", stats)
        reads, writes = records.view(np.int64).sum(axis=0).tolist()
        return max(0, reads), max(0, writes)

    def _no_completion_ns(self, disk: Disk) -> int | None:
        """Return how long ago a disk's last completion is at least."""
        context = self._context
        jiffies, now = all_requests(context).jiffies, context.monotonic_ns
        if jiffies is None or now is None or disk.part0 < KERNEL_HALF:
            return None
        try:
            stamp = context.layout.member(disk.part0, "block_device", "bd_stamp")
        except LOST:
            return None
        moment = jiffies.time_ns(stamp) if stamp else None
        return None if moment is None else max(0, now - moment)

    def way(self, disk: Disk) -> Way:
        """Follow the I/O of a disk down to the disk that holds it.

        It ends at a disk that holds I/O back, at one below which nothing is in flight,
        or more than one disk has something in flight, and at hardware.
        """
        path = [disk]
        while len(path) < _MAX_HEIGHT and not self._holds(path[-1]):
            busy = [
                each
                for each in self._disks.below(path[-1])
                if each not in path and self.has_io(each)
            ]
            if len(busy) != 1:
                break
            path.append(busy[0])
        return Way(tuple(path), tuple(self._rest(path)))

    def _rest(self, path: Sequence[Disk]) -> Iterator[Disk]:
        seen = list(path)
        while len(seen) < _MAX_HEIGHT:
            below = [each for each in self._disks.below(seen[-1]) if each not in seen]
            if len(below) != 1:
                return
            seen.append(below[0])
            yield below[0]

    def _holds(self, disk: Disk) -> bool:
        """Return whether a disk itself holds I/O back."""
        stages = ("deferred", "delayed")
        row = self.of_disk(disk)
        return row.is_suspended or any(each.stage in stages for each in row.requests)

    def has_io(self, disk: Disk) -> bool:
        """Return whether a disk has I/O in flight, or is suspended."""
        row = self.of_disk(disk)
        return row.is_suspended or bool(row.requests or row.reads or row.writes)


def _weight(row: DiskIo) -> tuple[int, int, str]:
    oldest = max((each.age_ns or 0 for each in row.requests), default=-1)
    return -oldest, -((row.reads or 0) + (row.writes or 0)), row.name


@per_context
def in_flight(context: LockContext) -> InFlightIo:
    """Return the reader of the I/O in flight of a context."""
    return InFlightIo(context, all_disks(context))


def stuck_io(context: LockContext, min_age_ns: int = STUCK_NS) -> tuple[DiskIo, ...]:
    """
    Return the disks that hold I/O for long, those with the oldest first.

    Of disks that are stacked on each other, only those that hold it are returned.
    """
    io, disks = in_flight(context), all_disks(context)
    found: dict[int, DiskIo] = {}
    for disk in disks.all:
        row = io.of_disk(disk)
        if any((each.age_ns or 0) >= min_age_ns for each in row.requests):
            last = io.way(disk).disks[-1]
            found[last.address] = io.of_disk(last)
    return tuple(sorted(found.values(), key=_weight))
