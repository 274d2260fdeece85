# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds out whether swap cache pages without a mapping are anonymous or shmem."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.swap import for_each_swap_info
from msgspec import Struct

from msatools.errors import LOST
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_nodes
from msatools.kernel.xarray import xarray_values
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import Block, Indices, where
from msatools.memory.scan.result import ScanResult
from msatools.selfdesc.find import (
    ask_each,
    drgn_lookups,
    find_type,
    find_variable,
    offset_of,
)

_SWAP_TYPE_SHIFT = 58
"""Shift of the type in a swap entry (linux/swapops.h): 63 - 5 bits."""

_SWAP_HAS_CACHE = 0x40
_SWAP_MAP_SHMEM = 0xBF
"""The use count of an entry that shmem owns (linux/swap.h)."""


def settle_swapcache(reader: Reader, result: ScanResult, losses: LossLog) -> None:
    """
    Move shared memory pages that are only in the swap cache to the class shmem.

    A page that was read from swap has no mapping until it is mapped or put back into
    its file. Then only the swap entry distinguishes shmem from anon.
    """
    if not result.swap_entries:
        return
    entries = np.concatenate(result.swap_entries)
    keys = np.concatenate(result.swap_keys)
    swapped = swapped_shmem(reader, losses)
    if swapped is None:
        losses.note(
            "no-swap-list",
            f"{len(entries):,} pages in the swap cache may be shmem, counted as anon",
        )
        return
    for key in keys[swapped.have(entries)].tolist():
        result.move(key, PageClass.ANON, PageClass.SHMEM, 1)
        result.anon_unmapped -= 1
        result.anon_swapcache -= 1
        result.shmem_swapcache += 1


class SwapMarks(Struct, frozen=True):
    """Use counts of swap entries, a byte each, which mark those of shared memory."""

    reader: Reader
    maps: Mapping[int, int]
    """Address of the swap map by the number of the device."""

    def have(self, entries: Addresses) -> npt.NDArray[np.bool_]:
        """Return which entries belong to shared memory."""
        shift = np.uint64(_SWAP_TYPE_SHIFT)
        devices, index = np.unique(entries >> shift, return_inverse=True)
        maps = [self.maps.get(device, 0) for device in devices.tolist()]
        bases = np.array(maps, np.uint64)[index]
        offsets = entries & ((np.uint64(1) << shift) - np.uint64(1))
        marks, readable = self.reader.read_records(bases + offsets, 1)
        of_shmem = marks[:, 0] & ~np.uint8(_SWAP_HAS_CACHE) == _SWAP_MAP_SHMEM
        shmem: npt.NDArray[np.bool_] = readable & (bases != 0) & of_shmem
        return shmem


class SwappedShmem(Struct, frozen=True):
    """Swap entries of shared memory, as ranges in ascending order."""

    first: Addresses
    last: Addresses

    def have(self, entries: Addresses) -> npt.NDArray[np.bool_]:
        """Return which entries belong to shared memory."""
        if not len(self.first):
            return np.zeros(len(entries), np.bool_)
        at = np.searchsorted(self.first, entries, side="right") - 1
        return (at >= 0) & (entries <= self.last[at])


def swapped_shmem(reader: Reader, losses: LossLog) -> SwapMarks | SwappedShmem | None:
    """
    Return what knows the swap entries of shared memory; ``None`` if nothing does.

    "mm, swap: use the swap table for the swap cache" (in v6.18) began to replace the
    swap map, whose mark for shmem is gone in 7.x.
    """
    try:
        with drgn_lookups:
            if find_type(reader.prog, "struct swap_cluster_info").has_member("table"):
                return swapped_files(reader, losses)
            maps = {
                info.type.value_(): info.swap_map.value_()
                for info in ask_each(for_each_swap_info, reader.prog)
            }
            return SwapMarks(reader, maps)
    except LOST:
        return None


def swapped_files(reader: Reader, losses: LossLog) -> SwappedShmem:
    """
    Read the swap entries in the trees of all files of shared memory.

    mm/shmem.c keeps a list of the files that have swapped pages. In their trees a swap
    entry is in the place of each.

    :raises MissingError: if this kernel has no such list
    """
    prog = reader.prog
    head = find_variable(prog, "shmem_swaplist").address_of_().value_()
    info = find_type(prog, "struct shmem_inode_info")
    node = offset_of(info, "swaplist")
    pages = offset_of(info, "vfs_inode.i_data.i_pages")
    ranges = [
        (entry, entry + last - first)
        for file in list_nodes(reader, head, losses, "the list of swapped shmem")
        for first, last, entry in xarray_values(
            reader, int(file) - node + pages, losses, "the pages of swapped shmem"
        )
    ]
    table = np.array(sorted(ranges), np.uint64).reshape(-1, 2)
    return SwappedShmem(table[:, 0], table[:, 1])


def nameless_swap(block: Block) -> tuple[Indices, npt.NDArray[np.uint64]]:
    """Return the anon pages of the swap cache without a mapping, and their entries."""
    pages = where(block.codes == PageClass.ANON)
    heads = block.heads_of(pages)
    bits = np.uint64(block.layout.swapcache_bits)
    nameless = (block.mapping[heads] == 0) & (block.flags[heads] & bits == bits)
    entries = block.column(block.layout.private)[heads[nameless]]
    return pages[nameless], entries
