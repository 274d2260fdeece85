# SPDX-License-Identifier: LGPL-2.1-or-later

"""The disks of a kernel, how they are stacked, and their requests by tag."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.block import for_each_disk, for_each_partition
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.clocks import Jiffies, read_jiffies
from msatools.kernel.files import device_number
from msatools.kernel.percpu import is_pointer
from msatools.kernel.reader import U64, Addresses, read_string, unsigned
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import Booleans, Structs, enumerators, read_structs
from msatools.kernel.walks import list_records, xarray_entries
from msatools.locks.context import LockContext, per_context
from msatools.locks.report import InFlight, Stage
from msatools.locks.storage import Storage
from msatools.locks.struct_reader import Layout
from msatools.program.linear import KERNEL_HALF
from msatools.program.model import Address
from msatools.selfdesc.find import ask_each, find_type, member_of
from msatools.tasks.table import TaskTable

# --- Recognizes suspended disks of the device mapper (drivers/md/dm.c).


_SUSPENDED = 0b11
"""``DMF_BLOCK_IO_FOR_SUSPEND`` and ``DMF_SUSPENDED``, bits 0 and 1."""


def is_suspended(layout: Layout, mapped: int, queue: int) -> bool:
    """
    Return whether a ``struct mapped_device`` is suspended.

    Its type is private to dm_mod (dm-core.h), so the offset of its flags is computed:
    they follow two mutexes, a list head and a pointer. After them are a mutex, two
    integers and the request queue, which has to be that of the disk. Kernels from v6.1
    on were checked.

    :param mapped: Its address, ``private_data`` of the disk.
    :param queue: Address of the disk's request queue.
    :raises drgn.FaultError: if it cannot be read
    """
    mutex = layout.size("mutex")
    flags = mapped + 2 * mutex + 24
    if flags < KERNEL_HALF:
        return False
    if layout.word(flags + 8 + mutex + 8) != queue:
        return False
    return bool(layout.word(flags) & _SUSPENDED)


# --- Reads the disks of a kernel, and which are stacked on which (block/genhd.c).


_MAX_DEVICES = 1 << 16
"""Maximum number of disks and partitions."""

_MAX_BELOW = 1 << 12
_LOOP_MAJOR, _MD_MAJOR = 7, 9


class Disk(Struct, frozen=True):
    """Some members of a ``struct gendisk``."""

    address: int
    name: str
    numbers: str
    """Major and first minor number, as ``254:0``."""

    major: int
    queue: int
    """Address of its ``struct request_queue``."""

    part0: int
    """Address of the ``struct block_device`` of the whole disk."""

    private: int
    """``private_data``: address of its driver's structure."""

    @property
    def is_mapped(self) -> bool:
        """Whether it is a disk of the device mapper."""
        return self.name.startswith("dm-")


