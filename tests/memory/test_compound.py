# SPDX-License-Identifier: LGPL-2.1-or-later

"""Words of heads for their tails, on struct pages made by hand."""

import numpy as np
import pytest
from drgn import Program

from msatools.memory.by.cgroup import ChargeTally
from msatools.memory.by.compound import far_heads, give_to_tails
from msatools.memory.by.file import SWAP_CACHE, mappings_of
from msatools.memory.by.memcgs import charge_offset
from msatools.memory.classes import PageClass
from msatools.memory.classify import Block, FarHead, classify
from msatools.memory.layout import PageLayout, page_layout

ADDRESS = 0xFFFFEA0000000000
PAGES = 64
FILE = 0xFFFF888000001000
GROUP = 0xFFFF888000002000


@pytest.fixture(scope="module")
def layout(prog: Program) -> PageLayout:
    return page_layout(prog)


@pytest.fixture
def block(prog: Program, layout: PageLayout) -> Block:
    """Tails of a huge page before it, a file's folio, anonymous pages."""
    words = np.zeros((PAGES, layout.size // 8), np.uint64)
    words[:, layout.flags // 8] = 1 << 54
    words[:, layout.mapcount // 8] = 1 << 32 | 0xFFFFFFFF
    head = layout.compound_head // 8
    words[:8, head] = ADDRESS - 128 * layout.size + 1
    words[16, layout.flags // 8] |= np.uint64(layout.bits["head"])
    words[17:20, head] = ADDRESS + 16 * layout.size + 1
    words[16:20, layout.mapping // 8] = (FILE, 0xDEAD, 0xDEAD, 0xDEAD)
    words[32:34, layout.mapping // 8] = 0xFFFF888000000001
    words[32:34, layout.flags // 8] |= np.uint64(layout.bits["swapbacked"])
    words[33, layout.flags // 8] |= np.uint64(layout.swapcache_bits)
    offset = charge_offset(prog)
    assert offset is not None
    # Of tails it is something else.
    words[:40, offset // 8] = 0xBEEF
    words[[16, 32, 33], offset // 8] = GROUP

    def far_head(address: int) -> FarHead:
        assert address == ADDRESS - 128 * layout.size
        return FarHead(PageClass.USER_HUGETLB, FILE + 0x1000)

    return classify(words.tobytes(), 0x1000, ADDRESS, layout, far_head, None)


def test_tails_have_their_heads_words(block: Block) -> None:
    words = np.arange(PAGES)
    far = give_to_tails(block, words)
    assert words[16:20].tolist() == [16] * 4
    assert words[20:].tolist() == list(range(20, PAGES))
    assert sorted(far.tolist()) == list(range(8))
    heads = {ADDRESS - 128 * block.layout.size}
    assert set(far_heads(block, far).tolist()) == heads


def test_mappings(block: Block) -> None:
    mappings = mappings_of(block)
    assert set(mappings[:8].tolist()) == {FILE + 0x1000}
    assert set(mappings[16:20].tolist()) == {FILE}
    assert mappings[32:34].tolist() == [0, SWAP_CACHE]
    others = np.delete(mappings, [*range(8), *range(16, 20), 33])
    assert not others.any()


def test_charges(prog: Program, block: Block) -> None:
    """Who is far is found after the scan, by the address of the head."""
    tally = ChargeTally(charge_offset(prog))
    tally.observe(block)
    sums = tally.by_class.sums()
    pages: dict[int, int] = {}
    for word, count in zip(sums.owners.tolist(), sums.pages.tolist(), strict=True):
        pages[word] = pages.get(word, 0) + count
    far = ADDRESS - 128 * block.layout.size | 4
    assert pages[far] == 8
    assert pages[GROUP] == 6
    assert sum(pages.values()) == PAGES
    files = tally.by_mapping.sums()
    found = zip(
        files.owners.tolist(), files.kinds.tolist(), files.pages.tolist(), strict=True
    )
    assert sorted(found) == [(GROUP, FILE, 4), (far, FILE + 0x1000, 8)]
