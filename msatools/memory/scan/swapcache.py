# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds out whether swap cache pages without a mapping are anonymous or shmem."""

from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_nodes
from msatools.kernel.xarray import xarray_values
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import Block, Indices, where
from msatools.memory.scan.result import ScanResult
from msatools.selfdesc.variables import find_variable


def settle_swapcache(reader: Reader, result: ScanResult, losses: LossLog) -> None:
    """
    Move shared memory pages that are only in the swap cache to the class shmem.

    A page that was read from swap has no mapping until it is mapped or put back into
    its file. Then only the file, which has the swap entry in the page's place,
    distinguishes shmem from anon.
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


@dataclass(frozen=True)
class SwappedShmem:
    """Swap entries of shared memory, as ranges in ascending order."""

    first: Addresses
    last: Addresses

    def have(self, entries: Addresses) -> npt.NDArray[np.bool_]:
        """Return which entries belong to shared memory."""
        if not len(self.first):
            return np.zeros(len(entries), np.bool_)
        at = np.searchsorted(self.first, entries, side="right") - 1
        return (at >= 0) & (entries <= self.last[at])


def swapped_shmem(reader: Reader, losses: LossLog) -> SwappedShmem | None:
    """
    Read the swap entries in the trees of all files of shared memory.

    mm/shmem.c keeps a list of the files that have swapped pages. The use counts of
    swap entries named them, too, but no longer do in 7.x.

    :return: ``None`` if this kernel has no such list.
    """
    prog = reader.prog
    try:
        head = find_variable(prog, "shmem_swaplist").address_of_().value_()
        info = prog.type("struct shmem_inode_info")
        node = drgn.offsetof(info, "swaplist")
        pages = drgn.offsetof(info, "vfs_inode.i_data.i_pages")
    except LookupError:
        return None
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
