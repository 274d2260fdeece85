# SPDX-License-Identifier: LGPL-2.1-or-later

"""Classes of struct pages made by hand, in the layout of a real kernel."""

import numpy as np
import numpy.typing as npt
import pytest
from drgn import Program

from msatools.kernel.reader import Gap
from msatools.memory.classes import PageClass
from msatools.memory.classify import Block, FarHead, classify
from msatools.memory.layout import PageLayout, page_layout

ADDRESS = 0xFFFFEA0000000000
PAGES = 1024
Pages = npt.NDArray[np.uint64]


@pytest.fixture(scope="module")
def layout(prog: Program) -> PageLayout:
    return page_layout(prog)


@pytest.fixture
def pages(layout: PageLayout) -> Pages:
    """Struct pages that are in use by the kernel and tell nothing."""
    words = np.zeros((PAGES, layout.size // 8), np.uint64)
    words[:, layout.flags // 8] = 1 << 54
    words[:, layout.mapcount // 8] = 1 << 32 | 0xFFFFFFFF
    return words


def classified(
    pages: Pages, layout: PageLayout, gaps: list[Gap] | None = None
) -> Block:
    def far_head(address: int) -> FarHead:
        return FarHead(PageClass.SHMEM if address < ADDRESS else PageClass.DEVICE, 0)

    return classify(pages.tobytes(), PAGES, ADDRESS, layout, far_head, gaps)


def test_nothing_told(pages: Pages, layout: PageLayout) -> None:
    assert set(classified(pages, layout).codes.tolist()) == {PageClass.UNATTRIBUTED}


@pytest.mark.parametrize(
    ("mapping", "swapbacked", "code"),
    [
        (0xFFFF888000000001, True, PageClass.ANON),
        (0xFFFF888000000003, True, PageClass.KSM),
        (0xFFFF888000000002, False, PageClass.MOVABLE),
        (0xFFFF888000000000, False, PageClass.FILE),
        (0xFFFF888000000000, True, PageClass.SHMEM),
        (0, True, PageClass.UNATTRIBUTED),
    ],
)
def test_mapping(
    pages: Pages, layout: PageLayout, mapping: int, swapbacked: bool, code: int
) -> None:
    pages[5, layout.mapping // 8] = mapping
    if swapbacked:
        pages[5, layout.flags // 8] |= np.uint64(layout.bits["swapbacked"])
    codes = classified(pages, layout).codes
    assert codes[5] == code
    assert np.count_nonzero(codes) == (code != PageClass.UNATTRIBUTED)


def test_compound_page_from_before_the_block(pages: Pages, layout: PageLayout) -> None:
    pages[:7, layout.compound_head // 8] = ADDRESS - 64 * layout.size + 1
    codes = classified(pages, layout).codes
    assert set(codes[:7].tolist()) == {PageClass.SHMEM}
    assert set(codes[7:].tolist()) == {PageClass.UNATTRIBUTED}


def test_tail_whose_head_comes_after_the_block(
    pages: Pages, layout: PageLayout
) -> None:
    pages[3, layout.compound_head // 8] = ADDRESS + 2 * PAGES * layout.size + 1
    assert classified(pages, layout).codes[3] == PageClass.DEVICE


def test_fake_heads_have_their_true_heads_class(
    pages: Pages, layout: PageLayout
) -> None:
    """With the vmemmap optimisation 64 struct pages are there again and again."""
    head = np.uint64(ADDRESS + 512 * layout.size)
    pages[513:576, layout.compound_head // 8] = head + np.uint64(1)
    poison = layout.bits.get("hwpoison", 0)  # CONFIG_MEMORY_FAILURE
    flags = layout.bits["head"] | layout.bits["swapbacked"] | poison
    pages[512, layout.flags // 8] |= np.uint64(flags)
    pages[512, layout.mapping // 8] = 0xFFFF888000000001
    for copy in range(576, 1024, 64):
        pages[copy : copy + 64] = pages[512:576]
    codes = classified(pages, layout).codes
    assert codes[512] == (PageClass.HWPOISON if poison else PageClass.ANON)
    # The one poisoned page is not counted for its copies.
    assert set(codes[513:].tolist()) == {PageClass.ANON}


def test_free_block(pages: Pages, layout: PageLayout) -> None:
    value = int(np.flatnonzero(layout.types.classes == PageClass.FREE_BUDDY)[0])
    kept = 0xFFFFFFFF & ~(layout.types.mask << layout.types.shift)
    word = value << layout.types.shift | kept
    pages[64, layout.mapcount // 8] = word
    pages[64, layout.private // 8] = 6
    # What the pages were before they were freed stays in them.
    pages[70, layout.mapping // 8] = 0xFFFF888000000001
    codes = classified(pages, layout).codes
    assert set(codes[64:128].tolist()) == {PageClass.FREE_BUDDY}
    assert np.count_nonzero(codes == PageClass.FREE_BUDDY) == 64


def test_zeroes_are_no_struct_page(pages: Pages, layout: PageLayout) -> None:
    pages[10:20] = 0
    codes = classified(pages, layout).codes
    assert set(codes[10:20].tolist()) == {PageClass.EXCLUDED}
    assert np.count_nonzero(codes == PageClass.EXCLUDED) == 10


@pytest.mark.parametrize(
    ("reason", "code"),
    [("excluded", PageClass.EXCLUDED), ("unreadable", PageClass.UNREADABLE)],
)
def test_gaps(pages: Pages, layout: PageLayout, reason: str, code: int) -> None:
    pages[64:128] = 0
    gap = Gap(64 * layout.size, 64 * layout.size, reason)  # type: ignore[arg-type]
    codes = classified(pages, layout, [gap]).codes
    assert np.flatnonzero(codes == code).tolist() == list(range(64, 128))
