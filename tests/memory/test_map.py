# SPDX-License-Identifier: LGPL-2.1-or-later

"""Cells of a map, on real dumps and for memory of any size."""

import json

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.memory.classes import CLASSES, NCLASSES, PageClass
from msatools.memory.map import (
    MAX_CELLS,
    OUTLINE_CELLS,
    Cells,
    MapPlace,
    MemoryMap,
    PageRun,
    cell_size,
)
from msatools.memory.memmap import MemmapRange
from msatools.memory.model import MemstatReport
from msatools.reports.forms import dumps

from .sums import pages_of, view

SECTION = 1 << 15
GIB = 1 << 18


@pytest.fixture
def memory(cut_up: MemstatReport) -> MemoryMap:
    assert cut_up.map is not None
    return cut_up.map


def test_cells_sum_to_the_classes(memory: MemoryMap, report: MemstatReport) -> None:
    sums = memory.cells.counts.sum(axis=0)
    assert {name: sums[code] for code, name in CLASSES.items()} == pages_of(report)
    assert sums.sum() == report.pages


def test_cells_cover_the_sections(memory: MemoryMap, report: MemstatReport) -> None:
    assert report.sections is not None
    assert memory.section_pages == SECTION
    step = memory.cell_pages
    assert len(memory.cells) == report.pages // step <= MAX_CELLS
    expected = [
        pfn for s in report.sections for pfn in range(s.pfn, s.pfn + s.pages, step)
    ]
    assert (memory.cells.numbers * step).tolist() == expected


def test_cells_have_their_zones(memory: MemoryMap, report: MemstatReport) -> None:
    zones = {group.key: group.pages for group in view(report, "zone")}
    cells = memory.cells
    sums = {
        f"{place.node}:{place.zone}": int(cells.counts[cells.places == index].sum())
        for index, place in enumerate(cells.all_places)
    }
    assert sums.keys() == zones.keys()
    # Struct pages of holes at the end of a zone have another zone in their flags.
    for key, pages in zones.items():
        assert abs(sums[key] - pages) <= 256
    assert sum(sums.values()) == report.pages


def test_json_has_an_outline(cut_up: MemstatReport, memory: MemoryMap) -> None:
    found = json.loads(dumps(cut_up))["map"]
    assert found.keys() == {"cell_pages", "section_pages", "runs"}
    keys = {"pfn", "cells", "pages", "node", "zone", "classes"}
    assert found["runs"][0].keys() == keys
    assert found["runs"][0]["pfn"] == 0
    assert len(json.dumps(found)) < 50_000
    assert sum(run["cells"] for run in found["runs"]) <= OUTLINE_CELLS
    joined = memory.at_most(OUTLINE_CELLS)
    assert found["cell_pages"] == joined.cell_pages
    # Expand the runs to cells.
    step, cells = joined.cell_pages, []
    for run in found["runs"]:
        assert run["pages"] == sum(run["classes"].values())
        for number in range(run["cells"]):
            counts = {name: n // run["cells"] for name, n in run["classes"].items()}
            cells.append((run["pfn"] // step + number, counts))
    assert cells == [
        (number, {CLASSES[code]: n for code, n in enumerate(counts) if n})
        for number, counts in zip(
            joined.cells.numbers.tolist(), joined.cells.counts.tolist(), strict=True
        )
    ]


def test_joined_cells_have_the_same_pages(memory: MemoryMap) -> None:
    joined = memory.at_most(100)
    assert 50 < len(joined.cells) <= 100
    assert joined.cell_pages % memory.cell_pages == 0
    mine, its = memory.cells.counts.sum(axis=0), joined.cells.counts.sum(axis=0)
    assert (mine == its).all()
    assert joined.cells.counts[0].sum() == joined.cell_pages
    assert joined.at_most(100) is joined


def made(numbers: list[int], codes: list[int], places: list[int]) -> MemoryMap:
    """Make a map of cells of 16 pages with one class each."""
    counts = np.zeros((len(numbers), NCLASSES), np.int64)
    counts[np.arange(len(numbers)), codes] = 16
    known = MapPlace(0, "DMA32"), MapPlace(1, "Normal")
    cells = Cells(np.array(numbers), counts, np.array(places), 16, known)
    return MemoryMap(16, SECTION, cells)


def test_runs_end_where_cells_differ() -> None:
    assert made([], [], []).outline().runs == ()
    anon, slab = PageClass.ANON, PageClass.SLAB
    outline = made(
        [0, 1, 2, 3, 10, 11, 12],
        [anon, anon, slab, slab, slab, slab, slab],
        [0, 0, 0, 0, 0, 1, -1],
    ).outline()
    assert outline.runs == (
        PageRun(0, 2, 32, 0, "DMA32", {"user.anon": 32}),
        PageRun(32, 2, 32, 0, "DMA32", {"kernel.slab": 32}),
        PageRun(160, 1, 16, 0, "DMA32", {"kernel.slab": 16}),
        PageRun(176, 1, 16, 1, "Normal", {"kernel.slab": 16}),
        PageRun(192, 1, 16, None, None, {"kernel.slab": 16}),
    )


def test_outline_of_a_terabyte_is_small(cut_up: MemstatReport) -> None:
    """All cells have a dozen classes with different numbers of pages."""
    step = 1024 * GIB // MAX_CELLS
    random = np.random.default_rng(1)
    counts = np.zeros((MAX_CELLS, NCLASSES), np.int64)
    for code in random.choice(NCLASSES, 12, replace=False):
        counts[:, code] = random.integers(1, step // 12, MAX_CELLS)
    places = np.zeros(MAX_CELLS, np.intp)
    cells = Cells(np.arange(MAX_CELLS), counts, places, step, (MapPlace(0, "Normal"),))
    memory = MemoryMap(step, SECTION, cells)
    document = json.loads(dumps(replace(cut_up, map=memory)))["map"]
    assert len(document["runs"]) == OUTLINE_CELLS
    assert document["cell_pages"] == GIB
    assert len(json.dumps(document)) < 500_000


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

    def cells(step: int) -> int:
        numbers = [
            np.arange(part.pfn // step, (part.pfn + part.pages - 1) // step + 1)
            for part in ranges
        ]
        return len(np.unique(np.concatenate(numbers)))

    assert cells(pages) <= MAX_CELLS < cells(pages // 2)
