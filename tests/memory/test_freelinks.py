# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages on per-CPU lists are recognized by their links if a list cannot be walked."""

from collections.abc import Sequence

import numpy as np
import pytest
from drgn import Program
from msgspec.structs import replace

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory import scan
from msatools.memory.classes import (
    CLASSES,
    NCLASSES,
    PageClass,
    PageLayout,
    page_layout,
)
from msatools.memory.classify import (
    UNLISTED,
    FarHead,
    FreeLinks,
    are_links,
    free_links,
    spread_orders,
)
from msatools.memory.memmap import MemmapRange
from msatools.memory.memstat import collect_memstat
from msatools.memory.refine import (
    FinalClasses,
    ListedPages,
    PcpList,
    PcpLists,
    listed_pages,
    settle_pcp,
)
from msatools.memory.sums import CachePages, FreeCandidates, ScanResult
from tests.support.dumps import open_dump

from .madepages import Pages
from .sums import pages_of

FIRST, SIZE, PAGES = 0xFFFF_EA00_0000_0008, 64, 1000
KERNEL_START = 0xFFFF_8000_0000_0000
LINKS = FreeLinks(FIRST, SIZE, PAGES, KERNEL_START)
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
        # A single page on a list has links to the head only.
        (HEAD, HEAD, False),
        (node(7), node(7), False),
        (node(1), node(7), False),
        (node(7), node(1), False),
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
    nodes = np.array([node(0), node(999)], np.uint64)
    assert LINKS.pfns(nodes).tolist() == [0, 999]


@pytest.mark.parametrize(
    ("kernel_start", "direct_map"),
    [
        (0xFFFF_8000_0000_0000, 0xFFFF_8880_0000_0000),  # 4-level page tables
        (0xFF00_0000_0000_0000, 0xFF11_0000_0000_0000),  # 5-level
        (0xFF00_0000_0000_0000, 0xFF19_03C0_4000_0000),  # 5-level, randomised
        (0xFFFF_0000_0000_0000, 0xFFFF_0000_4000_0000),  # arm64 with 48 bits
    ],
)
def test_list_heads_lie_in_the_direct_map(kernel_start: int, direct_map: int) -> None:
    words = np.array([direct_map, direct_map + 4, 0, POISON, 1 << 46], np.uint64)
    linked = are_links(words, kernel_start)
    assert linked.tolist() == [True, False, False, False, False]


def test_order_spreads_along_links() -> None:
    # Five pages, a list head, and an unlisted node.
    orders = np.array([UNLISTED, UNLISTED, UNLISTED, 2, UNLISTED, 3, UNLISTED])
    following = [1, 5, 3, 6, 4]
    preceding = [6, 0, 6, 2, 0]
    # The last page links to itself one way and to the first page the other way.
    spread = spread_orders(orders, (following, preceding))
    assert spread.tolist() == [3, 3, 2, 2, 3, 3, UNLISTED]
    assert spread_orders(orders, (following,))[4] == UNLISTED


# Scan results made by hand.

CODE, OWNED = PageClass.UNATTRIBUTED, PageClass.PIPES
GONE = node(999)
"""A page that was on the list, but in use when it was scanned or the list was read."""

LIST = PcpList(HEAD, GONE, GONE, order=0)


def found(
    links: dict[int, tuple[int, int]], rooms: int = 1, code: int = CODE
) -> ScanResult:
    """Make a scan result with pages that can be on free lists.

    :param links: pfn -> next and previous list node
    :param rooms: Pages of the largest block that can begin at each page.
    """
    counts = np.zeros(NCLASSES, np.int64)
    counts[code] = PAGES
    nodes = np.array([node(pfn) for pfn in links], np.uint64)
    nexts, prevs = np.array([*links.values()], np.uint64).T
    candidates = FreeCandidates(
        *([column] for column in (nodes, nexts, prevs)),
        [np.full(len(links), code, np.uint8)],
        [np.zeros(len(links), np.int64)],
        [np.full(len(links), rooms, np.intp)],
    )
    return ScanResult({0: counts}, CachePages(), candidates)


def pcp_pages(result: ScanResult, *lists: PcpList) -> int:
    """Return the number of pages that are taken to be on lists."""
    pages, broken = settle_pcp(result, PcpLists([*lists], None), LINKS)
    assert broken == len(lists)
    assert result.totals()[PageClass.FREE_PCP] == pages
    assert result.totals().sum() == 1000
    return pages


LARGER = replace(LIST, order=2)
IN_A_BLOCK = {8: (HEAD, GONE), 10: (GONE, GONE), 12: (GONE, GONE)}


@pytest.mark.parametrize(
    ("result", "listed", "pages"),
    [
        (found({1: (node(2), GONE), 2: (GONE, node(1)), 5: (GONE, GONE)}), LIST, 3),
        # Memory in use can contain stale links.
        (found({1: (node(2), GONE)}, code=OWNED), LIST, 0),
        # Blocks have the list's order, unless there is no room for it.
        (found({8: (HEAD, GONE)}, rooms=4), LARGER, 4),
        (found({8: (GONE, HEAD)}, rooms=4), LARGER, 4),
        (found({8: (HEAD, GONE)}, rooms=4), replace(LIST, order=3), 1),
        # A block was split or merged between the scan and the walk of the list.
        (found(IN_A_BLOCK, rooms=4), LARGER, 4 + 1),
    ],
)
def test_pages_of_a_list_that_changed(
    result: ScanResult, listed: PcpList, pages: int
) -> None:
    assert pcp_pages(result, listed) == pages