class Disks:
    """The disks of a kernel, read once."""

    def __init__(self, layout: Layout, losses: LossLog, storage: Storage) -> None:
        self._layout = layout
        self._losses = losses
        self._storage = storage
        self._below: dict[int, tuple[Disk, ...]] = {}

    @cached_property
    def all(self) -> tuple[Disk, ...]:
        """All disks."""
        return tuple(self._read[0].values())

    @property
    def by_address(self) -> dict[int, Disk]:
        """Maps the address of a ``struct gendisk`` to the disk."""
        return self._read[0]

    @cached_property
    def by_numbers(self) -> dict[str, Disk]:
        """Maps the numbers of each disk and partition, as ``254:0``, to the disk."""
        disks, parts = self._read
        whole = {disk.numbers: disk for disk in disks.values()}
        return whole | {
            device_number(number): disks[disk]
            for disk, number, _ in parts.values()
            if disk in disks
        }

    @cached_property
    def _read(self) -> tuple[dict[int, Disk], dict[int, tuple[int, int, int]]]:
        """Disks by address; and ``bd_disk``, ``bd_dev`` and ``bd_holder_dir`` of each
        ``struct block_device``, by its address."""
        disks: dict[int, Disk] = {}
        parts: dict[int, tuple[int, int, int]] = {}
        layout, name = self._layout, "block_device"
        try:
            # Before "block: merge struct block_device and struct hd_struct" (in v5.11)
            # a partition is a struct hd_struct.
            if not layout.has("block_device", "bd_device"):
                for each in islice(
                    ask_each(for_each_disk, layout.reader.prog), _MAX_DEVICES
                ):
                    self._add(disks, int(each))
                return disks, parts
            for part in islice(
                ask_each(for_each_partition, layout.reader.prog), _MAX_DEVICES
            ):
                address = int(part)
                disk, numbers, holders = layout.members(
                    address, name, "bd_disk", "bd_dev", "bd_holder_dir"
                )
                parts[address] = disk, numbers, holders
                if disk not in disks:
                    self._add(disks, disk)
        except LOST as error:
            self._losses.lose(Loss.DISKS, f"cannot read the list of disks: {error}")
        return disks, parts

    def _add(self, disks: dict[int, Disk], address: int) -> None:
        layout, name = self._layout, "gendisk"
        try:
            major, minor, queue, part0, private = layout.members(
                address, name, "major", "first_minor", "queue", "part0", "private_data"
            )
            disks[address] = Disk(
                address=address,
                name=layout.text(address, name, "disk_name"),
                numbers=f"{major}:{minor}",
                major=major,
                queue=queue,
                part0=part0,
                private=private,
            )
        except UNREADABLE as error:
            self._losses.lose(Loss.DISKS, f"cannot read a disk: {error}")

    def below(self, disk: Disk) -> tuple[Disk, ...]:
        """Return the disks directly below a stacked disk; empty for hardware."""
        if disk.address not in self._below:
            try:
                found = self._find_below(disk)
            except LOST as error:
                self._losses.lose(
                    Loss.DISKS,
                    f"cannot determine what {disk.name} is stacked on: {error}",
                )
                found = ()
            self._below[disk.address] = found
        return self._below[disk.address]

    def _find_below(self, disk: Disk) -> tuple[Disk, ...]:
        if disk.major == _LOOP_MAJOR:
            below = self._below_loop(disk)
            return () if below is None else (below,)
        disks, parts = self._read
        by_holder = {holders: part for part, (_, _, holders) in parts.items()}
        # Before "block: look up holders by bdev" (in v5.15) each struct block_device
        # had a list of the disks above it instead.
        if not self._layout.has("gendisk", "slave_bdevs"):
            return ()
        head = disk.address + self._layout.offset("gendisk", "slave_bdevs")
        # A kobject since "block: store the holder kobject in bd_holder_disk" (in v6.2)
        kind = "bd_holder_disk"
        old = self._layout.has(kind, "bdev")
        pointer = self._layout.offset(kind, "bdev" if old else "holder_dir")
        found: dict[int, Disk] = {}
        for _, data in list_records(
            *(self._layout.reader, head, self._layout.offset(kind, "list")),
            *(self._layout.size(kind), self._losses, f"disks below {disk.name}"),
        ):
            if len(found) == _MAX_BELOW:
                break
            value = unsigned(data, pointer, 8)
            part = value if old else by_holder.get(value, 0)
            below = disks.get(parts[part][0]) if part in parts else None
            if below is not None:
                found[below.address] = below
        return tuple(found.values())

    def _below_loop(self, disk: Disk) -> Disk | None:
        """Return the disk of the file system that contains a loop device's file."""
        if disk.private < KERNEL_HALF or self._is_empty(disk):
            return None
        if not self._layout.has(*_BACKING):
            text = "the files of loop devices are unknown: no types of loop"
            self._losses.note("loops-unknown", text, "loop")
            return None
        file = self._layout.member(disk.private, *_BACKING)
        if file < KERNEL_HALF:
            return None
        device = self._storage.device_of(self._storage.host_of_file(file))
        return self.by_numbers.get(device.rpartition(" ")[2]) if device else None

    def _is_empty(self, disk: Disk) -> bool:
        """Return whether a disk has size 0, such as a loop device without a file."""
        name, size = "block_device", "bd_nr_sectors"
        if disk.part0 < KERNEL_HALF or not self._layout.has(name, size):
            return False
        return not self._layout.member(disk.part0, name, size)

    def is_suspended(self, disk: Disk) -> bool:
        """Return whether a disk is a suspended device-mapper disk."""
        if not disk.is_mapped:
            return False
        try:
            return is_suspended(self._layout, disk.private, disk.queue)
        except UNREADABLE as error:
            self._losses.lose(Loss.DISKS, f"cannot read a disk: {error}")
            return False


