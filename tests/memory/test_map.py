# SPDX-License-Identifier: LGPL-2.1-or-later

"""Cells of a map, on real dumps and for memory of any size."""

import json

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.memory.classes import CLASSES, NCLASSES
from msatools.memory.map import (
    MAX_CELLS,
    OUTLINE_CELLS,
    Cells,
    MapPlace,
    MemoryMap,
)
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
