# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads the bios that disks of the device mapper hold back (drivers/md/).

A suspended disk defers them (dm.c), and one with a delay keeps them until they are due
(dm-delay.c). Other targets pass bios on, or keep them in structures of their own.
"""

from collections.abc import Iterator

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.kernel.walks import list_records
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.struct_reader import Layout
from msatools.locks.io.disks import Disk
from msatools.locks.io.model import InFlight, Stage
from msatools.locks.io.requests import Requests, all_requests
from msatools.target.addresses import KERNEL_HALF
from msatools.target.model import Address

_MAX_BIOS = 1 << 16
_MAX_TARGETS = 1 << 10
_OPERATION = 0xFF
"""``REQ_OP_MASK`` of ``bio.bi_opf``."""

_ISSUE_BITS = 51
"""Bits of the time in ``struct bio_issue`` (``BIO_ISSUE_TIME_MASK``): nanoseconds."""

_IO_MAGIC = 19577
"""``DM_IO_MAGIC``: the first bio of an I/O is in its ``struct dm_io``."""

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
            # dm_bio_from_per_bio_data(): the data of the target come first.
            io = info + room
            magic = layout.member(io, "dm_io", "magic")
            if magic != _IO_MAGIC:
                # A further bio of a split one; the first one has all of it.
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
            operation=self._requests.operation(flags & _OPERATION),
            sector=sector if size else None,
            bytes=size,
            stage=stage,
            age_ns=age,
            driver_age_ns=None,
            tag=None,
            pid=None,
        )

    def _issued_ns(self, bio: int) -> int | None:
        """Return the time at which a bio was submitted, if it is recorded."""
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
