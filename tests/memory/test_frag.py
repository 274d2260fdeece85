# SPDX-License-Identifier: LGPL-2.1-or-later

"""Fragmentation agrees with the classes and with the guest's page flags."""

import copy
import pickle

import numpy as np
import pytest
from drgn import FaultError, Program

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory import fragmentation as pageblocks
from msatools.memory.breakdowns import SectionGroup
from msatools.memory.classes import CLASSES, NCLASSES, PageClass
from msatools.memory.classify import Counts
from msatools.memory.fragmentation import (
    MOVABLE,
    UNKNOWN_TYPE,
    Blocks,
    MigrateTypes,
    _unpack,
    fragmentation,
    migrate_types,
    unusable,
)
from msatools.memory.model import BlockSize, Frag, MemstatReport

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


def test_indices_equal_those_of_their_definition(frag: Frag) -> None:
    for row in frag.free:
        assert row.pages == sum(n << order for order, n in enumerate(row.blocks))
        small = sum(n << order for order, n in enumerate(row.blocks[:9]))
        assert row.unusable_permille == small * 1000 // row.pages
        count = sum(row.blocks)
        # mm/vmstat.c: how far an allocation of a huge page fails for fragmentation.
        permille = 1000 - (1000 + row.pages * 1000 // PER_BLOCK) // count
        expected = None if any(row.blocks[9:]) else permille
        assert row.fragmentation_permille == expected


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


def block(**pages: int) -> Counts:
    codes = {name.partition(".")[2] or name: code for code, name in CLASSES.items()}
    counts = np.zeros(NCLASSES, np.int64)
    for name, count in pages.items():
        counts[codes[name]] = count
    counts[PageClass.FREE_BUDDY] += PER_BLOCK - counts.sum()
    return counts


def test_states_of_blocks() -> None:
    blocks = Blocks(PER_BLOCK)
    rows = [
        (block(), PER_BLOCK),
        (block(pcp=1), PER_BLOCK),
        (block(anon=5, file=500), PER_BLOCK),
        (block(anon=512), 1),
        (block(slab=1), PER_BLOCK),
        (block(slab=3, reserved=4, anon=9), PER_BLOCK),
        (block(excluded=1), PER_BLOCK),
    ]
    counts = np.array([row for row, _ in rows])
    blocks.add(counts[:3], np.array([heads for _, heads in rows[:3]]))
    later = Blocks(PER_BLOCK)
    later.add(counts[3:], np.array([heads for _, heads in rows[3:]]))
    blocks.merge(later)
    whole, free, movable, blocked, partial = blocks.states.tolist()
    assert (whole, free, movable, blocked, partial) == (1, 1, 2, 2, 1)
    assert blocks.moved == 505
    assert blocks.having[PageClass.SLAB] == 2
    assert blocks.having[PageClass.RESERVED] == 1
    assert blocks.alone[PageClass.SLAB] == 1
    assert blocks.alone.sum() == 1
    assert blocks.pages[PageClass.SLAB] == 4
    # The buckets of one page, and of five to eight.
    assert blocks.needed.nonzero()[0].tolist() == [0, 3]


def test_migrate_types_of_page_blocks() -> None:
    records = np.array([[0x21, 0x43]], np.uint8)
    assert _unpack(records, 4).tolist() == [[1, 2, 3, 4]]
    assert _unpack(records, 8).tolist() == [[0x21, 0x43]]
    sections = np.array([3, 7])
    matrix = np.arange(128, dtype=np.uint8).reshape(2, 64) % 5
    types = MigrateTypes(9, {}, sections, matrix)
    assert types.of(7 * 64 * PER_BLOCK + 2 * PER_BLOCK, 3).tolist() == [1, 2, 3]
    assert types.of(8 * 64 * PER_BLOCK, 2).tolist() == [UNKNOWN_TYPE] * 2
    assert copy.deepcopy(types) is types
    assert len(pickle.loads(pickle.dumps(types)).sections) == 0


def test_migrate_types_that_cannot_be_read(
    prog: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise FaultError("lost", 0)

    monkeypatch.setattr(pageblocks, "section_usages", lost)
    losses = LossLog()
    types = migrate_types(Reader(prog), 10, losses)
    assert types.of(0, 3).tolist() == [UNKNOWN_TYPE] * 3
    assert losses.lost["pageblocks_unreadable"] == 1
    monkeypatch.setattr(pageblocks, "section_usages", lambda *_: {2: 8})
    losses = LossLog()
    types = migrate_types(Reader(prog), 10, losses)
    assert types.of(2 * 64 * PER_BLOCK, 3).tolist() == [UNKNOWN_TYPE] * 3
    assert losses.coverage["pageblocks_unreadable"] == 64


def test_sections_sum_to_the_classes(
    cut_up: MemstatReport, report: MemstatReport
) -> None:
    assert report.sections is not None
    groups = [g for g in view(cut_up, "section") if isinstance(g, SectionGroup)]
    listed = [(str(s.nr), s.pages, s.node, s.zones) for s in report.sections]
    assert [(g.key, g.pages, g.node, g.zones) for g in groups] == listed
    assert summed(view(cut_up, "section")) == pages_of(report)
