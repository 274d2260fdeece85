# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds suspended disks of the device mapper (drivers/md/dm.c)."""

from functools import cached_property
from itertools import islice

import drgn
from drgn.helpers.linux.block import for_each_disk

from msatools.kernel.losses import Loss
from msatools.kernel.report import LossLog
from msatools.locks.base.lock_context import LockContext, per_context
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

_MAX_DISKS = 1 << 16
_SUSPENDED = 0b11
"""``DMF_BLOCK_IO_FOR_SUSPEND`` and ``DMF_SUSPENDED``, bits 0 and 1."""


class Mapper:
    """The disks of the device mapper, read once per context."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._losses = losses

    @cached_property
    def suspended(self) -> frozenset[str]:
        """Numbers of the suspended disks, as ``254:0``."""
        suspended = set()
        try:
            for disk in islice(for_each_disk(self._layout.reader.prog), _MAX_DISKS):
                numbers = self._suspended(disk)
                if numbers is not None:
                    suspended.add(numbers)
        except (drgn.FaultError, LookupError) as error:
            self._losses.lose(Loss.DISKS, f"the list of disks is lost: {error}")
        return frozenset(suspended)

    def _suspended(self, disk: drgn.Object) -> str | None:
        """Return the numbers of a disk if it is suspended, otherwise ``None``."""
        try:
            if self._is_suspended(disk):
                return f"{int(disk.major)}:{int(disk.first_minor)}"
        except drgn.FaultError as error:
            self._losses.lose(Loss.DISKS, f"a disk is lost: {error}")
        return None

    def _is_suspended(self, disk: drgn.Object) -> bool:
        """
        Return whether a disk is that of a suspended ``struct mapped_device``.

        Its type is defined in a module (dm-core.h), so the offset of its flags is
        computed: they follow two mutexes, a list head and a pointer. After them are a
        mutex, two integers and the request queue, which has to be that of the disk.
        This holds for all kernels from v6.1 on that were checked.
        """
        if not disk.disk_name.string_().startswith(b"dm-"):
            return False
        mutex = self._layout.size("mutex")
        flags = int(disk.private_data) + 2 * mutex + 24
        if flags < KERNEL_HALF:
            return False
        if self._layout.word(flags + 8 + mutex + 8) != int(disk.queue):
            return False
        return bool(self._layout.word(flags) & _SUSPENDED)


@per_context
def mapped_disks(context: LockContext) -> Mapper:
    """Return the reader of the disks of the device mapper."""
    return Mapper(context.layout, context.losses)
