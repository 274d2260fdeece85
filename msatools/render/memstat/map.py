# SPDX-License-Identifier: LGPL-2.1-or-later

"""
A map of memory as rows of cells, independent of the output.

A cell has the colour of its largest class other than free pages, and is paler if more
of it is free. So used pages are visible even where most is free, and only a cell
without any used page looks free.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.memory.map.model import Cells, MapPlace, MemoryMap
from msatools.memory.pages.classes import CLASSES, PageClass
from msatools.render.memstat.palette import LOOKS, Style

LEVELS = 4
"""Number of shades of a cell that is not free."""

_FREE = (PageClass.FREE_BUDDY, PageClass.FREE_PCP)

_MOST_BANDS = 48
"""Maximum number of bands; with more, zones are not distinguished."""


_FEWEST_COLUMNS = 4
"""Minimum columns of a section to mark each section."""


class Shades(Struct, frozen=True):
    """The class and shade of each cell of a map."""

    codes: npt.NDArray[np.uint8]
    """Largest class other than free pages; FREE_BUDDY if all are free."""

    levels: npt.NDArray[np.uint8]
    """Shade: 0 if all is free, LEVELS if more than three quarters are not."""


def shades(memory: MemoryMap) -> Shades:
    """Return the class and shade of each cell."""
    counts = memory.cells.counts
    used = counts.copy()
    used[:, _FREE] = 0
    parts = used.sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    levels = np.ceil(parts * LEVELS).astype(np.uint8)
    codes = used.argmax(axis=1).astype(np.uint8)
    codes[levels == 0] = PageClass.FREE_BUDDY
    return Shades(codes, levels)


class MapRow(Struct, frozen=True):
    """A row of cells; a column may have no cell."""

    pfn: int
    """First pfn of the first column."""

    first_pfn: int
    """First pfn of the first cell."""

    columns: npt.NDArray[np.intp]
    """Column of each cell, ascending."""

    cells: npt.NDArray[np.intp]
    """Index of each cell in the map."""

    hole_pages: int
    """Pages of the whole rows without any cell that precede this row."""


class Band(Struct, frozen=True):
    """Consecutive rows of one zone."""

    place: MapPlace | None
    rows: tuple[MapRow, ...]

    @property
    def label(self) -> str:
        if self.place is None:
            return ""
        zone = f", zone {self.place.zone}" if self.place.zone else ""
        return f"Node {self.place.node}{zone}"


def bands(memory: MemoryMap, columns: int) -> tuple[Band, ...]:
    """Divide a map into rows; each zone begins with a new row."""
    cells = memory.cells
    if not len(cells):
        return ()
    starts, places = _divided(cells)
    ends = np.append(starts[1:], len(cells)).tolist()
    divided: list[Band] = []
    last_row = int(cells.numbers[0]) // columns - 1
    for start, end, place in zip(starts.tolist(), ends, places, strict=True):
        rows = tuple(_rows(memory, columns, start, end, last_row))
        last_row = rows[-1].pfn // memory.cell_pages // columns
        divided.append(Band(place, rows))
    return tuple(divided)


def _divided(
    cells: Cells,
) -> tuple[npt.NDArray[np.intp], list[MapPlace | None]]:
    """Return the first cell and the zone of each band, or the node of many zones."""
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
    place = int(cells.places[index])
    return None if place < 0 else cells.all_places[place]


def _rows(
    memory: MemoryMap, columns: int, start: int, end: int, last_row: int
) -> Iterator[MapRow]:
    numbers = memory.cells.numbers[start:end]
    row_pages = columns * memory.cell_pages
    row_numbers = numbers // columns
    for number in np.unique(row_numbers).tolist():
        first, past = np.searchsorted(row_numbers, [number, number + 1]).tolist()
        missing = max(number - last_row - 1, 0)
        yield MapRow(
            pfn=number * row_pages,
            first_pfn=int(numbers[first]) * memory.cell_pages,
            columns=numbers[first:past] % columns,
            cells=np.arange(start + first, start + past),
            hole_pages=missing * row_pages,
        )
        last_row = number


class MapRun(Struct, frozen=True):
    """Consecutive cells of a row with the same class and shade."""

    column: int
    length: int
    code: int
    level: int


def runs(row: MapRow, shown: Shades) -> Iterator[MapRun]:
    """Yield the runs of equal cells of a row."""
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
        column = int(row.columns[start])
        yield MapRun(column, length, int(codes[start]), int(levels[start]))


class LegendLine(Struct, frozen=True):
    """One class of the legend."""

    name: str
    style: Style
    is_free: bool
    pages: int
    share: float
    """Share of all pages that have a struct page, 0 to 1."""


def legend(memory: MemoryMap) -> Sequence[LegendLine]:
    """Return a line for each class that has pages."""
    totals = memory.cells.counts.sum(axis=0)
    pages_in_all = max(int(totals.sum()), 1)
    return [
        LegendLine(name, LOOKS[code], code in _FREE, pages, pages / pages_in_all)
        for code, name in CLASSES.items()
        if (pages := int(totals[code]))
    ]


def section_columns(memory: MemoryMap, columns: int) -> int | None:
    """Return the columns of a memory section; ``None`` if too few or a whole row."""
    cells = memory.section_pages // memory.cell_pages
    return cells if _FEWEST_COLUMNS <= cells < columns else None


def section_words(memory: MemoryMap, columns: int, above: str, beside: str) -> str:
    """
    Return a description of where memory sections begin.

    :param above: Description of the marks above the columns.
    :param beside: Description of the marks beside the rows.
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
