# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which struct pages that are read twice have changed, and of how many folios."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.demo import DEMOS
from msatools.memory.changing import RUN_PAGES, Sample, changed_pages, sample_of
from msatools.memory.classify import FarHead, classify
from msatools.memory.layout import PageLayout, page_layout
from msatools.memory.memmap import MemmapRange
from msatools.target import TargetSpec, open_target

PFN = 8 * RUN_PAGES
ADDRESS = 0xFFFFEA0000000000
ANON_VMA = 0xFFFF888000000001
MAPPING = 0xFFFF888000001000
HELD = 1 << 32
NOT_MAPPED = 0xFFFFFFFF

Pages = npt.NDArray[np.uint64]


@pytest.fixture(scope="module")
def layout() -> PageLayout:
    """A real kernel's; what it has of page types does not matter here."""
    spec = TargetSpec(path=str(DEMOS["6.12"].core), types="btf")
    return page_layout(open_target(spec).prog)


class Memory:
    """Struct pages of kernel memory, and what can become of them."""

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.words = np.zeros((RUN_PAGES, layout.size // 8), np.uint64)
        self.words[:, layout.flags // 8] = 1 << 54
        self.words[:, layout.mapcount // 8] = HELD | NOT_MAPPED

    def copy(self) -> "Memory":
        other = Memory(self.layout)
        other.words[:] = self.words
        return other

    def anon(self, page: int, mapping: int = ANON_VMA) -> None:
        self.words[page, self.layout.mapping // 8] = mapping
        self.words[page, self.layout.flags // 8] |= self.layout.bits["swapbacked"]

    def free(self, page: int) -> None:
        """As on a per-CPU list: nothing says so but that nobody holds it."""
        self.words[page, self.layout.mapping // 8] = 0
        self.words[page, self.layout.compound_head // 8] = 0
        self.words[page, self.layout.flags // 8] = 1 << 54
        self.words[page, self.layout.mapcount // 8] = NOT_MAPPED

    def compound(self, first: int, count: int) -> None:
        self.words[first, self.layout.flags // 8] |= self.layout.bits["head"]
        head = ADDRESS + first * self.layout.size + 1
        self.words[first + 1 : first + count, self.layout.compound_head // 8] = head

    def huge(self, first: int, count: int) -> None:
        self.compound(first, count)
        self.anon(first)

    def changed(self, later: "Memory") -> list[int]:
        """The folio of each page that is not what it was."""
        found = changed_pages(
            self.words.tobytes(), later.words.tobytes(), PFN, ADDRESS, self.layout
        )
        return [int(folio) for folio in found]


@pytest.fixture
def before(layout: PageLayout) -> Memory:
    return Memory(layout)


def test_nothing_has_changed(before: Memory) -> None:
    before.anon(3)
    before.huge(64, 16)
    assert before.changed(before.copy()) == []


def test_what_comes_and_goes_without_a_change(before: Memory) -> None:
    """References, mappings by page tables, bits such as PG_active, list nodes."""
    before.anon(3)
    after = before.copy()
    layout = before.layout
    after.words[3, layout.mapcount // 8] = 5 << 32 | 2
    after.words[3, layout.flags // 8] |= layout.bits["active"]
    after.words[3, layout.lru // 8] = 0xFFFF888000002000
    assert before.changed(after) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda pages: pages.anon(5),
        lambda pages: pages.free(5),
        lambda pages: pages.anon(5, MAPPING),
    ],
)
def test_one_page(before: Memory, change: Callable[[Memory], None]) -> None:
    after = before.copy()
    change(after)
    assert before.changed(after) == [5]
    assert after.changed(before) == [5]


def test_other_owner_of_the_same_class(before: Memory) -> None:
    before.anon(5)
    after = before.copy()
    after.anon(5, ANON_VMA + 64)
    assert before.changed(after) == [5]


def test_word_of_a_page_that_names_no_owner_there(before: Memory) -> None:
    layout = before.layout
    before.words[5, layout.flags // 8] |= layout.bits["reserved"]
    after = before.copy()
    after.words[5, layout.mapping // 8] = MAPPING
    assert before.changed(after) == []


def test_huge_page_is_one_folio(before: Memory) -> None:
    after = before.copy()
    after.huge(64, 16)
    # As it came, and as it goes.
    assert before.changed(after) == [64] * 16
    assert after.changed(before) == [64] * 16


def test_huge_page_that_is_split(before: Memory) -> None:
    """Each page is a folio now; to the eye the huge one is what has changed."""
    before.huge(64, 16)
    after = before.copy()
    after.words[64, before.layout.flags // 8] &= ~np.uint64(before.layout.bits["head"])
    for page in range(64, 80):
        after.words[page, before.layout.compound_head // 8] = 0
        after.anon(page)
    assert {*before.changed(after)} == {64}


def test_part_of_a_folio_that_begins_before_the_run(before: Memory) -> None:
    after = before.copy()
    head = ADDRESS - 256 * before.layout.size + 1
    after.words[:100, before.layout.compound_head // 8] = head
    assert before.changed(after) == [-256] * 100


# --- which are read


def parts(*each: tuple[int, int]) -> list[MemmapRange]:
    return [MemmapRange(0, "online", True, pfn, pages, 0) for pfn, pages in each]


def test_small_memory_is_read_again_in_full() -> None:
    sample = sample_of(parts((0, 2 * RUN_PAGES), (8 * RUN_PAGES, RUN_PAGES)))
    assert sample.starts.tolist() == [0, RUN_PAGES, 8 * RUN_PAGES]


def test_runs_are_whole_different_and_in_order() -> None:
    pages = 1000 * RUN_PAGES
    sample = sample_of(parts((0, RUN_PAGES // 2), (1 << 20, pages), (1 << 30, pages)))
    starts = sample.starts.tolist()
    assert len(starts) == 32
    assert starts == sorted({*starts})
    for start in starts:
        (base,) = {b for b in (1 << 20, 1 << 30) if b <= start < b + pages}
        assert (start - base) % RUN_PAGES == 0


def test_no_memory_has_no_runs() -> None:
    assert sample_of([]).starts.tolist() == []


def test_sample_keeps_what_the_scan_saw(layout: PageLayout) -> None:
    words = np.arange(3 * RUN_PAGES * layout.size // 8, dtype=np.uint64)
    data = words.tobytes()
    one = Sample(np.array([PFN, PFN + 2 * RUN_PAGES, PFN + 8 * RUN_PAGES], np.uint64))
    other = replace(one, seen={})
    run = RUN_PAGES * layout.size
    block = classify(bytes(len(data)), PFN, ADDRESS, layout, lambda _: FarHead(0, 0))
    one.observe(replace(block, data=data))
    assert one.seen == {
        PFN: (ADDRESS, data[:run]),
        PFN + 2 * RUN_PAGES: (ADDRESS + 2 * run, data[2 * run :]),
    }
    block = replace(block, data=data, pfn=PFN + 8 * RUN_PAGES)
    other.observe(block)
    one.merge(other)
    assert one.seen[PFN + 8 * RUN_PAGES] == (ADDRESS, data[:run])
