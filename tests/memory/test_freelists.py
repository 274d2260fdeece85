# SPDX-License-Identifier: LGPL-2.1-or-later

"""Per-CPU lists of free pages, which can change between the scan and the walk."""

import struct
from types import SimpleNamespace
from typing import cast

import pytest

from msatools.kernel.reader import Reader
from msatools.memory import refine
from msatools.memory.classes import PageLayout
from msatools.memory.refine import PcpList, PcpLists, listed_pages
from tests.support.madetypes import made_program
from tests.support.overlay import put

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
