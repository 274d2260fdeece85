# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Pages on the per-CPU free lists of a running kernel, found by their links alone.

A running kernel changes these lists between the look at a struct page and the look at
the lists, some of which cannot be followed any more. But what is taken off a list gets
links that are poison, and what never was on one is linked to itself: links to others
are those of a page that was on a list when it was read. If that was none of these, the
page was on its way between them and the buddy allocator, or compaction had it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Reader
from msatools.memory.pages.classify import Indices, Words, where
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange

UNLISTED = -1
POINTER_BYTES = 8
"""Of each of the two links of a list node."""

_ALIGNMENT = np.uint64(7)


def are_links(words: Words, kernel_start: int) -> npt.NDArray[np.bool_]:
    """
    Return which words may be the address of a list node.

    LIST_POISON lies below the kernel's addresses. The lists' heads are per-CPU memory,
    in the direct map or among the lowest of the kernel's addresses.

    :param kernel_start: The lowest of them (:attr:`PageLayout.kernel_start`).
    """
    found: npt.NDArray[np.bool_] = words & _ALIGNMENT == 0
    found &= words >= np.uint64(kernel_start)
    return found


@dataclass(frozen=True)
class FreeLinks:
    """Finds unreferenced pages without a class that were on a list, by their links."""

    first: int
    """Address of the list node of pfn 0."""

    size: int
    """Of a struct page."""

    pages: int
    """That there are at most."""

    kernel_start: int
    """The lowest address of the kernel."""

    def lead_to_others(
        self, nodes: Words, nexts: Words, prevs: Words
    ) -> npt.NDArray[np.bool_]:
        """Return which nodes are linked to the node of another page, or of two."""
        others = are_links(nexts, self.kernel_start)
        others &= are_links(prevs, self.kernel_start)
        others &= (nexts != nodes) & (prevs != nodes)
        others &= self._are_pages(nexts) | self._are_pages(prevs)
        return others

    def _are_pages(self, links: Words) -> npt.NDArray[np.bool_]:
        pfns, rests = np.divmod(links - np.uint64(self.first), np.uint64(self.size))
        # What is below the first wraps round to what is far above.
        found: npt.NDArray[np.bool_] = (rests == 0) & (pfns < np.uint64(self.pages))
        return found

    def pfns(self, nodes: Words) -> Words:
        """Return the pfns of list nodes."""
        found: Words = (nodes - np.uint64(self.first)) // np.uint64(self.size)
        return found


def free_links(
    reader: Reader, layout: PageLayout, ranges: Sequence[MemmapRange]
) -> FreeLinks | None:
    """
    Return what finds the pages on per-CPU lists by their links, if it is needed.

    ``None`` for a dump, whose lists stand still; where the memmap is not one array; and
    for a kernel where links may be left over. Before Linux kernel commit 8b10b465d0e1
    ("mm/page_alloc: free pages in a single pass during bulk free") (in v5.18) that were
    those of pages that went from a per-CPU list into a free block; the next change that
    shows in the types is bf75f200569d ("mm/page_alloc: add page->buddy_list and
    page->pcp_list") (in v6.0).
    """
    page = reader.prog.type("struct page")
    if not reader.is_live or not page.has_member("pcp_list"):
        return None
    starts = {part.address - part.pfn * layout.size for part in ranges}
    if len(starts) != 1:
        return None
    pages = max(part.pfn + part.pages for part in ranges)
    return FreeLinks(starts.pop() + layout.lru, layout.size, pages, layout.kernel_start)


def spread_orders(orders: Indices, ways: Sequence[Sequence[int]]) -> Indices:
    """
    Set the order of each place to the one known at the end of its links.

    All pages on one list are of one order.

    :param orders: By place, ``UNLISTED`` if not known.
    :param ways: By each, where the first places lead to; from the rest none does.
    """
    orders = orders.copy()
    for way in ways:
        ahead = np.concatenate((way, np.arange(len(way), len(orders))))
        # Each round looks twice as far ahead.
        for _ in range(len(way).bit_length()):
            unknown = where(orders == UNLISTED)
            orders[unknown] = orders[ahead[unknown]]
            ahead = ahead[ahead]
    return orders


def inside_others(pfns: Words, orders: Indices) -> Indices:
    """
    Find the free blocks that begin within one before them, which was split since.

    :param pfns: Of the first page of each, ascending.
    :param orders: Of each, or ``UNLISTED`` for what is no block.
    """
    blocks = where(orders != UNLISTED)
    starts = pfns[blocks].astype(np.intp)
    ends = np.maximum.accumulate(starts + np.left_shift(1, orders[blocks]))
    return blocks[1:][starts[1:] < ends[:-1]]
