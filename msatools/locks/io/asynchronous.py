# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which tasks wait for I/O of a disk by a ring (io_uring) or an AIO context.

Such a task sleeps like one that has nothing to do. The I/O leads back to it: the bios
of a request have the ``struct kiocb`` of a direct read or write (fs/iomap/direct-io.c,
block/fops.c). It is the beginning of io_uring's request (``struct io_kiocb``) or of
AIO's (``struct aio_kiocb``), which have the ring or context on whose queue the task is.
I/O of a disk that is stacked on others, as of the device mapper, is not followed: the
bios below are copies.
"""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from msatools.errors import LOST
from msatools.kernel.structs import Booleans
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.events.waitqueues import queue
from msatools.locks.io.disks import Disk, all_disks
from msatools.locks.io.inflight import in_flight
from msatools.locks.io.model import InFlight
from msatools.target.addresses import KERNEL_HALF

SLOW_NS = 1_000_000_000
"""Age of I/O from which on who waits for it in such a way is blocked: many programs
always have I/O in flight, and a disk answers sooner."""

AIO = ("read_events", "do_io_getevents")
"""Where a task waits for events of an AIO context."""

CANCEL = "io_uring_cancel_generic"
"""Where a process that ends waits for all that it has asked its rings for."""

_ENDS = (
    ("iomap_dio_bio_end_io", "iomap_dio", ""),
    ("blkdev_bio_end_io", "blkdev_dio", ""),
    # The only bio is part of these.
    ("blkdev_bio_end_io_async", "blkdev_dio", "bio"),
    ("iomap_dio_simple_end_io", "iomap_dio_simple", "bio"),  # seen in 7.3
    ("dio_bio_end_aio", "dio", ""),
)
"""By the function that ends a bio: what has its kiocb, and the bio's place in it."""

_OF_RING = ("io_complete_rw", "io_complete_rw_iopoll")
_OF_AIO = ("aio_complete_rw",)
_MAX_BIOS = 1 << 8
"""Maximum number of bios of a request to look at."""

OF_BIOS = ("deferred", "delayed")
"""Stages of bios that a stacked disk holds."""

_DEFER_TASKRUN = 1 << 13
"""``IORING_SETUP_DEFER_TASKRUN``: only the task that submits waits, and on no queue."""


class AsynchronousIo:
    """Slow I/O in flight by the tasks that wait for it; only direct I/O is found."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._layout = context.layout
        self._symbols = {
            name: context.layout.symbol(name)
            for name in (*(end for end, _, _ in _ENDS), *_OF_RING, *_OF_AIO)
        }
        self._of_tasks: dict[int, set[Disk]] = {}
        """The disks by the address of a task that waits."""

        self._of_processes: dict[int, set[Disk]] = {}
        """By the ``struct signal_struct`` of a process that has rings."""

        for disk in all_disks(context).all:
            for request in in_flight(context).of_disk(disk).requests:
                is_slow = (request.age_ns or 0) >= SLOW_NS
                if is_slow and request.stage not in OF_BIOS:
                    self._follow(request, disk)

    def disk(self, case: BlockedTask) -> Disk | None:
        """Return the disk that a task waits for; ``None`` if unknown, or several."""
        found = self._of_tasks.get(case.address, set())
        if case.is_in(CANCEL):
            signal = int(self._context.tasks["signal"][case.row])
            found = self._of_processes.get(signal, set())
        return next(iter(found)) if len(found) == 1 else None

    def waits(self, in_ring: Booleans, cancels: Booleans) -> Booleans:
        """Return which tasks wait for I/O.

        :param in_ring: Which tasks are in a wait for a ring or an AIO context.
        :param cancels: Which tasks are in :data:`CANCEL`.
        """
        tasks = self._context.tasks
        processes = np.array([*self._of_processes], np.uint64)
        waiters = np.array([*self._of_tasks], np.uint64)
        found: Booleans = cancels & np.isin(tasks["signal"], processes)
        found |= in_ring & np.isin(tasks["address"], waiters)
        return found

    def _follow(self, request: InFlight, disk: Disk) -> None:
        """Add a disk to those who wait for one of its requests."""
        try:
            bio = self._first_bio(request)
            blocks = [*self._blocks(bio)]
            if self._first_bio(request) != bio:
                return
        except LOST:
            # It was done, and is used anew, while it was read.
            return
        for block in blocks:
            # What is no direct I/O leads nowhere.
            with suppress(*LOST):
                self._add_block(block, disk)

    def _first_bio(self, request: InFlight) -> int:
        return self._layout.member(request.address, "request", "bio")

    def _blocks(self, bio: int) -> Iterator[int]:
        """Yield the ``struct kiocb`` of a bio and of those that follow it."""
        layout = self._layout
        for _ in range(_MAX_BIOS):
            if bio < KERNEL_HALF:
                return
            following, end, private = layout.members(
                bio, "bio", "bi_next", "bi_end_io", "bi_private"
            )
            for name, kind, place in _ENDS:
                if end and end == self._symbols[name] and layout.has(kind, "iocb"):
                    start = bio - layout.offset(kind, place) if place else private
                    yield layout.member(start, kind, "iocb")
            bio = following

    def _add_block(self, block: int, disk: Disk) -> None:
        layout = self._layout
        if block < KERNEL_HALF:
            return
        complete = layout.member(block, "kiocb", "ki_complete")
        if complete and complete in map(self._symbols.get, _OF_AIO):
            aio = layout.member(block, "aio_kiocb", "ki_ctx")
            self._add_waiters(aio + layout.offset("kioctx", "wait"), disk)
        elif complete and complete in map(self._symbols.get, _OF_RING):
            self._add_ring(block, disk)

    def _add_ring(self, request: int, disk: Disk) -> None:
        layout, name = self._layout, "io_ring_ctx"
        ring = layout.member(request, "io_kiocb", "ctx")
        # Kernels that have both have those who wait on the first (5.10), and those who
        # poll on the other.
        queue_of_ring = layout.offset(name, "wait", "cq_wait")
        self._add_waiters(ring + queue_of_ring, disk)
        # "io_uring: add IORING_SETUP_DEFER_TASKRUN" (in v6.1)
        if layout.has(name, "submitter_task"):
            flags, task = layout.members(ring, name, "flags", "submitter_task")
            if flags & _DEFER_TASKRUN and task:
                self._add(self._of_tasks, task, disk)
        signal = layout.member(self._task_of(request), "task_struct", "signal")
        self._add(self._of_processes, signal, disk)

    def _task_of(self, request: int) -> int:
        """Return the task that gave a request to its ring."""
        layout = self._layout
        if not layout.has("io_kiocb", "tctx"):
            return layout.member(request, "io_kiocb", "task")
        # "io_uring: replace io_kiocb::task with ->tctx" (in v6.13)
        own = layout.member(request, "io_kiocb", "tctx")
        return layout.member(own, "io_uring_task", "task")

    def _add_waiters(self, head: int, disk: Disk) -> None:
        for each in queue(self._context, Lock("wait_queue", head)) or ():
            self._add(self._of_tasks, each.task, disk)

    @staticmethod
    def _add(owners: dict[int, set[Disk]], owner: int, disk: Disk) -> None:
        if owner >= KERNEL_HALF:
            owners.setdefault(owner, set()).add(disk)


@per_context
def asynchronous_io(context: LockContext) -> AsynchronousIo:
    """Return the I/O in flight by the tasks that wait for it."""
    return AsynchronousIo(context)
