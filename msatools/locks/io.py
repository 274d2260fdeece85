# SPDX-License-Identifier: LGPL-2.1-or-later

"""I/O in flight of disks, the way through stacked disks to the hardware, and the disks
that tasks wait for."""

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import read_string
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.walks import list_records
from msatools.locks.context import MAX_CANDIDATES, BlockedTask, LockContext, per_context
from msatools.locks.disks import (
    Disk,
    Disks,
    QueueState,
    Requests,
    all_disks,
    all_requests,
)
from msatools.locks.report import DiskIo, InFlight, Lock, Stage
from msatools.locks.struct_reader import Layout
from msatools.program.linear import KERNEL_HALF
from msatools.program.model import Address

# --- Reads the bios that disks of the device mapper hold back (drivers/md/).
#
# A suspended disk defers them (dm.c), and one with a delay keeps them until they are
# due (dm-delay.c). Other targets pass bios on, or keep them in structures of their own.


_MAX_BIOS = 1 << 16
_MAX_TARGETS = 1 << 10

_ISSUE_BITS = 51
"""Bits of the time in ``struct bio_issue`` (``BIO_ISSUE_TIME_MASK``): nanoseconds."""

_IO_MAGIC = 19577
"""``DM_IO_MAGIC``: marks a ``struct dm_io``, which has the first clone of a bio."""

_MAX_NAME = 64


class Bios:
    """Reads the bios that disks hold."""

    def __init__(
        self,
        layout: Layout,
        losses: LossLog,
        requests: Requests,
        monotonic_ns: int | None,
    ) -> None:
        self._layout = layout
        self._losses = losses
        self._requests = requests
        self._now_ns = monotonic_ns

    def of_disk(self, disk: Disk) -> tuple[InFlight, ...]:
        """Return the bios that a disk is known to hold, the oldest first."""
        if not disk.is_mapped:
            return ()
        if not self._layout.has("mapped_device", "deferred"):
            text = "what disks of the device mapper hold is unknown: no types of dm_mod"
            self._losses.note("bios-unknown", text, "dm_mod")
            return ()
        found: list[InFlight] = []
        try:
            found += self._deferred(disk)
            if self._layout.has("delay_c", "delayed_bios"):
                found += self._delayed(disk)
        except LOST as error:
            self._losses.lose(Loss.DISKS, f"cannot read bios of {disk.name}: {error}")
        return tuple(sorted(found, key=lambda each: -(each.age_ns or 0)))

    def _deferred(self, disk: Disk) -> Iterator[InFlight]:
        """Yield the bios of a suspended disk."""
        layout = self._layout
        bio = layout.member(disk.private, "mapped_device", "deferred")
        seen: set[int] = set()
        while bio >= KERNEL_HALF and bio not in seen and len(seen) < _MAX_BIOS:
            seen.add(bio)
            yield self._bio(bio, "deferred", self._issued_ns(bio))
            bio = layout.member(bio, "bio", "bi_next")

    def _delayed(self, disk: Disk) -> Iterator[InFlight]:
        """Yield the bios of a disk with a delay."""
        layout = self._layout
        table = layout.member(disk.private, "mapped_device", "map")
        if table < KERNEL_HALF:
            return
        count, targets = layout.members(table, "dm_table", "num_targets", "targets")
        size = layout.size("dm_target")
        for target in range(targets, targets + min(count, _MAX_TARGETS) * size, size):
            kind, private, room = layout.members(
                target, "dm_target", "type", "private", "per_io_data_size"
            )
            name = layout.member(kind, "target_type", "name")
            if read_string(layout.reader, name, _MAX_NAME) == "delay":
                yield from self._of_delay(private, room)

    def _of_delay(self, delay: int, room: int) -> Iterator[InFlight]:
        layout = self._layout
        head = delay + layout.offset("delay_c", "delayed_bios")
        node = layout.offset("dm_delay_info", "list")
        records = list_records(
            *(layout.reader, head, node, node + 16, self._losses), "delayed bios"
        )
        for number, (info, _) in enumerate(records):
            if number == _MAX_BIOS:
                return
            # dm_bio_from_per_bio_data(): the target's own data precede the dm_io.
            io = info + room
            magic = layout.member(io, "dm_io", "magic")
            if magic != _IO_MAGIC:
                # A further clone of a split bio; the first clone leads to the bio.
                continue
            bio, start = layout.members(io, "dm_io", "orig_bio", "start_time")
            jiffies = self._requests.jiffies
            began = None if jiffies is None else jiffies.time_ns(start)
            yield self._bio(bio, "delayed", began)

    def _bio(self, bio: int, stage: Stage, began_ns: int | None) -> InFlight:
        flags, sector, size = self._layout.members(
            bio, "bio", "bi_opf", "bi_iter.bi_sector", "bi_iter.bi_size"
        )
        age = None
        if began_ns is not None and self._now_ns is not None:
            age = max(0, self._now_ns - began_ns)
        return InFlight(
            address=Address(bio),
            operation=self._requests.operation(flags),
            sector=sector if size else None,
            bytes=size,
            stage=stage,
            age_ns=age,
            driver_age_ns=None,
            tag=None,
            pid=None,
        )

    def _issued_ns(self, bio: int) -> int | None:
        """Return CLOCK_MONOTONIC when a bio was submitted; ``None`` if not recorded."""
        layout = self._layout
        if layout.has("bio", "issue_time_ns"):
            return layout.member(bio, "bio", "issue_time_ns") or None
        if not layout.has("bio", "bi_issue") or self._now_ns is None:
            return None
        mask = (1 << _ISSUE_BITS) - 1
        low = layout.member(bio, "bio", "bi_issue.value") & mask
        if not low:
            return None
        return self._now_ns - ((self._now_ns - low) & mask)


