# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts pages by order: free blocks of the buddy allocator and compound pages."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.kernel.reader import distinct
from msatools.memory.pages.classes import NCLASSES, PageClass
from msatools.memory.pages.classify import Block, Indices, where
from msatools.memory.pages.counting import Counts

ORDERS = 24
"""Above any order: a page of 16 GiB has order 22."""

NO_ORDER = ORDERS
"""Row of pages without an order, after the rows of all orders."""

_ORDERS = np.arange(ORDERS + 1)

_MAX_PARTS = 1 << 16


def free_blocks(block: Block) -> tuple[Indices, npt.NDArray[np.intp]]:
    """
    Return the free blocks of the buddy allocator.

    :return: Indices of their first pages, ascending, and their orders.
    """
    types = block.layout.types
    typed = where((block.words + np.uint32(1)) > np.uint32(types.lowest))
    keys = block.words[typed] >> np.uint32(types.shift) & np.uint32(types.mask)
    is_free = types.classes[keys] == PageClass.FREE_BUDDY
    firsts = typed[is_free & (block.codes[typed] == PageClass.FREE_BUDDY)]
    words = block.column(block.layout.private)[firsts]
    orders = np.minimum(words, np.uint64(ORDERS)).astype(np.intp)
    sizes = np.left_shift(1, orders)
    # Damage: such a page is classified as a single page.
    orders[(firsts + block.pfn) % sizes != 0] = 0
    orders[firsts + sizes > len(block)] = 0
    # A block that was merged into a larger one may still look like a block.
    ends = np.maximum.accumulate(firsts + np.left_shift(1, orders))
    outermost = np.ones(len(firsts), np.bool_)
    outermost[1:] = firsts[1:] >= ends[:-1]
    return firsts[outermost], orders[outermost]


def free_rooms(block: Block, orphans: Indices) -> Indices:
    """
    Return the largest possible size of a free block that begins at each page.

    :param orphans: All unreferenced pages without a class, among them those on per-CPU
        lists.
    :return: Number of consecutive orphans, limited by the alignment of the first pfn.
    """
    last = np.flatnonzero(np.diff(orphans, append=-1) != 1)
    rooms = np.repeat(orphans[last] + 1, np.diff(last, prepend=-1)) - orphans
    pfns = orphans + block.pfn
    return np.where(pfns == 0, rooms, np.minimum(rooms, pfns & -pfns))


def _spread(
    firsts: Indices, block_orders: npt.NDArray[np.intp], orders: npt.NDArray[np.intp]
) -> None:
    """Set *orders* of all pages of some blocks."""
    for order in distinct(block_orders[block_orders > 0]).tolist():
        pages = np.arange(1 << order)
        orders[firsts[block_orders == order, np.newaxis] + pages] = order


def _spread_compound(
    block: Block, orders: npt.NDArray[np.intp]
) -> list[tuple[int, Indices]]:
    """
    Set the order of all pages of compound pages.

    :return: Index of the head, which may be outside the block, and pages, of each
        compound page that is or may be in other blocks as well. Their order is not set.
    """
    tails, heads = block.tails, block.tail_heads
    if not len(tails):
        return []
    near = (heads >= 0) & (heads < len(block))
    far = distinct(heads[~near]).tolist()
    parts = [(head, tails[heads == head]) for head in far]
    tails, heads = tails[near], heads[near]
    sizes = np.bincount(heads, minlength=len(block)) + 1
    if sizes[0] == len(block):
        # Both are aligned to their size: only such a page can extend past the block.
        return [*parts, (0, np.arange(len(block)))]
    compound = where(sizes > 1)
    logarithms = np.log2(sizes[compound]).astype(np.intp)
    logarithms[np.left_shift(1, logarithms) != sizes[compound]] = NO_ORDER
    orders[compound] = logarithms
    orders[tails] = orders[heads]
    return parts


