# SPDX-License-Identifier: LGPL-2.1-or-later

"""Struct pages that changed between two reads, and their folios."""

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.memory.checks import RUN_PAGES, DriftSample, changed_pages, sample_of
from msatools.memory.classes import PageLayout
from msatools.memory.classify import FarHead, classify
from msatools.memory.memmap import MemmapRange

from .madepages import ADDRESS, NODE_1, Pages

PFN = 8 * RUN_PAGES
ANON_VMA = 0xFFFF888000000001
MAPPING = 0xFFFF888000001000


@pytest.fixture
def before(layout: PageLayout) -> Pages:
    return Pages(layout, RUN_PAGES)


Change = Callable[[Pages], None]


def nothing(pages: Pages) -> None:
    pass


def freed(pages: Pages, page: int) -> None:
    """Make a page look as on a per-CPU list: its reference count is 0."""
    for member in ("mapping", "compound_head", "refcount"):
        pages.put(page, member, 0)
    pages.put(page, "flags", NODE_1)


def huge(pages: Pages, first: int, count: int) -> None:
    pages.compound(first, count)
    pages.anon(first)


def changed(before: Pages, after: Pages) -> list[int]:
    """Return the folio of each page that changed."""
    found = changed_pages(before.data(), after.data(), PFN, ADDRESS, before.layout)
    return [int(folio) for folio in found]


def test_members_that_do_not_count_as_a_change(before: Pages) -> None:
    """Reference counts, mapcounts, list links, and flags such as PG_active."""
    before.anon(3)
    huge(before, 64, 16)
    after = before.copy()
    assert changed(before, after) == []
    after.put(3, "refcount", 5)
    after.put(3, "mapcount", 2)
    after.put(3, "lru", 0xFFFF888000002000)
    after.flag(3, "active")
    assert changed(before, after) == []


@pytest.mark.parametrize(
    ("was", "change"),
    [
        (nothing, lambda pages: pages.anon(5)),
        (nothing, lambda pages: freed(pages, 5)),
        (nothing, lambda pages: pages.anon(5, MAPPING)),
        # The page was mapped once.
        (lambda pages: pages.put(5, "mapcount", 0), lambda pages: freed(pages, 5)),
        # Another owner of the same class.
        (lambda pages: pages.anon(5), lambda pages: pages.anon(5, ANON_VMA + 64)),
    ],
)
def test_one_page(before: Pages, was: Change, change: Change) -> None:
    was(before)
    after = before.copy()
    change(after)
    assert changed(before, after) == [5]
    assert changed(after, before) == [5]


def test_mapping_word_of_a_reserved_page_does_not_count(before: Pages) -> None:
    before.flag(5, "reserved")
    after = before.copy()
    after.put(5, "mapping", MAPPING)
    assert changed(before, after) == []


def test_part_of_a_folio_that_begins_before_the_run(before: Pages) -> None:
    after = before.copy()
    after.tails(slice(100), -256)
    assert changed(before, after) == [-256] * 100


# --- the sample of pages that are read again


def parts(*spans: tuple[int, int]) -> list[MemmapRange]:
    return [MemmapRange(0, "online", True, pfn, pages, 0) for pfn, pages in spans]


def test_runs_are_whole_different_and_in_order() -> None:
    pages = 1000 * RUN_PAGES
    sample = sample_of(parts((0, RUN_PAGES // 2), (1 << 20, pages), (1 << 30, pages)))
    starts = sample.starts.tolist()
    assert len(starts) == 32
    assert starts == sorted({*starts})
    for start in starts:
        (base,) = {b for b in (1 << 20, 1 << 30) if b <= start < b + pages}
        assert (start - base) % RUN_PAGES == 0


def test_sample_keeps_what_the_scan_read(layout: PageLayout) -> None:
    words = np.arange(3 * RUN_PAGES * layout.size // 8, dtype=np.uint64)
    data = words.tobytes()
    one = DriftSample(
        np.array([PFN, PFN + 2 * RUN_PAGES, PFN + 8 * RUN_PAGES], np.uint64)
    )
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
