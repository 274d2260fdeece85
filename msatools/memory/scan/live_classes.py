# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Resolves page classes during the scan, so that observers see the final ones.

A scan without observers is faster: it corrects only the sums after the scan
(``settle_pcp()``, ``settle_cache()``, ``settle_swapcache()``). This module reads the
same structures before the scan, or when the scan reaches a page of theirs.
"""

import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import Block, Indices, where
from msatools.memory.pages.freelinks import POINTER_BYTES, FreeLinks
from msatools.memory.pages.orders import free_rooms
from msatools.memory.scan.freelists import ListedPages
from msatools.memory.scan.pagecache import CacheClasses
from msatools.memory.scan.swapcache import nameless_swap, swapped_shmem


class FinalClasses:
    """Classes of the pages whose struct page does not determine them."""

    def __init__(
        self,
        reader: Reader,
        losses: LossLog,
        listed: ListedPages,
        links: FreeLinks | None = None,
    ) -> None:
        """
        :param listed: Pages on the per-CPU lists.
        :param links: Finds more of them by their links.
        """
        self._reader = reader
        self._listed = listed
        self._links = links
        self._cache = CacheClasses(reader)
        self._mappings = np.empty(0, np.uint64)
        self._classes = np.empty(0, np.uint8)
        self._swapped = swapped_shmem(reader, losses)
        self.reads = 0

    @property
    def know_swap(self) -> bool:
        """Whether swap cache pages are resolved; otherwise they are left as anon."""
        return self._swapped is not None

    def take_losses(self) -> dict[int, LossLog]:
        return self._cache.take_losses()

    def settle(self, block: Block, orphans: Indices) -> None:
        before = self._reader.reads
        self._settle_linked(block, orphans)
        self._settle_listed(block, orphans)
        self._settle_cache(block)
        self._settle_swap(block)
        self.reads += self._reader.reads - before

    def _settle_linked(self, block: Block, orphans: Indices) -> None:
        if self._links is None:
            return
        orphans = orphans[block.codes[orphans] == PageClass.UNATTRIBUTED]
        lru = block.layout.lru
        nexts, prevs = (
            block.column(offset)[orphans] for offset in (lru, lru + POINTER_BYTES)
        )
        linked = self._links.lead_to_others(block.nodes(orphans), nexts, prevs)
        # Struct page does not have the order: count one page.
        block.codes[orphans[linked]] = PageClass.FREE_PCP

    def _settle_listed(self, block: Block, orphans: Indices) -> None:
        ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
        first, last = np.searchsorted(self._listed.pfns, ends)
        if first == last or not len(orphans):
            return
        pages = (self._listed.pfns[first:last] - np.uint64(block.pfn)).astype(np.intp)
        orders = self._listed.orders[first:last]
        # A listed page that is in use was allocated meanwhile, or the list is damaged.
        free = np.isin(pages, orphans, assume_unique=True)
        rooms = free_rooms(block, orphans)
        indices = np.searchsorted(orphans, pages[free])
        free[free] = rooms[indices] >= np.left_shift(1, orders[free].astype(np.intp))
        block.codes[pages[free & (orders == 0)]] = PageClass.FREE_PCP
        for i in where(free & (orders != 0)):
            # int(): in the array's type, u8, 1 << 9 is 0.
            count = 1 << int(orders[i])
            block.codes[pages[i] : pages[i] + count] = PageClass.FREE_PCP

    def _settle_cache(self, block: Block) -> None:
        pages = where(block.codes == PageClass.FILE)
        if not len(pages):
            return
        mappings = block.mapping[pages]
        # Runs of the same file are far fewer than pages.
        new = np.ones(len(pages), np.bool_)
        new[1:] = mappings[1:] != mappings[:-1]
        starts = where(new)
        classes = self._classes_of(mappings[starts])
        lengths = np.diff(starts, append=len(pages))
        block.codes[pages] = np.repeat(classes, lengths)

    def _classes_of(self, mappings: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
        unknown = np.setdiff1d(mappings, self._mappings)
        if len(unknown):
            indices = np.searchsorted(self._mappings, unknown)
            classes = self._cache.of(unknown)
            self._mappings = np.insert(self._mappings, indices, unknown)
            self._classes = np.insert(self._classes, indices, classes)
        rows = np.searchsorted(self._mappings, mappings)
        of_mappings: npt.NDArray[np.uint8] = self._classes[rows]
        return of_mappings

    def _settle_swap(self, block: Block) -> None:
        if self._swapped is None:
            return
        pages, entries = nameless_swap(block)
        block.codes[pages[self._swapped.have(entries)]] = PageClass.SHMEM
