# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which tasks wait for I/O of a disk by a ring (io_uring) or an AIO context.

Such a task sleeps like one that has nothing to do. The I/O leads back to it: the bios
of a request have the ``struct kiocb`` of a direct read or write (fs/iomap/direct-io.c,
block/fops.c). It is the beginning of io_uring's request (``struct io_kiocb``) or of
AIO's (``struct aio_kiocb``), which have the ring or context on whose queue the task is.
"""

from collections.abc import Iterator

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
from msatools.records import dataclass
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

_DEFER_TASKRUN = 1 << 13
"""``IORING_SETUP_DEFER_TASKRUN``: only the task that submits waits, and on no queue."""


@dataclass(frozen=True, slots=True)
class Waited:
    """I/O that a task waits for."""

    disk: Disk
    age_ns: int
    """Age of the oldest."""


class AsynchronousIo:
    """I/O in flight by the tasks that wait for it; only direct I/O is found."""

    def __init__(self, context: LockContext) -> None:
        self._context = context
        self._layout = context.layout
        self._symbols = {
            name: context.layout.symbol(name)
            for name in (*(end for end, _, _ in _ENDS), *_OF_RING, *_OF_AIO)
        }
        self._several: set[int] = set()
        self._of_tasks: dict[int, Waited] = {}
        """By the address of a task that waits."""

        self._of_processes: dict[int, Waited] = {}
        """By the ``struct signal_struct`` of a process that has rings."""

        for disk in all_disks(context).all:
            for request in in_flight(context).of_disk(disk).requests:
                self._follow(request, Waited(disk, request.age_ns or 0))

    def disk(self, case: BlockedTask) -> Disk | None:
        """Return the disk that a task waits for; ``None`` if unknown, or several."""
        waited = self._of_tasks.get(case.address)
        if waited is None and case.is_in(CANCEL):
            signal = int(self._context.tasks["signal"][case.row])
            waited = self._of_processes.get(signal)
        return waited.disk if waited else None

    def slow(self, cancels: Booleans) -> Booleans:
        """Return which tasks wait for I/O that takes long.

        :param cancels: Which tasks are in :data:`CANCEL`.
        """
        tasks = self._context.tasks
        found: Booleans = cancels & np.isin(tasks["signal"], _slow(self._of_processes))
        found |= np.isin(tasks["address"], _slow(self._of_tasks))
        return found

    def _follow(self, request: InFlight, waited: Waited) -> None:
        """Add a request to those who wait for it."""
        try:
            for block in self._blocks(request):
                self._add_block(block, waited)
        except LOST:
            # It was done, and is used anew, while it was read; or is no direct I/O.
            return

    def _blocks(self, request: InFlight) -> Iterator[int]:
        """Yield the ``struct kiocb`` of a request's bios."""
        layout = self._layout
        bio = layout.member(request.address, "request", "bio")
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

    def _add_block(self, block: int, waited: Waited) -> None:
        layout = self._layout
        if block < KERNEL_HALF:
            return
        complete = layout.member(block, "kiocb", "ki_complete")
        if complete and complete in map(self._symbols.get, _OF_AIO):
            aio = layout.member(block, "aio_kiocb", "ki_ctx")
            self._add_waiters(aio + layout.offset("kioctx", "wait"), waited)
        elif complete and complete in map(self._symbols.get, _OF_RING):
            self._add_ring(block, waited)

    def _add_ring(self, request: int, waited: Waited) -> None:
        layout, name = self._layout, "io_ring_ctx"
        ring = layout.member(request, "io_kiocb", "ctx")
        self._add_waiters(ring + layout.offset(name, "cq_wait"), waited)
        # "io_uring: add IORING_SETUP_DEFER_TASKRUN" (in v6.1)
        if layout.has(name, "submitter_task"):
            flags, task = layout.members(ring, name, "flags", "submitter_task")
            if flags & _DEFER_TASKRUN and task:
                self._add(self._of_tasks, task, waited)
        signal = layout.member(self._task_of(request), "task_struct", "signal")
        self._add(self._of_processes, signal, waited)

    def _task_of(self, request: int) -> int:
        """Return the task that gave a request to its ring."""
        layout = self._layout
        if not layout.has("io_kiocb", "tctx"):
            return layout.member(request, "io_kiocb", "task")
        # "io_uring: replace io_kiocb::task with ->tctx" (in v6.13)
        own = layout.member(request, "io_kiocb", "tctx")
        return layout.member(own, "io_uring_task", "task")

    def _add_waiters(self, head: int, waited: Waited) -> None:
        for each in queue(self._context, Lock("wait_queue", head)) or ():
            self._add(self._of_tasks, each.task, waited)

    def _add(self, owners: dict[int, Waited], owner: int, waited: Waited) -> None:
        """Add I/O to who waits for it; of several disks none is said to be at fault."""
        known = owners.get(owner)
        if owner in self._several or (known and known.disk is not waited.disk):
            self._several.add(owner)
            owners.pop(owner, None)
        elif known is None or known.age_ns < waited.age_ns:
            owners[owner] = waited


def _slow(owners: dict[int, Waited]) -> list[int]:
    return [owner for owner, each in owners.items() if each.age_ns >= SLOW_NS]


@per_context
def asynchronous_io(context: LockContext) -> AsynchronousIo:
    """Return the I/O in flight by the tasks that wait for it."""
    return AsynchronousIo(context)