@per_context
def all_bios(context: LockContext) -> Bios:
    """Return the reader of the bios of a context."""
    requests = all_requests(context)
    return Bios(context.layout, context.losses, requests, context.monotonic_ns)


# --- The I/O in flight of disks, and the way from a stacked disk to the hardware.


_MAX_HEIGHT = 32
"""Maximum number of disks stacked on each other."""


class Way(Struct, frozen=True):
    """The way from a disk down to the one that holds its I/O."""

    disks: tuple[Disk, ...]
    """The first is the one that was asked for; the last holds the I/O."""

    below: tuple[Disk, ...]
    """Disks further down, which hold none of it, while each has one disk below."""


class InFlightIo:
    """The I/O of disks, each read once per context."""

    def __init__(self, context: LockContext, disks: Disks) -> None:
        self._context = context
        self._disks = disks
        self._known: dict[int, DiskIo] = {}

    def all(self) -> tuple[DiskIo, ...]:
        """Return all disks with their I/O: the oldest I/O first, idle disks last."""
        return self._rows(self._disks.all)

    def named(self, names: Container[str]) -> tuple[DiskIo, ...]:
        """Return the disks that have one of some names, in the order of :meth:`all`."""
        return self._rows(disk for disk in self._disks.all if disk.name in names)

    def _rows(self, disks: Iterable[Disk]) -> tuple[DiskIo, ...]:
        return tuple(sorted(map(self.of_disk, disks), key=_weight))

    def of_disk(self, disk: Disk) -> DiskIo:
        """Return a disk with its I/O in flight; count unreadable parts as losses."""
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
        """Return the reads and writes in flight of a disk without requests: the sums of
        its per-CPU counters, as part_in_flight_rw() does."""
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
        """Return a lower bound, in ns, of the time since a disk's last completion."""
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

        The way ends at hardware, at a disk that holds I/O back, and at a disk below
        which not exactly one disk has I/O in flight.
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


# --- The disks that tasks wait for in XFS and btrfs, by structures of the file system.
#
# For the I/O of a struct xfs_buf a task waits on the completion in it
# (fs/xfs/xfs_buf.c), for the log of XFS on wait queues of the log's structures
# (fs/xfs/xfs_log_priv.h). A super block of btrfs has no block device: the file system's
# devices are in the list of its struct btrfs_fs_devices (fs/btrfs/volumes.h). For a
# tree block a task waits on a bit of the struct extent_buffer, or for that buffer's
# folio; for the tree log on a wait queue of the struct btrfs_root
# (fs/btrfs/tree-log.c).


_XFS_LOG = (
    ("xlog_in_core", ("ic_force_wait", "ic_write_wait"), "ic_log"),
    ("xfs_cil", ("xc_push_wait", "xc_start_wait", "xc_commit_wait"), "xc_log"),
    ("xlog", ("l_flush_wait",), ""),
)
"""Structures of an XFS log, their wait queues, and the member that points at the
``struct xlog``: empty for that itself."""

_BTRFS_LOG = ("log_writer_wait", "log_commit_wait[0]", "log_commit_wait[1]")
"""Wait queues of a ``struct btrfs_root``."""

_MAX_DEVICES = 64
"""Maximum number of devices of one btrfs."""


def disk_of_lock(context: LockContext, lock: Lock) -> Disk | None:
    """Return the disk of the XFS or btrfs file system whose structure contains a lock.

    :return: ``None`` if none does, or of its several disks not exactly one has I/O in
        flight.
    """
    if not lock.address:
        return None
    try:
        if lock.type == "completion":
            return _of_xfs(context, lock.address)
        if lock.type == "bit_wait":
            return _of_btrfs(context, lock.address)
        if lock.type == "wait_queue":
            disks = (_of_xfs_log, _of_btrfs_log)
            found = (disk(context, lock.address) for disk in disks)
            return next((disk for disk in found if disk), None)
    except LOST:
        # Most locks are in no such structure: pointers beside them cannot be followed.
        pass
    return None


