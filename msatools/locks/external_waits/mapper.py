# SPDX-License-Identifier: LGPL-2.1-or-later

"""Recognizes suspended disks of the device mapper (drivers/md/dm.c)."""

from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

_SUSPENDED = 0b11
"""``DMF_BLOCK_IO_FOR_SUSPEND`` and ``DMF_SUSPENDED``, bits 0 and 1."""


def is_suspended(layout: Layout, mapped: int, queue: int) -> bool:
    """
    Return whether a ``struct mapped_device`` is suspended.

    Its type is defined in a module (dm-core.h), so the offset of its flags is computed:
    they follow two mutexes, a list head and a pointer. After them are a mutex, two
    integers and the request queue, which has to be that of the disk. This holds for all
    kernels from v6.1 on that were checked.

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