class ByOrder(Struct):
    """
    Counts pages by the order of their free block or compound page.

    A page outside of both has order 0. Reserved memory, which was never in the
    allocator, and pages that are not in the dump have no order.
    """

    pcp_pfns: npt.NDArray[np.uint64]
    """First pages of blocks on per-CPU lists, ascending."""

    pcp_orders: npt.NDArray[np.uint8]

    counts: Counts = field(
        default_factory=lambda: np.zeros((ORDERS + 1, NCLASSES), np.int64)
    )
    """Pages by order and class; the last row is for pages without an order."""

    parts: dict[int, Counts] = field(default_factory=dict)
    """Pages by class of compound pages that fill a block and may extend into others, by
    address of the head."""

    def observe(self, block: Block) -> None:
        firsts, free_orders = free_blocks(block)
        used = block.codes != PageClass.FREE_BUDDY
        blocks = np.bincount(free_orders, minlength=ORDERS + 1)
        free = blocks << _ORDERS
        is_damaged = free.sum() + np.count_nonzero(used) != len(block)
        if not is_damaged:
            self.counts[:, PageClass.FREE_BUDDY] += free
            if not used.any():
                return
        orders = np.zeros(len(block), np.intp)
        if is_damaged:
            _spread(firsts, free_orders, orders)
        _spread(*self._listed(block), orders)
        parts = _spread_compound(block, orders)
        orders[block.codes == PageClass.RESERVED] = NO_ORDER
        orders[block.codes >= PageClass.EXCLUDED] = NO_ORDER
        if not is_damaged:
            orders[~used] = -1
        for head, pages in parts:
            self._part(block.address + head * block.layout.size, block, pages, orders)
        kept = where(orders >= 0)
        codes = block.codes
        if len(kept) < len(block):
            orders, codes = orders[kept], codes[kept]
        keys = orders * NCLASSES + codes
        size = (ORDERS + 1) * NCLASSES
        self.counts += np.bincount(keys, minlength=size).reshape(-1, NCLASSES)

    def _listed(self, block: Block) -> tuple[Indices, npt.NDArray[np.intp]]:
        ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
        first, last = np.searchsorted(self.pcp_pfns, ends)
        pages = (self.pcp_pfns[first:last] - ends[0]).astype(np.intp)
        orders = self.pcp_orders[first:last].astype(np.intp)
        if not len(pages):
            return pages, orders
        # Part of a listed block may have been allocated since.
        ends = pages + np.left_shift(1, orders)
        fits = ends <= len(block)
        pages, orders, ends = pages[fits], orders[fits], ends[fits]
        before = np.cumsum(block.codes == PageClass.FREE_PCP)
        free = before[ends - 1] - before[pages] == ends - 1 - pages
        free &= block.codes[pages] == PageClass.FREE_PCP
        return pages[free], orders[free]

    def _part(
        self,
        address: int,
        block: Block,
        pages: Indices,
        orders: npt.NDArray[np.intp],
    ) -> None:
        """Count the pages without an order, and set their order to -1: counted."""
        # With damage a page may be a tail of several heads, or occur twice.
        pages = distinct(pages[orders[pages] == 0])
        if not len(pages):
            return
        if address not in self.parts and len(self.parts) >= _MAX_PARTS:
            # Real heads are few; a damaged dump may have one for each page.
            orders[pages] = NO_ORDER
            return
        orders[pages] = -1
        counts = np.bincount(block.codes[pages], minlength=NCLASSES)
        self.parts[address] = self.parts.get(address, 0) + counts

    def merge(self, later: "ByOrder") -> None:
        self.counts += later.counts
        for address, counts in later.parts.items():
            self.parts[address] = self.parts.get(address, 0) + counts

    def total(self) -> Counts:
        """Return all counts, with parts joined to whole compound pages."""
        total = self.counts.copy()
        for counts in self.parts.values():
            pages = int(counts.sum())
            order = pages.bit_length() - 1
            whole = pages == 1 << order and order < ORDERS
            total[order if whole else NO_ORDER] += counts
        return total
