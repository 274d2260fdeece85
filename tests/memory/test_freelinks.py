# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages on per-CPU lists told by their links, where the lists cannot be followed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from drgn import Program

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.memory import scanning
from msatools.memory.classes import CLASSES, PageClass
from msatools.memory.freelinks import (
    NO_ORDER,
    FreeLinks,
    free_links,
    inside_others,
    spread_orders,
)
from msatools.memory.freelists import (
    ListedPages,
    PcpLists,
    listed_pages,
    settle_pcp,
)
from msatools.memory.layout import PageLayout, page_layout
from msatools.memory.memmap import MemmapRange
from msatools.memory.memstat import collect_memstat
from msatools.memory.scanresult import ScanResult
from msatools.target import TargetSpec, open_target

FIRST, SIZE, PAGES = 0xFFFF_EA00_0000_0008, 64, 1000
LINKS = FreeLinks(FIRST, SIZE, PAGES)
HEAD = 0xFFFF_8880_1234_5678
POISON = 0xDEAD_0000_0000_0100


def node(pfn: int) -> int:
    return FIRST + SIZE * pfn


@pytest.mark.parametrize(
    ("after", "before", "is_listed"),
    [
        (node(1), node(2), True),
        (HEAD, node(2), True),
        (node(1), HEAD, True),
        (node(0), node(PAGES - 1), True),
        # Of the only one on a list nothing but the list tells.
        (HEAD, HEAD, False),
        (node(7), node(7), False),
        (POISON, POISON + 0x22, False),
        (node(1), POISON + 0x22, False),
        (node(1), 0, False),
        (0, node(1), False),
        (node(1) + 8, node(2) - 8, False),
        (node(PAGES), HEAD, False),
        (node(-1), HEAD, False),
        (node(1), 0x7FFF_FFFF_F000, False),
    ],
)
def test_links_that_lead_to_others(after: int, before: int, is_listed: bool) -> None:
    columns = (np.array([value], np.uint64) for value in (node(7), after, before))
    assert LINKS.lead_to_others(*columns).tolist() == [is_listed]


def test_pages_of_nodes() -> None:
    nodes = np.array([node(0), node(999)], np.uint64)
    assert LINKS.pfns(nodes).tolist() == [0, 999]


def test_order_is_that_of_what_the_links_lead_to() -> None:
    # Five pages, a list's head, and nowhere.
    orders = np.array([NO_ORDER, NO_ORDER, NO_ORDER, 2, NO_ORDER, 3, NO_ORDER])
    following = [1, 5, 3, 6, 4]
    preceding = [6, 0, 6, 2, 0]
    # The last leads to itself one way, the other way to the first.
    found = spread_orders(orders, (following, preceding))
    assert found.tolist() == [3, 3, 2, 2, 3, 3, NO_ORDER]
    assert spread_orders(orders, (following,))[4] == NO_ORDER


def test_order_of_the_first_of_very_many() -> None:
    count = 10_000
    orders = np.full(count + 2, NO_ORDER)
    orders[count] = 1
    assert spread_orders(orders, ([*range(1, count + 1)],))[:-1].tolist() == [1] * (
        count + 1
    )


def test_blocks_inside_of_others() -> None:
    pfns = np.array([8, 9, 10, 12, 16, 20, 31, 32], np.uint64)
    orders = np.array([2, 0, NO_ORDER, 0, 4, 1, 0, 0])
    assert inside_others(pfns, orders).tolist() == [1, 5, 6]
    none = np.empty(0, np.intp)
    assert inside_others(none.astype(np.uint64), none).tolist() == []


@pytest.fixture
def as_if_live(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have links told on a dump, too."""

    def links(
        reader: Reader, layout: PageLayout, ranges: Sequence[MemmapRange]
    ) -> FreeLinks | None:
        live = Reader(reader.prog)
        live.is_live = True
        return free_links(live, layout, ranges)

    monkeypatch.setattr(scanning, "free_links", links)


def totals(prog: Program, *by: str) -> dict[str, int]:
    report = collect_memstat(prog, by=by)
    return {each.name: each.pages for each in report.classes if each.pages}


def test_none_is_told_that_is_on_no_list(prog: Program, as_if_live: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "free_links", lambda *_: None)
        lists = totals(prog)
    assert totals(prog) == lists
    assert totals(prog, "slab") == lists


def lost(lists: PcpLists) -> PcpLists:
    """Lists of which neither end leads to a page."""
    return replace(
        lists, lists=[replace(one, first=HEAD, last=HEAD) for one in lists.lists]
    )


def test_all_are_told_that_are_on_lists_with_others(
    prog: Program, as_if_live: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = totals(prog)
    alone = 0

    def settle_lost(
        result: ScanResult, pcp: PcpLists, links: FreeLinks | None
    ) -> tuple[int, int]:
        nonlocal alone
        alone = sum(1 << one.order for one in pcp.lists if one.first == one.last)
        return settle_pcp(result, lost(pcp), links)

    monkeypatch.setattr(scanning, "settle_pcp", settle_lost)
    links = totals(prog)
    name = CLASSES[PageClass.FREE_PCP]
    assert links[name] == lists[name] - alone > 0


def test_pages_of_lost_lists_are_told_as_they_come_by(
    prog: Program, as_if_live: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each block on a list the first page, which alone is on it."""
    name = CLASSES[PageClass.FREE_PCP]
    lists = totals(prog, "slab")[name]
    beyond = 0

    def lost_pages(reader: Reader, layout: PageLayout, pcp: PcpLists) -> ListedPages:
        nonlocal beyond
        orders = listed_pages(reader, layout, pcp).orders.astype(int)
        alone = sum(one.first == one.last for one in pcp.lists)
        beyond = int(((1 << orders) - 1).sum()) + alone
        return listed_pages(reader, layout, lost(pcp))

    monkeypatch.setattr(scanning, "listed_pages", lost_pages)
    found = totals(prog, "slab")[name]
    assert found == lists - beyond > 0


def test_old_kernels_have_links_left_over() -> None:
    reader = Reader(open_target(TargetSpec(str(lab.build("memory-5.10").elf))).prog)
    reader.is_live = True
    assert free_links(reader, page_layout(reader.prog), ()) is None


def test_no_dump_needs_links(prog: Program) -> None:
    assert free_links(Reader(prog), page_layout(prog), ()) is None
