# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tails get words of their heads, on struct pages made by hand."""

import numpy as np
import pytest
from drgn import Program

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.breakdowns import copy_to_tails, far_heads
from msatools.memory.by_cgroup import ChargeTally, Memcgs, charge_offset
from msatools.memory.by_file import SWAP_CACHE, mapping_words
from msatools.memory.classes import PageClass, page_layout
from msatools.memory.classify import Block, FarHead

from .madepages import ADDRESS, Pages

PAGES = 64
FILE = 0xFFFF888000001000
GROUP = 0xFFFF888000002000


@pytest.fixture
def block(prog: Program) -> Block:
    """A block: tails of an earlier huge page, a file's folio, anonymous pages."""
    pages = Pages(page_layout(prog), PAGES)
    pages.tails(slice(8), -128)
    pages.compound(16, 4)
    pages.put(16, "mapping", FILE)
    pages.put(slice(17, 20), "mapping", 0xDEAD)
    pages.anon(slice(32, 34))
    pages.flag_bits(33, pages.layout.swapcache_bits)
    offset = charge_offset(prog)
    assert offset is not None
    # In tails the word has another meaning.
    pages.put_at(slice(40), offset, 8, 0xBEEF)
    pages.put_at([16, 32, 33], offset, 8, GROUP)

    def far_head(address: int) -> FarHead:
        assert address == pages.address(-128)
        return FarHead(PageClass.USER_HUGETLB, FILE + 0x1000)

    return pages.block(0x1000, far_head)


def test_tails_get_the_words_of_their_heads(block: Block) -> None:
    words = np.arange(PAGES)
    far = copy_to_tails(block, words)
    assert words[16:20].tolist() == [16] * 4
    assert words[20:].tolist() == list(range(20, PAGES))
    assert sorted(far.tolist()) == list(range(8))
    heads = {ADDRESS - 128 * block.layout.size}
    assert set(far_heads(block, far).tolist()) == heads


def test_mappings(block: Block) -> None:
    mappings = mapping_words(block)
    assert set(mappings[:8].tolist()) == {FILE + 0x1000}
    assert set(mappings[16:20].tolist()) == {FILE}
    assert mappings[32:34].tolist() == [0, SWAP_CACHE]
    others = np.delete(mappings, [*range(8), *range(16, 20), 33])
    assert not others.any()


def test_charges(prog: Program, block: Block) -> None:
    """Charges of far heads are looked up after the scan, by the head's address."""
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


@pytest.mark.parametrize(("stack_pages", "charged"), [(1, 1), (4, 4)])
def test_charges_of_stacks(prog: Program, stack_pages: int, charged: int) -> None:
    """Of a stack that is no compound page, only the first has the charge word."""
    pages = Pages(page_layout(prog), PAGES)
    offset = charge_offset(prog)
    assert offset is not None
    pages.put_at([20], offset, 8, GROUP)
    block = pages.block(0x1000)
    block.codes[20:28] = PageClass.STACKS
    tally = ChargeTally(offset, stack_pages)
    tally.observe(block)
    sums = tally.by_class.sums()
    found = dict(zip(sums.owners.tolist(), sums.pages.tolist(), strict=True))
    assert found[GROUP] == charged


def test_without_control_groups_of_memory(prog: Program, block: Block) -> None:
    """With CONFIG_MEMCG=n no page has a charge word, and no type is looked up."""
    tally = ChargeTally(None)
    tally.observe(block)
    sums = tally.by_class.sums()
    assert sums.owners.tolist() == [0] * len(sums.owners)
    assert sum(sums.pages.tolist()) == PAGES
    memcgs = Memcgs(Reader(prog), LossLog())
    assert memcgs.groups(np.zeros(0, np.uint64)) == []
