# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory by order, for struct pages made by hand and by the page flags of dumps."""

import re
from collections import Counter

import numpy as np
import pytest

from fixtures import lab
from msatools.memory.breakdowns import OrderGroup
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.classify import (
    Block,
    ByOrder,
    FarHead,
    free_blocks,
)
from msatools.memory.model import MemstatReport

from . import truth
from .madepages import ADDRESS, Pages
from .sums import pages_of, summed, view

PAGES = 1024
NONE = np.empty(0, np.uint64)


@pytest.fixture
def pages(layout: PageLayout) -> Pages:
    return Pages(layout, PAGES)


def block_of(pages: Pages, pfn: int = PAGES) -> Block:
    """Make a block of struct pages; heads outside are anonymous memory."""
    address = ADDRESS + pfn * pages.layout.size
    return pages.block(pfn, lambda _: FarHead(PageClass.ANON, 0), address=address)


def compound(pages: Pages, first: int, count: int, pfn: int) -> None:
    """Make *count* pages from *first* tails of page *pfn*, or its head and tails."""
    if pfn == PAGES + first:
        pages.flag(first, "head")
        first, count = first + 1, count - 1
    pages.tails(slice(first, first + count), pfn)


def by_order(*blocks: Block) -> dict[int, Counter[int]]:
    """Return pages by order and class; each block has its own observer."""
    seen = ByOrder(NONE, NONE.astype(np.uint8))
    for block in blocks:
        other = ByOrder(NONE, NONE.astype(np.uint8))
        other.observe(block)
        seen.merge(other)
    return {
        order: Counter({code: int(row[code]) for code in np.flatnonzero(row).tolist()})
        for order, row in enumerate(seen.total())
        if row.any()
    }


def test_damaged_orders_of_free_blocks(pages: Pages) -> None:
    pages.free(3, 5)
    pages.free(64, 1 << 40)
    pages.free(512, 10)
    firsts, orders = free_blocks(block_of(pages))
    assert (firsts.tolist(), orders.tolist()) == ([3, 64, 512], [0, 0, 0])


def test_compound_page_larger_than_a_block(pages: Pages) -> None:
    first, second = pages.copy(), pages.copy()
    compound(first, 0, PAGES, PAGES)
    compound(second, 0, PAGES, PAGES)
    two = [block_of(first), block_of(second, 2 * PAGES)]
    found = by_order(*two)
    assert found.keys() == {11}
    assert found[11].total() == 2 * PAGES
    assert by_order(two[0]).keys() == {10}, "without the other, it is complete"


def test_pages_on_per_cpu_lists(pages: Pages) -> None:
    block = block_of(pages)
    block.codes[8:16] = PageClass.FREE_PCP
    pfns = np.array([5, PAGES + 8, PAGES + 12, PAGES + 32], np.uint64)
    seen = ByOrder(pfns, np.array([2, 2, 1, 3], np.uint8))
    seen.observe(block)
    found = seen.total()[:, PageClass.FREE_PCP]
    # The order of the last two is unknown, and the last listed page is in use again.
    assert found[[2, 1, 0, 3]].tolist() == [4, 2, 2, 0]


def test_listed_block_that_is_partly_in_use(pages: Pages) -> None:
    """Its first page is on a list again, as a single page."""
    block = block_of(pages)
    block.codes[[8, 16, 17, 18]] = PageClass.FREE_PCP
    block.codes[PAGES - 8 :] = PageClass.FREE_PCP
    pfns = np.array([8, 16, 24, PAGES - 8], np.uint64) + np.uint64(block.pfn)
    seen = ByOrder(pfns, np.array([3, 1, 2, 3], np.uint8))
    seen.observe(block)
    found = seen.total()
    assert found[[0, 1, 2, 3], PageClass.FREE_PCP].tolist() == [2, 2, 0, 8]
    assert found[1:].sum() == 10


def orders(cut_up: MemstatReport) -> dict[str, OrderGroup]:
    groups = view(cut_up, "order")
    found = {group.key: group for group in groups if isinstance(group, OrderGroup)}
    assert len(found) == len(groups)
    return found


def test_orders_sum_to_the_classes(
    cut_up: MemstatReport, report: MemstatReport
) -> None:
    assert cut_up.classes == report.classes
    assert summed(view(cut_up, "order")) == pages_of(report)
    for group in orders(cut_up).values():
        if group.key == "-":
            assert group.blocks is None
            assert re.match("no order", group.name)
        else:
            assert group.blocks is not None
            assert group.blocks << int(group.key) == group.pages


def test_compound_pages_by_order(run: lab.Run, cut_up: MemstatReport) -> None:
    flags = truth.page_flags(run)
    heads = np.flatnonzero(truth.having(flags, "COMPOUND_HEAD"))
    tails = truth.having(flags, "COMPOUND_TAIL")
    # A head's tails end at the first page that is not a tail.
    ends = np.flatnonzero(~tails)
    sizes = ends[np.searchsorted(ends, heads, side="right")] - heads
    expected: Counter[int] = Counter()
    for size in sizes.tolist():
        expected[size.bit_length() - 1] += size
    found = {
        int(key): group.pages - group.classes["free.buddy"] - group.classes["free.pcp"]
        for key, group in orders(cut_up).items()
        if key not in ("-", "0")
    }
    assert {order: pages for order, pages in found.items() if pages} == expected
