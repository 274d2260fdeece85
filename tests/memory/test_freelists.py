# SPDX-License-Identifier: LGPL-2.1-or-later

"""Per-CPU lists of free pages, which can change between the scan and the walk."""

import struct
from types import SimpleNamespace
from typing import cast

import pytest

from msatools.kernel.reader import Reader
from msatools.memory import refine
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.refine import PcpList, PcpLists, listed_pages, settle_pcp
from msatools.memory.sums import ScanResult
from tests.support.madetypes import made_program
from tests.support.overlay import put

from .madescans import scanned

HEAD = 1
CODE = PageClass.UNATTRIBUTED


def found_on(*lists: list[int]) -> ScanResult:
    """Make a scan result.

    :param lists: the nodes of each list in order, first the head
    """
    links = {
        node: (after, before)
        for nodes in lists
        for before, node, after in zip(
            nodes, nodes[1:], [*nodes[2:], nodes[0]], strict=False
        )
    }
    return scanned(links, rooms=4)


def settled(result: ScanResult, *lists: PcpList) -> tuple[int, int]:
    pages, broken = settle_pcp(result, PcpLists([*lists], None))
    assert result.totals()[PageClass.FREE_PCP] == pages
    assert result.totals()[CODE] == 1000 - pages
    return pages, broken


@pytest.mark.parametrize(
    ("nodes", "listed", "pages"),
    [
        ([10, 11, 12], PcpList(HEAD, 10, 12, order=2), (12, 0)),
        # A page was added at the front after the scan; the walk starts at the end.
        ([10, 11, 12, 13], PcpList(HEAD, 99, 13, order=0), (4, 0)),
        # A page was removed at the front.
        ([10, 11, 12, 13], PcpList(HEAD, 11, 13, order=0), (3, 0)),
        # The blocks are smaller than the list's order.
        ([10, 11, 12], PcpList(HEAD, 10, 12, order=3), (0, 1)),
    ],
)
def test_list(nodes: list[int], listed: PcpList, pages: tuple[int, int]) -> None:
    assert settled(found_on([HEAD, *nodes]), listed) == pages


def test_list_with_a_missing_middle() -> None:
    """The pages on both sides are found."""
    result = found_on([HEAD, 10, 11, 50], [51, 12, 13])
    # The second part ends at the head; its first node follows the missing part.
    result.candidates.nexts[0][-1] = HEAD
    result.candidates.nexts[0][2] = 60
    assert settled(result, PcpList(HEAD, 10, 13, order=0)) == (5, 1)


# The same lists, walked before the scan.

BASE = 0xFFFFEA0000000000
LRU, SIZE, PAGES = 8, 64, 256
OUTSIDE = 0xFFFF888000000000
"""Address of a list head, outside the memmap."""


def node(pfn: int) -> int:
    return BASE + pfn * SIZE + LRU


def listed(
    monkeypatch: pytest.MonkeyPatch, links: dict[int, tuple[int, int]], *lists: PcpList
) -> tuple[dict[int, int], int]:
    """Walk lists in a memmap; return orders by pfn, and the number of broken lists."""
    memmap = bytearray(PAGES * SIZE)
    for pfn, pointers in links.items():
        struct.pack_into("<QQ", memmap, pfn * SIZE + LRU, *pointers)

    prog = made_program()
    put(prog, BASE, memmap)
    monkeypatch.setattr(refine, "vmemmap_base", lambda _: BASE)
    layout = cast(PageLayout, SimpleNamespace(lru=LRU, size=SIZE))
    found = listed_pages(Reader(prog), layout, PcpLists([*lists], None))
    assert found.pfns.tolist() == sorted(found.pfns.tolist())
    return dict(zip(found.pfns.tolist(), found.orders.tolist(), strict=True)), (
        found.broken
    )


def chain(*pfns: int) -> dict[int, tuple[int, int]]:
    """Return the links of a complete list of these pages."""
    nodes = [OUTSIDE, *map(node, pfns), OUTSIDE]
    return dict(zip(pfns, zip(nodes[2:], nodes, strict=False), strict=True))


def test_listed_pages_are_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last page's struct page is at the end of the memmap.
    links = {**chain(9, 3, 255), 17: (1, 2)}
    pcp = PcpList(OUTSIDE, node(9), node(255), order=0)
    assert listed(monkeypatch, links, pcp) == ({3: 0, 9: 0, 255: 0}, 0)


def test_listed_blocks_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    pcp = PcpList(OUTSIDE, node(8), node(12), order=2)
    assert listed(monkeypatch, chain(8, 4, 12), pcp) == ({4: 2, 8: 2, 12: 2}, 0)
    assert listed(monkeypatch, chain(8, 4, 11, 12), pcp) == ({4: 2, 8: 2, 12: 2}, 1)


@pytest.mark.parametrize("astray", [0, 5, node(40) + 1, node(PAGES), 1 << 63])
def test_broken_list_is_followed_from_its_end(
    monkeypatch: pytest.MonkeyPatch, astray: int
) -> None:
    links = chain(1, 2, 3, 4)
    links[2] = (astray, links[2][1])
    links[3] = (links[3][0], astray)
    pcp = PcpList(OUTSIDE, node(1), node(4), order=0)
    found, broken = listed(monkeypatch, links, pcp)
    assert broken == 1
    assert {1, 2, 3, 4} <= set(found) <= {1, 2, 3, 4, PAGES}
