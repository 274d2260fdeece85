# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the disk that a task waits for in the block layer itself.

It waits for a tag, for its share of writeback (blk-wbt), for a queue that is frozen, or
for a bio or request whose completion is on its stack.
"""

from collections.abc import Iterator
from functools import cached_property

from msatools.errors import LOST, UNREADABLE
from msatools.locks.base.blocked_tasks import BlockedTask
from msatools.locks.base.lock import Lock
from msatools.locks.base.lock_context import (
    MAX_CANDIDATES,
    LockContext,
    per_context,
)
from msatools.locks.io.disks import Disk, all_disks
from msatools.locks.io.requests import all_requests
from msatools.target.addresses import KERNEL_HALF

_TAGS = ("blk_mq_get_tag",)
_FROZEN = (
    *("blk_queue_enter", "__bio_queue_enter", "blk_mq_freeze_queue_wait"),
    "blk_mq_freeze_queue",
)
_THROTTLED = ("rq_qos_wait", "wbt_wait", "__wbt_wait")
_BIOS = ("submit_bio_wait", "bio_await", "blk_execute_rq", "blk_wait_io")
_WAITS = frozenset((*_TAGS, *_FROZEN, *_THROTTLED, *_BIOS))

_MAX_CONTROLS = 8
"""Maximum number of ``struct rq_qos`` of a queue: one of each kind."""


def disk_of_wait(
    context: LockContext, case: BlockedTask, lock: Lock | None
) -> Disk | None:
    """
    Return the disk whose queue, tags or bio a task waits for.

    :param lock: The wait queue or completion that it waits for, if known.
    :return: ``None`` if it waits for something else, or that is unknown.
    :raises drgn.FaultError: if a structure that leads to the disk cannot be read
    :raises MissingError: if the types are unknown
    """
    if not case.is_in(*_WAITS):
        return None
    address = None if lock is None else lock.address
    if lock is not None and lock.type == "completion" and address is not None:
        return _of_completion(context, case, address)
    places = [] if address is None else [address]
    if case.is_in(*_THROTTLED):
        places += _throttling_waits(context, case)
    found = map(_wait_queues(context).find, places)
    return next((disk for disk in found if disk is not None), None)


def _throttling_waits(context: LockContext, case: BlockedTask) -> Iterator[int]:
    """Yield what may be the ``struct rq_wait`` that rq_qos_wait() waits on."""
    layout, name = context.layout, "rq_qos_wait_data"
    if not layout.has(name, "rqw"):
        return
    offset = layout.offset(name, "rqw")
    for start in case.stack.own(name, "task"):
        wait = case.stack.word(start + offset)
        if wait is not None and wait >= KERNEL_HALF:
            yield wait


def _of_completion(
    context: LockContext, case: BlockedTask, completion: int
) -> Disk | None:
    """Return the disk of the bio or request that a completion is for."""
    layout = context.layout
    bio = layout.offset("bio", "bi_private")
    # The bio may be on the stack, too.
    starts = [place - bio for place in case.stack.places(completion)]
    for start in (*starts, *case.stack.data_pointers()[:MAX_CANDIDATES]):
        try:
            private, device = layout.members(start, "bio", "bi_private", "bi_bdev")
            if private == completion and device >= KERNEL_HALF:
                disk = layout.member(device, "block_device", "bd_disk")
                found = all_disks(context).by_address.get(disk)
                if found is not None:
                    return found
            names = ("end_io_data", "q")
            data, queue = layout.members(start, "request", *names)
            if data == completion:
                return _wait_queues(context).of_queue.get(queue)
        except UNREADABLE:
            continue
    return None


class BlockWaitQueues:
    """The wait queues of the block layer, by address."""

    def __init__(self, context: LockContext) -> None:
        self._context = context

    @cached_property
    def of_queue(self) -> dict[int, Disk]:
        """Maps the address of a ``struct request_queue`` to its disk."""
        return {disk.queue: disk for disk in all_disks(self._context).all}

    def find(self, address: int) -> Disk | None:
        """Return the disk that has a wait queue; ``None`` if none has it."""
        layout = self._context.layout
        frozen = layout.offset("request_queue", "mq_freeze_wq")
        disk = self.of_queue.get(address - frozen)
        if disk is not None:
            return disk
        for start, end, owner in self._ranges:
            if start <= address < end:
                return owner
        return None

    @cached_property
    def _ranges(self) -> list[tuple[int, int, Disk]]:
        """Where the wait queues of tags and of blk-wbt are."""
        found: list[tuple[int, int, Disk]] = []
        for disk in self.of_queue.values():
            try:
                found += self._of_disk(disk)
            except LOST:
                # A disk on its way; its I/O is read, and lost, elsewhere.
                continue
        return found

    def _of_disk(self, disk: Disk) -> list[tuple[int, int, Disk]]:
        layout = self._context.layout
        found = [
            (*bounds, disk) for bounds in all_requests(self._context).tag_waits(disk)
        ]
        control = layout.member(disk.queue, "request_queue", "rq_qos")
        if not layout.has("rq_wb", "rqos"):
            return found
        offset, size = layout.offset("rq_wb", "rqos"), layout.size("rq_wb")
        for _ in range(_MAX_CONTROLS):
            if control < KERNEL_HALF:
                break
            kind, following = layout.members(control, "rq_qos", "id", "next")
            # RQ_QOS_WBT is the first of enum rq_qos_id.
            if kind == 0:
                start = control - offset
                found.append((start, start + size, disk))
            control = following
        return found


@per_context
def _wait_queues(context: LockContext) -> BlockWaitQueues:
    return BlockWaitQueues(context)
