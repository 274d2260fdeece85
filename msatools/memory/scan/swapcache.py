# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds out whether swap cache pages without a mapping are anonymous or shmem."""

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.swap import for_each_swap_info

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import Block, Indices, where
from msatools.memory.scan.result import ScanResult

_SWAP_TYPE_SHIFT = 58
"""Shift of the type in a swap entry (linux/swapops.h): 63 - 5 bits."""

_SWAP_HAS_CACHE = 0x40
_SWAP_MAP_SHMEM = 0xBF
"""The use count of an entry that shmem owns (linux/swap.h)."""


def settle_swapcache(reader: Reader, result: ScanResult, losses: LossLog) -> None:
    """
    Move shared memory pages that are only in the swap cache to the class shmem.

    A page that was read from swap has no mapping until it is mapped or put back into
    its file. Then only the use count in the swap map distinguishes shmem from anon.
    """
    if not result.swap_entries:
        return
    entries = np.concatenate(result.swap_entries).tolist()
    keys = np.concatenate(result.swap_keys).tolist()
    maps = swap_maps(reader)
    if maps is None:
        losses.note(
            "no-swap-map",
            f"{len(entries):,} pages in the swap cache may be shmem, counted as anon",
        )
        return
    for entry, key in zip(entries, keys, strict=True):
        if is_shmem(reader, maps, entry):
            result.move(key, PageClass.ANON, PageClass.SHMEM, 1)
            result.anon_unmapped -= 1
            result.anon_swapcache -= 1
            result.shmem_swapcache += 1


def swap_maps(reader: Reader) -> dict[int, int] | None:
    """Return the address of each device's swap map by type; ``None`` if unknown."""
    try:
        return {
            info.type.value_(): info.swap_map.value_()
            for info in for_each_swap_info(reader.prog)
        }
    except (LookupError, AttributeError, drgn.FaultError):
        return None


def is_shmem(reader: Reader, maps: dict[int, int], entry: int) -> bool:
    """Return whether a swap entry belongs to shared memory."""
    device, offset = entry >> _SWAP_TYPE_SHIFT, entry & ((1 << _SWAP_TYPE_SHIFT) - 1)
    if not maps.get(device):
        return False
    try:
        count = reader.read(maps[device] + offset, 1)[0]
    except drgn.FaultError:
        return False
    return count & ~_SWAP_HAS_CACHE == _SWAP_MAP_SHMEM


def nameless_swap(block: Block) -> tuple[Indices, npt.NDArray[np.uint64]]:
    """Return the anon pages of the swap cache without a mapping, and their entries."""
    pages = where(block.codes == PageClass.ANON)
    heads = block.heads_of(pages)
    bits = np.uint64(block.layout.swapcache_bits)
    nameless = (block.mapping[heads] == 0) & (block.flags[heads] & bits == bits)
    entries = block.column(block.layout.private)[heads[nameless]]
    return pages[nameless], entries