_BACKING = ("loop_device", "lo_backing_file")


@per_context
def all_disks(context: LockContext) -> Disks:
    """Return the reader of the disks of a context."""
    return Disks(context.layout, context.losses, context.storage)


# --- Reads the requests of a disk by its tags (block/blk-mq-tag.c).
#
# Without an I/O scheduler, a request has a driver tag from its allocation on. With one,
# it has a scheduler tag from its allocation on, and a driver tag while the driver has
# it. Bitmaps show which tags are in use.


_MAX_QUEUES = 1 << 12
"""Maximum number of hardware queues of a disk."""

_MAX_TAGS = 1 << 16
_MAX_LISTED = 1 << 16
_WAIT_QUEUES = 8
"""``SBQ_WAIT_QUEUES``: number of wait queues of a bitmap of tags."""

_NO_TAG = (1 << 32) - 1
_OPERATION = 0xFF
"""``REQ_OP_MASK`` of ``request.cmd_flags`` and ``bio.bi_opf``."""

_IN_FLIGHT, _COMPLETE = 1, 2
"""``MQ_RQ_IN_FLIGHT`` and ``MQ_RQ_COMPLETE`` of ``enum mq_rq_state``."""

_REQUEST = {
    "queue": ("q",),
    "flags": ("cmd_flags",),
    "tag": ("tag",),
    "internal": ("internal_tag",),
    "timeout": ("timeout",),
    "bytes": ("__data_len",),
    "sector": ("__sector",),
    "part": ("part", "rq_disk"),
    "start": ("start_time_ns",),
    "begun": ("io_start_time_ns",),
    "bio": ("bio",),
    "state": ("state",),
    "references": ("ref",),
    "deadline": ("deadline",),
}


class QueueState(Struct, frozen=True):
    """The state of a disk's ``struct request_queue``, for :class:`.DiskIo`."""

    scheduler: str | None
    depth: int
    is_frozen: bool
    is_quiesced: bool
    reads: int
    writes: int
    requests: tuple[InFlight, ...]


