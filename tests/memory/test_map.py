# SPDX-License-Identifier: LGPL-2.1-or-later

"""The cells of a map, on real dumps and of memory of any size."""

import json

import numpy as np
import pytest

from msatools.memory.map import MAX_CELLS, cell_size
from msatools.memory.mapmodel import MemoryMap
from msatools.memory.memmap import MemmapRange
from msatools.memory.model import MemstatReport
from msatools.render.json import dumps

SECTION = 1 << 15
GIB = 1 << 18


@pytest.fixture
def memory(cut_up: MemstatReport) -> MemoryMap:
    assert cut_up.map is not None
    return cut_up.map


def test_cells_sum_to_the_classes(memory: MemoryMap, report: MemstatReport) -> None:
    found = json.loads(dumps(report))["classes"]
    cells = list(memory.cells)
    for row in found:
        sums = sum(cell.classes.get(row["name"], 0) for cell in cells)
        assert sums == row["pages"]
    assert sum(cell.pages for cell in cells) == report.pages


def test_cells_are_where_the_sections_are(
    memory: MemoryMap, report: MemstatReport
) -> None:
    assert report.sections is not None
    assert memory.section_pages == SECTION
    each = memory.cell_pages
    assert len(memory.cells) == report.pages // each <= MAX_CELLS
    pfns = [cell.pfn for cell in memory.cells]
    expected = [
        pfn for s in report.sections for pfn in range(s.pfn, s.pfn + s.pages, each)
    ]
    assert pfns == expected


def test_cells_tell_their_zones(memory: MemoryMap, report: MemstatReport) -> None:
    assert report.by is not None
    zones = {group.key: group.pages for group in report.by["zone"]}
    sums = dict.fromkeys(zones, 0)
    for cell in memory.cells:
        sums[f"{cell.node}:{cell.zone}"] += cell.pages
    # Struct pages of holes at a zone's end name another zone, and lie in this one.
    for key, pages in zones.items():
        assert abs(sums[key] - pages) <= 256
    assert sum(sums.values()) == report.pages


def test_json_has_the_cells(cut_up: MemstatReport) -> None:
    found = json.loads(dumps(cut_up))["map"]
    assert found.keys() == {"cell_pages", "section_pages", "cells"}
    assert found["cells"][0].keys() == {"pfn", "pages", "node", "zone", "classes"}
    assert found["cells"][0]["pfn"] == 0


def test_joined_cells_have_the_same_pages(memory: MemoryMap) -> None:
    joined = memory.at_most(100)
    assert 50 < len(joined.cells) <= 100
    assert joined.cell_pages % memory.cell_pages == 0
    mine, its = memory.cells.counts.sum(axis=0), joined.cells.counts.sum(axis=0)
    assert (mine == its).all()
    first = joined.cells[0]
    assert first.pages == joined.cell_pages
    assert joined.at_most(100) is joined


def sections(*spans: tuple[int, int]) -> list[MemmapRange]:
    """Make the ranges of spans of memory, in GiB."""
    return [
        MemmapRange(pfn // SECTION, "online", True, pfn, SECTION, 0)
        for start, end in spans
        for pfn in range(start * GIB, end * GIB, SECTION)
    ]


@pytest.mark.parametrize(
    ("ranges", "pages"),
    [
        (sections((0, 1)), 4),
        (sections((0, 3), (4, 5)), 16),
        (sections((0, 3), (4, 1025)), 4096),
        (sections((0, 3), (4, 6), (5000, 5001)), 32),
    ],
    ids=["1 GiB", "4 GiB", "1 TiB", "far away"],
)
def test_cells_are_bounded(ranges: list[MemmapRange], pages: int) -> None:
    assert cell_size(ranges) == pages

    def cells(each: int) -> int:
        numbers = [
            np.arange(part.pfn // each, (part.pfn + part.pages - 1) // each + 1)
            for part in ranges
        ]
        return len(np.unique(np.concatenate(numbers)))

    assert cells(pages) <= MAX_CELLS < cells(pages // 2)
