# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads the use of swap: devices, anonymous and shmem pages, zswap and zram.

Sources: mm/swapfile.c (swap_info), mm/shmem.c (shmem_swaplist), mm/zswap.c,
drivers/block/zram. A value that the kernel lacks, or that is unreadable, is ``None``.
"""

from collections.abc import Iterator

import drgn
import numpy as np

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.files import Paths
from msatools.kernel.mm import Swap
from msatools.kernel.reader import Reader
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.structs import read_structs
from msatools.kernel.walks import list_nodes
from msatools.memory.model import SwapDevice, SwapUse, Zram, Zswap
from msatools.selfdesc.find import (
    drgn_lookups,
    find_symbol,
    find_type,
    find_variable,
    offset_of,
)

_OFF_LIST = (62, 30)
"""``SWAP_USAGE_OFFLIST_BIT``, the newest first."""

_MOST_DEVICES = 32
"""Upper bound of the swap devices: MAX_SWAPFILES is less on all kernels."""

_USED = 1
"""SWP_USED (include/linux/swap.h)."""

_MOST_POOLS = 64
"""Maximum number of zswap pools; a pool exists for each compressor still in use."""


def read_swap_use(
    reader: Reader, swap: Swap, cached_pages: int | None, losses: LossLog
) -> SwapUse | None:
    """Read the use of swap; ``None`` if its size is unknown, or with CONFIG_SWAP=n."""
    if swap.pages is None or swap.free_pages is None:
        return None
    if not swap.pages:
        return SwapUse(
            devices=(),
            total_pages=0,
            free_pages=0,
            cached_pages=cached_pages,
            anon_pages=0,
            shmem_pages=0,
            zswap=None,
            zram=None,
        )
    devices = tuple(_devices(reader, losses))
    used = swap.pages - swap.free_pages
    shmem_pages = _shmem(reader, losses)
    return SwapUse(
        devices=devices,
        total_pages=swap.pages,
        free_pages=swap.free_pages,
        cached_pages=cached_pages,
        anon_pages=None if shmem_pages is None else max(used - shmem_pages, 0),
        shmem_pages=shmem_pages,
        zswap=_zswap(reader, losses),
        zram=_zram(reader, losses),
    )


def _infos(prog: drgn.Program) -> Iterator[drgn.Object]:
    """Yield the ``struct swap_info_struct`` of each slot, some of which are NULL."""
    try:
        infos = find_variable(prog, "swap_info")
        count = min(int(find_variable(prog, "nr_swapfiles")), _MOST_DEVICES)
    except LOST:
        return
    yield from (infos[number] for number in range(count))


def _is_used(info: drgn.Object) -> bool:
    return bool(info) and bool(int(info.flags) & _USED)


def _devices(reader: Reader, losses: LossLog) -> Iterator[SwapDevice]:
    paths = Paths(reader, losses)
    for info in _infos(reader.prog):
        try:
            if not _is_used(info):
                continue
            file = info.swap_file
            place = int(file.f_path.mnt), int(file.f_path.dentry)
            yield SwapDevice(
                name=(paths.tell([place])[0] or "") if file else "",
                pages=int(info.pages),
                used=_used_pages(info),
            )
        except UNREADABLE as error:
            losses.lose(Loss.DEVICES, f"cannot read a device of swap: {error}")
        except MissingError:
            return


def _used_pages(info: drgn.Object) -> int:
    """Return the used pages of a ``struct swap_info_struct``.

    Since "mm, swap: clean up plist removal and adding" (in v6.14) one bit of the count
    is set on a device that is full or being swapped off: bit 30, and since "mm, swap:
    fix SWAP_USAGE_OFFLIST_BIT collision with real usage count" bit 62.
    """
    used, pages = _count(info.inuse_pages), int(info.pages)
    for bit in _OFF_LIST:
        if used > pages:
            used &= ~(1 << bit)
    return used


def _count(value: drgn.Object) -> int:
    """Return a count, which is an ``atomic_long_t`` on some kernels."""
    kind = value.type_
    while kind.kind == drgn.TypeKind.TYPEDEF:
        kind = kind.type
    is_atomic = kind.kind == drgn.TypeKind.STRUCT
    return int(value.counter if is_atomic else value)


def _shmem(reader: Reader, losses: LossLog) -> int | None:
    """Return the number of shmem pages on swap; ``None`` if some are unreadable."""
    try:
        head = int(find_symbol(reader.prog, "shmem_swaplist").address)
        node = offset_of(find_type(reader.prog, "struct shmem_inode_info"), "swaplist")
        aside = LossLog()
        nodes = list_nodes(reader, head, aside, "the list of files on swap")
        members = {"swapped": ("swapped",)}
        infos = nodes - np.uint64(node)
        found = read_structs(reader, "struct shmem_inode_info", members, infos, aside)
    except LOST:
        return None
    losses.add(aside)
    if aside.lost:
        return None
    return int(found["swapped"].astype(np.int64).sum()) if len(infos) else 0


def _zswap(reader: Reader, losses: LossLog) -> Zswap | None:
    prog = reader.prog
    try:
        # The counter has 32 or 64 bits; its low 32 bits are enough.
        stored = _number(reader, "zswap_stored_pages", 4)
        pool_bytes = _pool_bytes(reader, losses)
    except LOST:
        return None
    page_size = int(find_variable(prog, "PAGE_SIZE"))
    ratio = stored * page_size / pool_bytes if pool_bytes else None
    return Zswap(stored_pages=stored, pool_bytes=pool_bytes, ratio=ratio)


def _number(reader: Reader, name: str, size: int) -> int:
    """Read an unsigned variable of *size* bytes whose type BTF does not have."""
    data = reader.read(int(find_symbol(reader.prog, name).address), size)
    return int.from_bytes(data, "little")


def _pool_bytes(reader: Reader, losses: LossLog) -> int | None:
    prog = reader.prog
    try:
        # Before "mm: zswap: optimize zswap pool size tracking" (in v6.10), which counts
        # by pool.
        return _number(reader, "zswap_pool_total_size", 8)
    except MissingError:
        pass
    try:
        head = int(find_symbol(prog, "zswap_pools").address)
        kind = find_type(prog, "struct zswap_pool")
        node = offset_of(kind, "list")
        page_size = int(find_variable(prog, "PAGE_SIZE"))
        total = 0
        nodes = list_nodes(reader, head, losses, "the pools of zswap")
        for address in nodes[:_MOST_POOLS].tolist():
            pool = drgn.Object(prog, kind, address=address - node)
            # "mm/zpool: remove zpool, zswap uses zsmalloc directly" (in v6.18)
            if kind.has_member("zs_pool"):
                allocator = pool.zs_pool
            elif bytes(pool.zpool.driver.type.string_()) == b"zsmalloc":
                allocator = _zs_pool(prog, int(pool.zpool.pool))
            else:
                return None
            total += _count(allocator.pages_allocated) * page_size
    except (MissingError, LookupError):
        return None
    return total


def _zs_pool(prog: drgn.Program, address: int) -> drgn.Object:
    """Return the ``struct zs_pool`` at an address; zsmalloc may be a module."""
    try:
        type_ = find_type(prog, "struct zs_pool")
    except MissingError:
        type_ = find_type(prog, "struct zs_pool", "zsmalloc")
    return drgn.Object(prog, type_, address=address)


def _zram(reader: Reader, losses: LossLog) -> Zram | None:
    prog = reader.prog
    disks = []
    for info in _infos(prog):
        try:
            disk = _disk(info) if _is_used(info) else None
            if disk is not None and _is_zram(disk):
                disks.append(int(disk.private_data))
        except UNREADABLE as error:
            losses.lose(Loss.DEVICES, f"cannot read a device of swap: {error}")
        except MissingError:
            return None
    if not disks:
        return None
    page_size = int(find_variable(prog, "PAGE_SIZE"))
    stored = compressed = pool_pages = 0
    knows_pool = True
    try:
        with drgn_lookups:
            type_ = find_type(prog, "struct zram", "zram")
            for address in disks:
                zram = drgn.Object(prog, type_, address=address)
                stored += _count(zram.stats.pages_stored)
                compressed += _count(zram.stats.compr_data_size)
                try:
                    pool = _zs_pool(prog, int(zram.mem_pool))
                    pool_pages += _count(pool.pages_allocated)
                except MissingError:
                    knows_pool = False
    except MissingError:
        return None  # the module has no types in this dump
    except UNREADABLE as error:
        losses.lose(Loss.DEVICES, f"cannot read a device of zram: {error}")
        return None
    pool_bytes = pool_pages * page_size if knows_pool else None
    return Zram(
        stored_pages=stored,
        compressed_bytes=compressed,
        pool_bytes=pool_bytes,
        ratio=stored * page_size / pool_bytes if pool_bytes else None,
    )


def _disk(info: drgn.Object) -> drgn.Object | None:
    """Return the ``struct gendisk`` of a swap device; ``None`` if it has none."""
    with drgn_lookups:
        device = info.bdev
        return device.bd_disk if device else None


def _is_zram(disk: drgn.Object) -> bool:
    with drgn_lookups:
        name = bytes(disk.disk_name.string_())
        owner = disk.fops.owner
        is_module = not owner or bytes(owner.name.string_()) == b"zram"
    return is_module and name.startswith(b"zram")
