# SPDX-License-Identifier: LGPL-2.1-or-later

"""
A map of memory as rows of cells, before it is known what it is drawn on.

A cell has the colour of the largest class in it other than free pages, and is the
paler the more of it is free. So what is used shows where most is free, too, and only
a cell without any used page looks free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msatools.memory.map.model import Cells, MapPlace, MemoryMap
from msatools.memory.pages.classes import CLASSES, PageClass
from msatools.render.memstat.palette import LOOKS, Style

LEVELS = 4
"""Steps of paleness of what is not free."""

_FREE = (PageClass.FREE_BUDDY, PageClass.FREE_PCP)

_MOST_BANDS = 48
"""Where zones lie in more pieces than this they are not told apart."""


_FEWEST_COLUMNS = 4
"""Sections of less than this are not marked one by one."""


@dataclass(frozen=True)
class Shades:
    """The class and shade of each cell of a map."""

    codes: npt.NDArray[np.uint8]
    """The largest class other than free pages; a free one if there is none."""

    levels: npt.NDArray[np.uint8]
    """0 if all is free, LEVELS if more than three quarters are not."""


def shades(memory: MemoryMap) -> Shades:
    """Choose what each cell shows."""
    counts = memory.cells.counts
    used = counts.copy()
    used[:, _FREE] = 0
    parts = used.sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    levels = np.ceil(parts * LEVELS).astype(np.uint8)
    codes = used.argmax(axis=1).astype(np.uint8)
    codes[levels == 0] = PageClass.FREE_BUDDY
    return Shades(codes, levels)


@dataclass(frozen=True)
class MapRow:
    """Cells side by side; not each column has one."""

    pfn: int
    """Of the first column."""

    first_pfn: int
    """Of the first cell."""

    columns: npt.NDArray[np.intp]
    """Of each cell, ascending."""

    cells: npt.NDArray[np.intp]
    """Index of each cell in the map."""

    hole_pages: int
    """Since the last row of the map, whole rows without any cell."""


@dataclass(frozen=True)
class Band:
    """Rows of one zone that follow on each other."""

    place: MapPlace | None
    rows: tuple[MapRow, ...]

    @property
    def label(self) -> str:
        if self.place is None:
            return ""
        zone = f", zone {self.place.zone}" if self.place.zone else ""
        return f"Node {self.place.node}{zone}"


def bands(memory: MemoryMap, columns: int) -> tuple[Band, ...]:
    """Cut a map into rows of so many columns; each zone begins with a new row."""
    cells = memory.cells
    if not len(cells):
        return ()
    starts, places = _divided(cells)
    ends = np.append(starts[1:], len(cells)).tolist()
    found: list[Band] = []
    last_row = int(cells.numbers[0]) // columns - 1
    for start, end, place in zip(starts.tolist(), ends, places, strict=True):
        rows = tuple(_rows(memory, columns, start, end, last_row))
        last_row = rows[-1].pfn // memory.cell_pages // columns
        found.append(Band(place, rows))
    return tuple(found)


def _divided(
    cells: Cells,
) -> tuple[npt.NDArray[np.intp], list[MapPlace | None]]:
    """Find where zones begin, or nodes if zones are in many pieces, and which do."""
    by_zone = _changes(cells.places)
    if len(by_zone) <= _MOST_BANDS:
        return by_zone, [_place(cells, start) for start in by_zone.tolist()]
    of_place = np.array([place.node for place in cells.all_places])
    by_node = _changes(np.where(cells.places < 0, -1, of_place[cells.places]))
    if len(by_node) > _MOST_BANDS:
        return np.zeros(1, np.intp), [None]
    zones = (_place(cells, start) for start in by_node.tolist())
    return by_node, [zone and MapPlace(zone.node, "") for zone in zones]


def _changes(keys: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))


def _place(cells: Cells, index: int) -> MapPlace | None:
    at = int(cells.places[index])
    return None if at < 0 else cells.all_places[at]


def _rows(
    memory: MemoryMap, columns: int, start: int, end: int, last_row: int
) -> Iterator[MapRow]:
    numbers = memory.cells.numbers[start:end]
    of_each = numbers // columns
    for number in np.unique(of_each).tolist():
        first, past = np.searchsorted(of_each, [number, number + 1]).tolist()
        missing = max(number - last_row - 1, 0)
        each = columns * memory.cell_pages
        yield MapRow(
            pfn=number * each,
            first_pfn=int(numbers[first]) * memory.cell_pages,
            columns=numbers[first:past] % columns,
            cells=np.arange(start + first, start + past),
            hole_pages=missing * each,
        )
        last_row = number


@dataclass(frozen=True)
class MapRun:
    """Cells of a row side by side that look the same."""

    column: int
    length: int
    code: int
    level: int


def runs(row: MapRow, shown: Shades) -> Iterator[MapRun]:
    """Join the cells of a row that look the same."""
    codes, levels = shown.codes[row.cells], shown.levels[row.cells]
    new = np.ones(len(row.cells), np.bool_)
    new[1:] = (
        (np.diff(row.columns) != 1)
        | (codes[1:] != codes[:-1])
        | (levels[1:] != levels[:-1])
    )
    starts = np.flatnonzero(new)
    lengths = np.diff(starts, append=len(row.cells))
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        at = int(row.columns[start])
        yield MapRun(at, length, int(codes[start]), int(levels[start]))


@dataclass(frozen=True)
class LegendLine:
    """One class of the legend."""

    name: str
    style: Style
    is_free: bool
    pages: int
    share: float
    """Of all pages with a struct page."""


def legend(memory: MemoryMap) -> Sequence[LegendLine]:
    """List the classes that have pages."""
    totals = memory.cells.counts.sum(axis=0)
    every = max(int(totals.sum()), 1)
    return [
        LegendLine(name, LOOKS[code], code in _FREE, pages, pages / every)
        for code, name in CLASSES.items()
        if (pages := int(totals[code]))
    ]


def section_columns(memory: MemoryMap, columns: int) -> int | None:
    """Return the columns of a memory section, if it is a good part of a row."""
    each = memory.section_pages // memory.cell_pages
    return each if _FEWEST_COLUMNS <= each < columns else None


def section_words(memory: MemoryMap, columns: int, above: str, beside: str) -> str:
    """
    Say where memory sections begin.

    :param above: What marks it over the columns.
    :param beside: What marks it beside the rows.
    """
    sections, rest = divmod(memory.cell_pages, memory.section_pages)
    if sections and not rest:
        return f"memory sections: {sections:,} a cell"
    cells = memory.section_pages // memory.cell_pages
    if cells < _FEWEST_COLUMNS:
        return f"memory sections: {cells} cells each"
    return f"memory sections begin {above if cells < columns else beside}"


def begins_section(memory: MemoryMap, row: MapRow, columns: int) -> bool:
    """Return whether a row begins a memory section, for sections of several rows."""
    large = memory.section_pages >= memory.cell_pages * columns
    return large and row.first_pfn % memory.section_pages == 0
