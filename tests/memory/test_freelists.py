# SPDX-License-Identifier: LGPL-2.1-or-later

"""Per-CPU lists of free pages, which change between the scan and the look at them."""

import struct
from types import SimpleNamespace
from typing import cast

import pytest

from msatools.kernel.reader import Reader
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.layout import PageLayout
from msatools.memory.scan import freelists
from msatools.memory.scan.freelists import PcpList, PcpLists, listed_pages, settle_pcp
from msatools.memory.scan.result import ScanResult
from tests.support.madetypes import made_program
from tests.support.overlay import put

from .madescans import scanned

HEAD = 1
CODE = PageClass.UNATTRIBUTED


def found_on(*lists: list[int]) -> ScanResult:
    """What a scan found: the nodes of each list in order, which begin with its head."""
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
        # At the front one more has come since, behind which none is that was not there.
        ([10, 11, 12, 13], PcpList(HEAD, 99, 13, order=0), (4, 0)),
        # Or one has gone.
        ([10, 11, 12, 13], PcpList(HEAD, 11, 13, order=0), (3, 0)),
        # Smaller blocks than those of the list.
        ([10, 11, 12], PcpList(HEAD, 10, 12, order=3), (0, 1)),
    ],
)
def test_list(nodes: list[int], listed: PcpList, pages: tuple[int, int]) -> None:
    assert settled(found_on([HEAD, *nodes]), listed) == pages


def test_middle_that_is_lost() -> None:
    """What is on this side of it, and on the other."""
    result = found_on([HEAD, 10, 11, 50], [51, 12, 13])
    # The second part ends at the head, its first is after what is lost.
    result.candidates.nexts[0][-1] = HEAD
    result.candidates.nexts[0][2] = 60
    assert settled(result, PcpList(HEAD, 10, 13, order=0)) == (5, 1)


def test_circle_ends() -> None:
    result = found_on([HEAD, 10, 11, 12])
    result.candidates.nexts[0][-1] = 10
    result.candidates.prevs[0][0] = 12
    assert settled(result, PcpList(HEAD, 10, 12, order=0)) == (3, 1)


def test_page_is_counted_once() -> None:
    result = found_on([HEAD, 10, 11, 12])
    twice = PcpList(HEAD, 10, 12, order=0)
    assert settled(result, twice, twice) == (3, 1)


# The same lists, followed before there is a scan.

BASE = 0xFFFFEA0000000000
LRU, SIZE, PAGES = 8, 64, 256
OUTSIDE = 0xFFFF888000000000
"""Of a list's head, in memory of another kind."""


def node(pfn: int) -> int:
    return BASE + pfn * SIZE + LRU


def listed(
    monkeypatch: pytest.MonkeyPatch, links: dict[int, tuple[int, int]], *lists: PcpList
) -> tuple[dict[int, int], int]:
    """Follow lists through a memmap, and give orders by pfn, and broken lists."""
    memmap = bytearray(PAGES * SIZE)
    for pfn, pointers in links.items():
        struct.pack_into("<QQ", memmap, pfn * SIZE + LRU, *pointers)

    prog = made_program()
    put(prog, BASE, memmap)
    monkeypatch.setattr(freelists, "vmemmap_base", lambda _: BASE)
    layout = cast(PageLayout, SimpleNamespace(lru=LRU, size=SIZE))
    found = listed_pages(Reader(prog), layout, PcpLists([*lists], None))
    assert found.pfns.tolist() == sorted(found.pfns.tolist())
    return dict(zip(found.pfns.tolist(), found.orders.tolist(), strict=True)), (
        found.broken
    )


def chain(*pfns: int) -> dict[int, tuple[int, int]]:
    """The links of a whole list of these pages."""
    nodes = [OUTSIDE, *map(node, pfns), OUTSIDE]
    return dict(zip(pfns, zip(nodes[2:], nodes, strict=False), strict=True))


def test_listed_pages_are_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last is at the end of what can be read.
    links = {**chain(9, 3, 255), 17: (1, 2)}
    one = PcpList(OUTSIDE, node(9), node(255), order=0)
    assert listed(monkeypatch, links, one) == ({3: 0, 9: 0, 255: 0}, 0)


def test_listed_blocks_begin_where_such_can(monkeypatch: pytest.MonkeyPatch) -> None:
    one = PcpList(OUTSIDE, node(8), node(12), order=2)
    assert listed(monkeypatch, chain(8, 4, 12), one) == ({4: 2, 8: 2, 12: 2}, 0)
    assert listed(monkeypatch, chain(8, 4, 11, 12), one) == ({4: 2, 8: 2, 12: 2}, 1)


@pytest.mark.parametrize("astray", [0, 5, node(40) + 1, node(PAGES), 1 << 63])
def test_list_that_leads_astray_is_followed_from_its_end(
    monkeypatch: pytest.MonkeyPatch, astray: int
) -> None:
    links = chain(1, 2, 3, 4)
    links[2] = (astray, links[2][1])
    links[3] = (links[3][0], astray)
    one = PcpList(OUTSIDE, node(1), node(4), order=0)
    found, broken = listed(monkeypatch, links, one)
    assert broken == 1
    assert {1, 2, 3, 4} <= set(found) <= {1, 2, 3, 4, PAGES}


def test_listed_pages_of_a_circle_are_found_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = {**chain(1, 2, 3), 3: (node(1), node(2)), 1: (node(2), node(3))}
    one = PcpList(OUTSIDE, node(1), node(3), order=0)
    assert listed(monkeypatch, links, one) == ({1: 0, 2: 0, 3: 0}, 1)
    assert listed(monkeypatch, links, one, one)[1] == 2
