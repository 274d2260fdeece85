# SPDX-License-Identifier: LGPL-2.1-or-later

"""Struct pages made by hand are classified, in the layout of a real kernel."""

import numpy as np
import pytest

from msatools.kernel.reader import Gap
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.classify import FarHead

from .madepages import ADDRESS, Pages

PAGES = 1024


@pytest.fixture
def pages(layout: PageLayout) -> Pages:
    return Pages(layout, PAGES)


def far_head(address: int) -> FarHead:
    return FarHead(PageClass.SHMEM if address < ADDRESS else PageClass.DEVICE, 0)


def classes(pages: Pages, *gaps: Gap) -> dict[int, list[int]]:
    """Return the pages by class, except unattributed ones."""
    codes = pages.block(far_heads=far_head, gaps=[*gaps]).codes
    return {
        code: np.flatnonzero(codes == code).tolist()
        for code in np.unique(codes).tolist()
        if code != PageClass.UNATTRIBUTED
    }


def test_pages_without_type_or_owner(pages: Pages) -> None:
    assert classes(pages) == {}
    pages.words[10:20] = 0
    assert classes(pages) == {PageClass.EXCLUDED: [*range(10, 20)]}


@pytest.mark.parametrize(
    ("mapping", "swapbacked", "code"),
    [
        (0xFFFF888000000001, True, PageClass.ANON),
        (0xFFFF888000000003, True, PageClass.KSM),
        (0xFFFF888000000002, False, PageClass.MOVABLE),
        (0xFFFF888000000000, False, PageClass.FILE),
        (0xFFFF888000000000, True, PageClass.SHMEM),
        (0, True, None),
    ],
)
def test_mapping(
    pages: Pages, mapping: int, swapbacked: bool, code: int | None
) -> None:
    pages.put(5, "mapping", mapping)
    if swapbacked:
        pages.flag(5, "swapbacked")
    assert classes(pages) == ({} if code is None else {code: [5]})


def test_compound_pages_of_other_blocks(pages: Pages) -> None:
    """Their heads are in an earlier and in a later block."""
    pages.tails(slice(7), -64)
    pages.tails(9, 2 * PAGES)
    expected = {PageClass.SHMEM: [*range(7)], PageClass.DEVICE: [9]}
    assert classes(pages) == expected


def test_fake_heads_have_the_class_of_the_true_head(pages: Pages) -> None:
    """With HVO the same 64 struct pages are mapped repeatedly."""
    pages.compound(512, 64)
    pages.anon(512)
    pages.flag(512, "hwpoison")
    for copy in range(576, 1024, 64):
        pages.words[copy : copy + 64] = pages.words[512:576]
    found = classes(pages)
    # The one poisoned page is not counted for its copies.
    if "hwpoison" in pages.layout.bits:
        assert found.pop(PageClass.HWPOISON) == [512]
        found[PageClass.ANON].insert(0, 512)
    assert found == {PageClass.ANON: [*range(512, 1024)]}


def test_free_block(pages: Pages) -> None:
    pages.free(64, 6)
    # Pages keep old contents after they are freed.
    pages.anon(70)
    assert classes(pages) == {PageClass.FREE_BUDDY: [*range(64, 128)]}


@pytest.mark.parametrize(
    ("reason", "code"),
    [("excluded", PageClass.EXCLUDED), ("unreadable", PageClass.UNREADABLE)],
)
def test_gaps(pages: Pages, reason: str, code: int) -> None:
    size = pages.layout.size
    pages.words[64:128] = 0
    gap = Gap(64 * size, 64 * size, reason)  # type: ignore[arg-type]
    assert classes(pages, gap) == {code: [*range(64, 128)]}