class Requests:
    """Reads the requests of disks."""

    def __init__(
        self,
        layout: Layout,
        losses: LossLog,
        tasks: TaskTable,
        monotonic_ns: int | None,
    ) -> None:
        self._layout = layout
        self._losses = losses
        self._tasks = tasks
        self._now_ns = monotonic_ns

    def of_disk(self, disk: Disk) -> QueueState | None:
        """
        Read the requests of a disk.

        :return: ``None`` if the disk takes bios instead of requests, such as most
            device-mapper disks.
        :raises UNREADABLE: if its queue cannot be read
        :raises MissingError: if the types are unknown
        """
        layout, name = self._layout, "request_queue"
        if disk.queue < KERNEL_HALF:
            raise DamagedDataError("no queue", disk.queue)
        tag_set = layout.member(disk.queue, name, "tag_set")
        if tag_set < KERNEL_HALF:
            return None
        contexts = self._contexts(disk.queue)
        found = self._requests(disk, contexts)
        in_driver = (found["state"] == _IN_FLIGHT) & (found["part"] != 0)
        writes = (found["flags"] & 1) != 0
        places = self._places(disk, contexts)
        # "blk-mq: support concurrent queue quiesce/unquiesce" (in v5.16) added a count.
        depths = ("mq_freeze_depth", "quiesce_depth")
        frozen, quiesced = (
            layout.member(disk.queue, name, each) if layout.has(name, each) else 0
            for each in depths
        )
        return QueueState(
            scheduler=self._scheduler(disk.queue),
            depth=layout.member(tag_set, "blk_mq_tag_set", "queue_depth"),
            is_frozen=frozen > 0,
            is_quiesced=quiesced > 0,
            reads=int(np.count_nonzero(in_driver & ~writes)),
            writes=int(np.count_nonzero(in_driver & writes)),
            requests=tuple(self._rows(found, places)),
        )

    def _contexts(self, queue: int) -> list[int]:
        """Return the hardware queues (``struct blk_mq_hw_ctx``) of a queue."""
        layout, name = self._layout, "request_queue"
        # An xarray since "blk-mq: manage hctx map via xarray" (in v5.18), an array
        # again since "blk-mq: use array manage hctx map instead of xarray" (in v6.19)
        if layout.has(name, "hctx_table"):
            table = queue + layout.offset(name, "hctx_table")
            entries = xarray_entries(
                layout.reader, table, self._losses, "hardware queues"
            )
            return [entry for _, _, entry in entries[:_MAX_QUEUES]]
        array, count = layout.members(queue, name, "queue_hw_ctx", "nr_hw_queues")
        words = layout.reader.words(array, min(count, _MAX_QUEUES)).tolist()
        return [word for word in words if word >= KERNEL_HALF]

    def tag_waits(self, disk: Disk) -> Iterator[tuple[int, int]]:
        """Yield where the wait queues of a disk's tags are: start and end, exclusive.

        :raises drgn.FaultError: if the disk's queue cannot be read
        """
        layout = self._layout
        if layout.member(disk.queue, "request_queue", "tag_set") < KERNEL_HALF:
            return
        seen: set[int] = set()
        for context in self._contexts(disk.queue):
            for tags in layout.members(context, "blk_mq_hw_ctx", "tags", "sched_tags"):
                if tags < KERNEL_HALF or tags in seen:
                    continue
                seen.add(tags)
                for member in ("bitmap_tags", "breserved_tags"):
                    bitmap = self._bitmap(tags, member)
                    waits = layout.member(bitmap, "sbitmap_queue", "ws")
                    size = _WAIT_QUEUES * layout.size("sbq_wait_state")
                    yield waits, waits + size

    def _requests(self, disk: Disk, contexts: Iterable[int]) -> "_Found":
        """Read the requests whose tags are in use, each once."""
        name = "blk_mq_hw_ctx"
        addresses: set[int] = set()
        seen: set[tuple[int, bool]] = set()
        for context in contexts:
            driver, scheduler = self._layout.members(
                context, name, "tags", "sched_tags"
            )
            for tags, of_driver in ((driver, True), (scheduler, False)):
                if tags >= KERNEL_HALF and (tags, of_driver) not in seen:
                    seen.add((tags, of_driver))
                    addresses |= self._in_use(disk, tags, of_driver)
        wanted = np.array(sorted(addresses), np.uint64)
        read = read_structs(
            self._layout.reader, "struct request", _REQUEST, wanted, self._losses
        )
        # Other requests are of a disk that shares the tags, or just being allocated.
        kept = read.readable & (read["queue"] == disk.queue)
        kept &= read["references"] != 0
        return _Found(wanted[kept], read, kept)

    def _in_use(self, disk: Disk, tags: int, of_driver: bool) -> set[int]:
        """Return the requests of the tags that are in use; some may be stale."""
        layout, name = self._layout, "blk_mq_tags"
        count, reserved, current, static = layout.members(
            tags, name, "nr_tags", "nr_reserved_tags", "rqs", "static_rqs"
        )
        if not 0 < count <= _MAX_TAGS or reserved > count:
            raise DamagedDataError("no such number of tags", tags)
        used = [bit + reserved for bit in self._bits(tags, "bitmap_tags", count)]
        if reserved:
            used += self._bits(tags, "breserved_tags", reserved)
        if not used:
            return set()
        index = np.array(used, np.intp)
        index = index[index < count]
        found: set[int] = set()
        # Of driver tags, rqs[] has the dispatched requests, and static_rqs[] the others
        # if the disk has no scheduler. Of scheduler tags, static_rqs[] has all.
        for array in (current, static) if of_driver else (static,):
            if array >= KERNEL_HALF:
                found.update(layout.reader.words(array, count)[index].tolist())
        return {address for address in found if address >= KERNEL_HALF}

    def _bits(self, tags: int, member: str, most: int) -> list[int]:
        """Return the bits set in a ``struct sbitmap_queue`` (lib/sbitmap.c)."""
        layout = self._layout
        start = self._bitmap(tags, member)
        depth, shift, count, words = layout.members(
            start, "sbitmap", "depth", "shift", "map_nr", "map"
        )
        if not 0 < depth <= most or count > depth or shift > 6:
            raise DamagedDataError("no bitmap of tags", start)
        size = layout.size("sbitmap_word")
        at = layout.offset("sbitmap_word", "word")
        cleared = layout.offset("sbitmap_word", "cleared")
        data = layout.reader.read(words, count * size)
        bits = []
        for number in range(count):
            place = number * size
            (word,) = U64.unpack_from(data, place + at)
            word &= ~U64.unpack_from(data, place + cleared)[0]
            first = number << shift
            length = min(1 << shift, depth - first)
            bits += [first + bit for bit in range(length) if word >> bit & 1]
        return bits

    def _bitmap(self, tags: int, member: str) -> int:
        """Return the address of a ``struct sbitmap_queue`` of tags."""
        start = tags + self._layout.offset("blk_mq_tags", member)
        # A pointer from "blk-mq: Use pointers for blk_mq_tags bitmap tags" (in v5.10)
        # on, until "blk-mq: Stop using pointers for blk_mq_tags bitmap tags" (in v5.16)
        return self._layout.word(start) if self._is_pointer(member) else start

    def _is_pointer(self, member: str) -> bool:
        type_ = find_type(self._layout.reader.prog, "struct blk_mq_tags")
        return is_pointer(member_of(type_, member).type)

    def _scheduler(self, queue: int) -> str | None:
        layout = self._layout
        elevator = layout.member(queue, "request_queue", "elevator")
        if elevator < KERNEL_HALF:
            return None
        try:
            kind = layout.member(elevator, "elevator_queue", "type")
            name = layout.member(kind, "elevator_type", "elevator_name")
            if name >= KERNEL_HALF:
                return read_string(layout.reader, name, 64)
            return layout.text(kind, "elevator_type", "elevator_name")
        except LOST:
            return None

    def _places(self, disk: Disk, contexts: Iterable[int]) -> dict[int, Stage]:
        """Map addresses of requests on dispatch and requeue lists to their stages."""
        layout = self._layout
        node = layout.offset("request", "queuelist")
        heads: list[tuple[int, Stage]] = [
            (context + layout.offset("blk_mq_hw_ctx", "dispatch"), "dispatch")
            for context in contexts
        ]
        offset = layout.offset("request_queue", "requeue_list")
        heads.append((disk.queue + offset, "requeued"))
        places: dict[int, Stage] = {}
        for head, stage in heads:
            for address, _ in list_records(
                *(layout.reader, head, node, node + 16, self._losses),
                f"requests of {disk.name}",
            ):
                places[address] = stage
                if len(places) >= _MAX_LISTED:
                    return places
        return places

    def _rows(self, found: "_Found", places: dict[int, Stage]) -> Iterator[InFlight]:
        order = np.argsort(found["start"], kind="stable")
        for row in order.tolist():
            # Tasks keep some requests for their next I/O (blk_plug.cached_rqs).
            is_spare = not (found["bio"][row] or found["state"][row])
            if not is_spare or int(found.addresses[row]) in places:
                yield self._row(found, row, places)

    def _row(self, found: "_Found", row: int, places: dict[int, Stage]) -> InFlight:
        address, state = int(found.addresses[row]), int(found["state"][row])
        tag = int(found["tag"][row]) & _NO_TAG
        pid = self._plugged.get(address)
        stage: Stage
        if state == _IN_FLIGHT:
            stage = "driver"
        elif state == _COMPLETE:
            stage = "completed"
        elif pid is not None:
            stage = "plugged"
        elif address in places:
            stage = places[address]
        else:
            scheduled = int(found["internal"][row]) & _NO_TAG != _NO_TAG
            stage = "scheduler" if scheduled else "queued"
        size = int(found["bytes"][row])
        return InFlight(
            address=Address(address),
            operation=self.operation(int(found["flags"][row])),
            sector=int(found["sector"][row]) if size else None,
            bytes=size,
            stage=stage,
            age_ns=self._since(int(found["start"][row])),
            driver_age_ns=self._in_driver(found, row) if stage == "driver" else None,
            tag=None if tag == _NO_TAG else tag,
            pid=pid,
        )

    def _since(self, moment: int) -> int | None:
        if not moment or self._now_ns is None:
            return None
        return max(0, self._now_ns - moment)

    def _in_driver(self, found: "_Found", row: int) -> int | None:
        """Return the time since the driver got a request, in ns; ``None`` if unknown.

        If ``io_start_time_ns`` is 0, the driver got it at ``deadline - timeout``, in
        jiffies.
        """
        begun = int(found["begun"][row])
        if begun or self.jiffies is None:
            return self._since(begun)
        issued = int(found["deadline"][row]) - int(found["timeout"][row])
        return self._since(self.jiffies.time_ns(issued) or 0) if issued else None

    @cached_property
    def jiffies(self) -> Jiffies | None:
        """The kernel's count of ticks; ``None`` if it cannot be read."""
        try:
            return read_jiffies(self._layout.reader.prog)
        except LOST as error:
            self._losses.lose(Loss.CLOCKS, f"cannot read jiffies: {error}")
            return None

    def operation(self, flags: int) -> str:
        """Return the name of the operation of a request or bio: ``write-zeroes``."""
        number = flags & _OPERATION
        return self._operations.get(number, f"operation {number}")

    @cached_property
    def _operations(self) -> dict[int, str]:
        # "treewide: Rename enum req_opf into enum req_op" (in v6.0)
        for name in ("enum req_op", "enum req_opf"):
            try:
                values = enumerators(self._layout.reader.prog, name)
            except MissingError:
                continue
            return {
                value: text.removeprefix("REQ_OP_").lower().replace("_", "-")
                for text, value in values.items()
            }
        return {0: "read", 1: "write", 2: "flush", 3: "discard"}

    @cached_property
    def _plugged(self) -> dict[int, int]:
        """Maps the address of each request in a task's plug to the ID of the thread."""
        layout = self._layout
        plugged: dict[int, int] = {}
        if not layout.has("task_struct", "plug"):
            return plugged
        wanted = {"plug": ("plug",)}
        addresses = self._tasks["address"].astype(np.uint64)
        # A task that sleeps has unplugged its requests.
        awake = (self._tasks["state"] == 0) & (self._tasks["exit_state"] == 0)
        rows = np.flatnonzero(awake)
        read = read_structs(
            *(layout.reader, "struct task_struct", wanted, addresses[rows], LossLog())
        )
        for row in np.flatnonzero(read["plug"] >= np.uint64(KERNEL_HALF)).tolist():
            pid = int(self._tasks["pid"][rows[row]])
            try:
                for request in self._in_plug(int(read["plug"][row])):
                    if request in plugged:
                        break
                    plugged[request] = pid
                    if len(plugged) >= _MAX_LISTED:
                        return plugged
            except LOST:
                # The plug is on the stack of a running task, which may be done with it.
                continue
        return plugged

    def _in_plug(self, plug: int) -> Iterator[int]:
        """Yield the addresses of the requests in a ``struct blk_plug``.

        :raises drgn.FaultError: if one cannot be read
        """
        layout = self._layout
        # Since "block: change plugging to use a singly linked list" (in v5.16)
        if layout.has("request", "rq_next"):
            following = layout.offset("request", "rq_next")
            request = layout.member(plug, "blk_plug", "mq_list")
            while request >= KERNEL_HALF:
                yield request
                request = layout.word(request + following)
            return
        node = layout.offset("request", "queuelist")
        head = plug + layout.offset("blk_plug", "mq_list")
        for request, _ in list_records(
            layout.reader, head, node, node + 16, LossLog(), "a plug"
        ):
            yield request


class _Found:
    """Members of the requests in use, by column; zeros if the kernel lacks a member."""

    def __init__(self, addresses: Addresses, read: Structs, kept: Booleans) -> None:
        self.addresses = addresses
        self._read = read
        self._kept = kept

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        if not self._read.has(column):
            return np.zeros(len(self.addresses), np.uint64)
        values: npt.NDArray[Any] = self._read[column][self._kept]
        return values


@per_context
def all_requests(context: LockContext) -> Requests:
    """Return the reader of the requests of a context."""
    return Requests(context.layout, context.losses, context.tasks, context.monotonic_ns)
