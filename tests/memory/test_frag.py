# SPDX-License-Identifier: LGPL-2.1-or-later

"""Fragmentation and orders agree with the classes and with the guest's page flags."""

import re
from collections import Counter

import numpy as np
import pytest

from fixtures import lab
from msatools.memory.breakdowns import OrderGroup, SectionGroup
from msatools.memory.classes import CLASSES
from msatools.memory.fragmentation import (
    MOVABLE,
    fragmentation,
    unusable,
)
from msatools.memory.model import BlockSize, Frag, MemstatReport

from . import truth
from .sums import pages_of, summed, view

PER_BLOCK = 512


@pytest.fixture
def frag(cut_up: MemstatReport) -> Frag:
    assert cut_up.frag is not None
    return cut_up.frag


def size_of(frag: Frag, order: int) -> BlockSize:
    return next(size for size in frag.sizes if size.order == order)


def test_page_blocks_sum_to_the_classes(
    frag: Frag, report: MemstatReport, pages: dict[str, int]
) -> None:
    rows = frag.pageblocks
    assert frag.movable == tuple(CLASSES[code] for code in MOVABLE)
    free = pages["free.buddy"] + pages["free.pcp"]
    movable = sum(pages[name] for name in frag.movable)
    assert sum(row.free_pages for row in rows) == free
    assert sum(row.movable_pages for row in rows) == movable
    rest = sum(row.unmovable_pages for row in rows)
    assert rest == report.pages - free - movable
    for row in rows:
        sums = row.free_pages + row.movable_pages + row.unmovable_pages
        assert sums == row.blocks * PER_BLOCK
        assert row.mixed_blocks <= row.polluted_blocks <= row.blocks


def test_sizes_sum_to_the_classes(
    frag: Frag, report: MemstatReport, pages: dict[str, int]
) -> None:
    assert [size.bytes for size in frag.sizes] == [1 << 21, 1 << 30]
    assert size_of(frag, 9).blocks == report.pages // PER_BLOCK
    for size in frag.sizes:
        blocked, whole = size.blocked_blocks, size.whole_blocks
        states = size.free_blocks + size.movable_blocks + blocked + whole
        assert states + size.partial_blocks == size.blocks
        assert sum(needed.blocks for needed in size.needed) == blocked
        assert sum(row.alone_blocks for row in size.blockers) <= blocked
        assert all(row.blocks <= blocked for row in size.blockers)
    # Unmovable pages are in blocked blocks, or fill a whole block.
    huge = {row.name: row.pages for row in size_of(frag, 9).blockers}
    whole = {"free.hugetlb", "user.hugetlb"}
    for name in CLASSES.values():
        if name not in {*frag.movable, *whole, "free.buddy", "free.pcp"}:
            assert huge.get(name, 0) == pages[name]


@pytest.mark.parametrize(
    ("blocks", "unusable_permille", "fragmentation_permille"),
    [
        ((0,) * 11, None, 0),
        ((1024,) + (0,) * 10, 1000, 998),  # as many pages as two huge pages
        ((1,) + (0,) * 10, 1000, -1),  # hardly any memory
        ((0,) * 8 + (2, 0, 0), 1000, 0),
        ((512,) + (0,) * 8 + (1, 0), 500, None),
    ],
)
def test_indices(
    blocks: tuple[int, ...],
    unusable_permille: int | None,
    fragmentation_permille: int | None,
) -> None:
    assert unusable(blocks, 9) == unusable_permille
    assert fragmentation(blocks, 9) == fragmentation_permille


def test_sections_sum_to_the_classes(
    cut_up: MemstatReport, report: MemstatReport
) -> None:
    assert report.sections is not None
    groups = [g for g in view(cut_up, "section") if isinstance(g, SectionGroup)]
    listed = [(str(s.nr), s.pages, s.node, s.zones) for s in report.sections]
    assert [(g.key, g.pages, g.node, g.zones) for g in groups] == listed
    assert summed(view(cut_up, "section")) == pages_of(report)


# Memory by order


def orders(cut_up: MemstatReport) -> dict[str, OrderGroup]:
    groups = view(cut_up, "order")
    found = {group.key: group for group in groups if isinstance(group, OrderGroup)}
    assert len(found) == len(groups)
    return found


def test_orders_sum_to_the_classes(
    cut_up: MemstatReport, report: MemstatReport
) -> None:
    assert cut_up.classes == report.classes
    assert summed(view(cut_up, "order")) == pages_of(report)
    for group in orders(cut_up).values():
        if group.key == "-":
            assert group.blocks is None
            assert re.match("no order", group.name)
        else:
            assert group.blocks is not None
            assert group.blocks << int(group.key) == group.pages


def test_compound_pages_by_order(run: lab.Run, cut_up: MemstatReport) -> None:
    flags = truth.page_flags(run)
    heads = np.flatnonzero(truth.having(flags, "COMPOUND_HEAD"))
    tails = truth.having(flags, "COMPOUND_TAIL")
    # A head's tails end at the first page that is not a tail.
    ends = np.flatnonzero(~tails)
    sizes = ends[np.searchsorted(ends, heads, side="right")] - heads
    expected: Counter[int] = Counter()
    for size in sizes.tolist():
        expected[size.bit_length() - 1] += size
    found = {
        int(key): group.pages - group.classes["free.buddy"] - group.classes["free.pcp"]
        for key, group in orders(cut_up).items()
        if key not in ("-", "0")
    }
    assert {order: pages for order, pages in found.items() if pages} == expected
