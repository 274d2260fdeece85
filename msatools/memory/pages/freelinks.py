# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds pages on the per-CPU free lists of a running kernel by their links alone.

A running kernel changes these lists between the read of a struct page and the read of
the lists, and some lists can then not be followed. But list_del() poisons the links of
a page, and a page that was never on a list is linked to itself. So a page with links to
others was on a list when it was read. If that was not a per-CPU list, the page was on
its way between one and the buddy allocator, or was isolated by compaction.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.reader import Reader
from msatools.memory.pages.classify import Indices, Words, where
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange
from msatools.selfdesc.find import find_type

UNLISTED = -1
POINTER_BYTES = 8
"""Size of each of the two links of a list node."""

_ALIGNMENT = np.uint64(7)


def are_links(words: Words, kernel_start: int) -> npt.NDArray[np.bool_]:
    """
    Return which words may be the address of a list node.

    LIST_POISON is below the kernel's addresses. The list heads are per-CPU memory, in
    the direct map or at the lowest kernel addresses.

    :param kernel_start: Lowest kernel address (:attr:`PageLayout.kernel_start`).
    """
    links: npt.NDArray[np.bool_] = words & _ALIGNMENT == 0
    links &= words >= np.uint64(kernel_start)
    return links


class FreeLinks(Struct, frozen=True):
    """Finds unreferenced, unclassified pages that were on a list, by their links."""

    first: int
    """Address of the list node of pfn 0."""

    size: int
    """Size of a struct page."""

    pages: int
    """Number of pages up to the end of memory."""

    kernel_start: int
    """Lowest kernel address."""

    def lead_to_others(
        self, nodes: Words, nexts: Words, prevs: Words
    ) -> npt.NDArray[np.bool_]:
        """Return which nodes are linked to the node of at least one other page."""
        others = are_links(nexts, self.kernel_start)
        others &= are_links(prevs, self.kernel_start)
        others &= (nexts != nodes) & (prevs != nodes)
        others &= self._are_pages(nexts) | self._are_pages(prevs)
        return others

    def _are_pages(self, links: Words) -> npt.NDArray[np.bool_]:
        pfns, rests = np.divmod(links - np.uint64(self.first), np.uint64(self.size))
        # Addresses below the first node wrap round to pfns that are too high.
        pages: npt.NDArray[np.bool_] = (rests == 0) & (pfns < np.uint64(self.pages))
        return pages

    def pfns(self, nodes: Words) -> Words:
        """Return the pfns of list nodes."""
        pfns: Words = (nodes - np.uint64(self.first)) // np.uint64(self.size)
        return pfns


def free_links(
    reader: Reader, layout: PageLayout, ranges: Sequence[MemmapRange]
) -> FreeLinks | None:
    """
    Return a finder of pages on per-CPU lists by their links, if it is usable.

    ``None`` for a dump, whose lists do not change; if the memmap is not one array; and
    for a kernel that may leave stale links. Before Linux kernel commit 8b10b465d0e1
    ("mm/page_alloc: free pages in a single pass during bulk free") (in v5.18) pages
    that went from a per-CPU list into a free block kept their links. The next change
    that is visible in the types is bf75f200569d ("mm/page_alloc: add page->buddy_list
    and page->pcp_list") (in v6.0).
    """
    page = find_type(reader.prog, "struct page")
    if not reader.is_live or not page.has_member("pcp_list"):
        return None
    starts = {part.address - part.pfn * layout.size for part in ranges}
    if len(starts) != 1:
        return None
    pages = max(part.pfn + part.pages for part in ranges)
    return FreeLinks(starts.pop() + layout.lru, layout.size, pages, layout.kernel_start)


def spread_orders(orders: Indices, ways: Sequence[Sequence[int]]) -> Indices:
    """
    Set each unknown order to the one known at the end of the node's links.

    All pages on one list have the same order.

    :param orders: Order by index, ``UNLISTED`` if unknown.
    :param ways: For each direction, the index that each node's link leads to; the
        indices after these are ends.
    """
    orders = orders.copy()
    for way in ways:
        ahead = np.concatenate((way, np.arange(len(way), len(orders))))
        # Pointer jumping: each round follows twice as many links.
        for _ in range(len(way).bit_length()):
            unknown = where(orders == UNLISTED)
            orders[unknown] = orders[ahead[unknown]]
            ahead = ahead[ahead]
    return orders


def inside_others(pfns: Words, orders: Indices) -> Indices:
    """
    Return the free blocks that begin inside an earlier one, which was split since.

    :param pfns: First page of each block, ascending.
    :param orders: Order of each block; ``UNLISTED`` for pages that are not a block.
    """
    blocks = where(orders != UNLISTED)
    starts = pfns[blocks].astype(np.intp)
    ends = np.maximum.accumulate(starts + np.left_shift(1, orders[blocks]))
    return blocks[1:][starts[1:] < ends[:-1]]
