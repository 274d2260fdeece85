# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads the disks of a kernel, and which are stacked on which (block/genhd.c)."""

from functools import cached_property
from itertools import islice

from drgn.helpers.linux.block import for_each_disk, for_each_partition
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_records
from msatools.kernel.words import unsigned
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.storage import Storage
from msatools.locks.base.struct_reader import Layout
from msatools.locks.external_waits.mapper import is_suspended
from msatools.selfdesc.find import ask_each
from msatools.target.addresses import KERNEL_HALF

_MAX_DEVICES = 1 << 16
"""Maximum number of disks and partitions."""

_MAX_BELOW = 1 << 12
_LOOP_MAJOR, _MD_MAJOR = 7, 9
_MINOR_BITS = 20


class Disk(Struct, frozen=True):
    """Some members of a ``struct gendisk``."""

    address: int
    name: str
    numbers: str
    """As ``254:0``."""

    major: int
    queue: int
    """Address of its ``struct request_queue``."""

    part0: int
    """Address of the ``struct block_device`` of the whole disk."""

    private: int
    """``private_data`` of its driver."""

    @property
    def is_mapped(self) -> bool:
        """Whether it is a disk of the device mapper."""
        return self.name.startswith("dm-")


class Disks:
    """The disks, read once per context."""

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
        """Maps the numbers of disks and of partitions to the disk."""
        disks, parts = self._read
        whole = {disk.numbers: disk for disk in disks.values()}
        return whole | {
            f"{number >> _MINOR_BITS}:{number & (1 << _MINOR_BITS) - 1}": disks[disk]
            for disk, number, _ in parts.values()
            if disk in disks
        }

    @cached_property
    def _read(self) -> tuple[dict[int, Disk], dict[int, tuple[int, int, int]]]:
        """Disks by address; and of each block device its disk, numbers and kobject."""
        disks: dict[int, Disk] = {}
        parts: dict[int, tuple[int, int, int]] = {}
        layout, name = self._layout, "block_device"
        try:
            # "block: merge struct block_device and struct hd_struct" (in v5.11)
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
        """Return the disks that a stacked disk is on; empty for hardware."""
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
        # "block: move the holder tracking code to a separate file" (in v5.15): before,
        # the list was in struct block_device.
        if not self._layout.has("gendisk", "slave_bdevs"):
            return ()
        head = disk.address + self._layout.offset("gendisk", "slave_bdevs")
        # "block: don't allow a disk link holder to itself" (in v6.2)
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
        """Return the disk of the file system with a loop device's file."""
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
        """Return whether a disk has no size, as a loop device without a file."""
        name, size = "block_device", "bd_nr_sectors"
        if disk.part0 < KERNEL_HALF or not self._layout.has(name, size):
            return False
        return not self._layout.member(disk.part0, name, size)

    def is_suspended(self, disk: Disk) -> bool:
        """Return whether a disk is a suspended one of the device mapper."""
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