def disk_of_super_block(context: LockContext, super_block: int) -> Disk | None:
    """Return the disk of a btrfs; of several disks, the only one with I/O in flight."""
    storage, layout = context.storage, context.layout
    try:
        if storage.file_system_type(super_block) != "btrfs":
            return None
        info = layout.member(super_block, "super_block", "s_fs_info")
        return _busy(context, list(_disks_of_btrfs(context, info)))
    except LOST:
        return None


def _of_xfs(context: LockContext, completion: int) -> Disk | None:
    layout = context.layout
    if not layout.has("xfs_buf", "b_iowait"):
        return None
    buffer = completion - layout.offset("xfs_buf", "b_iowait")
    target = layout.member(buffer, "xfs_buf", "b_target")
    return _of_device(context, layout.member(target, "xfs_buftarg", "bt_bdev"))


def _of_xfs_log(context: LockContext, queue: int) -> Disk | None:
    """Return the disk of the XFS log that has a wait queue, if it has I/O in flight."""
    layout = context.layout
    for name, members, way in _XFS_LOG:
        for member in members:
            if not layout.has(name, member):
                continue
            start = queue - layout.offset(name, member)
            try:
                log = layout.member(start, name, way) if way else start
            except UNREADABLE:  # the queue is in another structure
                continue
            disk = _of_log(context, log)
            if disk is not None:
                return disk
    return None


def _of_log(context: LockContext, log: int) -> Disk | None:
    layout = context.layout
    try:
        cil, target = layout.members(log, "xlog", "l_cilp", "l_targ")
        if layout.member(cil, "xfs_cil", "xc_log") != log:
            return None
        device = layout.member(target, "xfs_buftarg", "bt_bdev")
    except UNREADABLE:  # it is no struct xlog
        return None
    disk = _of_device(context, device)
    return disk if disk and in_flight(context).has_io(disk) else None


def _of_btrfs_log(context: LockContext, queue: int) -> Disk | None:
    """Return the disk of the btrfs whose tree log has a wait queue, if it has I/O."""
    layout = context.layout
    for member in _BTRFS_LOG:
        if not layout.has("btrfs_root", member.partition("[")[0]):
            continue
        root = queue - layout.offset("btrfs_root", member)
        try:
            info = layout.member(root, "btrfs_root", "fs_info")
            disks = list(_disks_of_btrfs(context, info))
        except UNREADABLE:  # it is no struct btrfs_root
            continue
        busy = [disk for disk in disks if in_flight(context).has_io(disk)]
        if busy:
            return _busy(context, busy)
    return None


def _of_btrfs(context: LockContext, word: int) -> Disk | None:
    layout = context.layout
    if not layout.has("extent_buffer", "bflags"):
        return None
    buffer = word - layout.offset("extent_buffer", "bflags")
    info = layout.member(buffer, "extent_buffer", "fs_info")
    return _busy(context, list(_disks_of_btrfs(context, info)))


def _disks_of_btrfs(context: LockContext, info: int) -> Iterator[Disk]:
    """Yield the disks of a ``struct btrfs_fs_info``."""
    layout = context.layout
    devices = layout.member(info, "btrfs_fs_info", "fs_devices")
    head = devices + layout.offset("btrfs_fs_devices", "devices")
    for node in layout.nodes(head, _MAX_DEVICES):
        device = node - layout.offset("btrfs_device", "dev_list")
        disk = _of_device(context, layout.member(device, "btrfs_device", "bdev"))
        if disk is not None:
            yield disk


def _of_device(context: LockContext, device: int) -> Disk | None:
    if device < KERNEL_HALF:
        return None
    disk = context.layout.member(device, "block_device", "bd_disk")
    return all_disks(context).by_address.get(disk)


def _busy(context: LockContext, disks: list[Disk]) -> Disk | None:
    """Return the only disk, or the only one that has I/O in flight."""
    if len(disks) > 1:
        disks = [disk for disk in disks if in_flight(context).has_io(disk)]
    return disks[0] if len(disks) == 1 else None


# --- Finds the disk that a task waits for in the block layer itself.
#
# Such a task waits for a tag, for its share of writeback (blk-wbt), for a queue that is
# frozen, or for a bio or request whose completion is on the task's stack.


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
    """Yield candidates for the ``struct rq_wait`` that rq_qos_wait() waits on."""
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
    """Return the disk of the bio or request that ends with a completion."""
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
        """Return the disk that a wait queue is of; ``None`` if it is of none."""
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
        """The wait queues of tags and of blk-wbt: start, end (exclusive) and disk."""
        found: list[tuple[int, int, Disk]] = []
        for disk in self.of_queue.values():
            try:
                found += self._of_disk(disk)
            except LOST:
                # The disk is being added or removed; InFlightIo counts the loss.
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
            # RQ_QOS_WBT is 0, the first of enum rq_qos_id.
            if kind == 0:
                start = control - offset
                found.append((start, start + size, disk))
            control = following
        return found


@per_context
def _wait_queues(context: LockContext) -> BlockWaitQueues:
    return BlockWaitQueues(context)