@pytest.mark.parametrize("owned", [False, True])
def test_linked_page_is_free_if_it_has_no_owner(prog: Program, owned: bool) -> None:
    layout = page_layout(prog)
    pages = Pages(layout, 2)
    pages.put(slice(2), "refcount", 0)
    pages.put(0, "lru", GONE)
    pages.put_at(0, layout.lru + 8, 8, HEAD)
    block = pages.block(0, lambda _: FarHead(CODE, 0), address=FIRST - layout.lru)
    if owned:
        block.codes[:] = OWNED
    listed = ListedPages(np.empty(0, np.uint64), np.empty(0, np.uint8), 0)
    finals = FinalClasses(
        Reader(prog), LossLog(), listed, replace(LINKS, size=layout.size)
    )
    finals.settle(block, np.arange(2))
    rest = OWNED if owned else CODE
    assert block.codes.tolist() == [rest if owned else PageClass.FREE_PCP, rest]


@pytest.fixture
def as_if_live(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use links on a dump, as on a running kernel."""

    def links(
        reader: Reader, layout: PageLayout, ranges: Sequence[MemmapRange]
    ) -> FreeLinks | None:
        live = Reader(reader.prog)
        live.is_live = True
        return free_links(live, layout, ranges)

    monkeypatch.setattr(scan, "free_links", links)


def totals(prog: Program, *by: str) -> dict[str, int]:
    found = pages_of(collect_memstat(prog, by=by))
    return {name: pages for name, pages in found.items() if pages}


def section(number: int, address: int) -> MemmapRange:
    return MemmapRange(number, "online", True, number * 100, 100, address)


def test_no_links_if_the_memmap_is_not_contiguous(prog: Program) -> None:
    reader, layout = Reader(prog), page_layout(prog)
    assert free_links(reader, layout, ()) is None, "no dump needs them"
    reader.is_live = True
    starts = [FIRST + number * 100 * layout.size for number in range(3)]
    parts = [section(number, start) for number, start in enumerate(starts)]
    whole = free_links(reader, layout, parts)
    assert whole == FreeLinks(FIRST + layout.lru, layout.size, 300, layout.kernel_start)
    assert free_links(reader, layout, [parts[0], section(1, starts[2])]) is None
    assert free_links(reader, layout, []) is None


def test_links_add_no_pages_to_complete_lists(prog: Program, as_if_live: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "free_links", lambda *_: None)
        lists = totals(prog)
    assert totals(prog) == lists
    assert totals(prog, "slab") == lists


def lost(lists: PcpLists) -> PcpLists:
    """Return lists whose heads have no links to pages."""
    return replace(
        lists, lists=[replace(pcp, first=HEAD, last=HEAD) for pcp in lists.lists]
    )


def test_links_find_all_pages_on_longer_lists(
    prog: Program, as_if_live: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = totals(prog)
    alone = 0

    def settle_lost(
        result: ScanResult, pcp: PcpLists, links: FreeLinks | None
    ) -> tuple[int, int]:
        nonlocal alone
        alone = sum(1 << each.order for each in pcp.lists if each.first == each.last)
        return settle_pcp(result, lost(pcp), links)

    monkeypatch.setattr(scan, "settle_pcp", settle_lost)
    report = collect_memstat(prog)
    coverage = report.coverage
    assert coverage["pcp_lists_changed"] > 0 == coverage["pcp_lists_broken"]
    (note,) = report.notes
    assert note.text.endswith(" some of their pages may be unattributed")
    name = CLASSES[PageClass.FREE_PCP]
    assert pages_of(report)[name] == lists[name] - alone > 0


def test_links_find_the_first_pages_of_blocks(
    prog: Program, as_if_live: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the scan, only the first page of a block is found: it alone has links."""
    name = CLASSES[PageClass.FREE_PCP]
    lists = totals(prog, "slab")[name]
    beyond = 0

    def lost_pages(reader: Reader, layout: PageLayout, pcp: PcpLists) -> ListedPages:
        nonlocal beyond
        orders = listed_pages(reader, layout, pcp).orders.astype(int)
        alone = sum(each.first == each.last for each in pcp.lists)
        beyond = int(((1 << orders) - 1).sum()) + alone
        return listed_pages(reader, layout, lost(pcp))

    monkeypatch.setattr(scan, "listed_pages", lost_pages)
    found = totals(prog, "slab")[name]
    assert found == lists - beyond > 0


@pytest.mark.parametrize("kernel", ["5.10"])
def test_old_kernels_have_stale_links(kernel: str) -> None:
    reader = Reader(open_dump(f"memory-{kernel}", "btf"))
    reader.is_live = True
    assert free_links(reader, page_layout(reader.prog), ()) is None
