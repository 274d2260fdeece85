# SPDX-License-Identifier: LGPL-2.1-or-later

"""A map of memory as rows of cells, and as text."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.memory.classes import CLASSES, PageClass
from msatools.memory.map import Cells, MapPlace, MemoryMap
from msatools.render.blocks import Block, Cell, Chart, Mark, Span, line
from msatools.reports.units import size

# --- Styles of the classes of pages on a map.
#
# Blue is for users, green for the page cache, warm colours for the kernel, grey for
# pages without a user. Hues and lightness are chosen so that the largest classes are
# distinct with any kind of colour vision, and visible on dark and light backgrounds:
# the tests measure their distances in CIELAB, as they are and as seen with protanopia,
# deuteranopia and tritanopia (Machado, Oliveira and Fernandes, 2009). Palettes that are
# made for this, such as those of Okabe and Ito or of Paul Tol, have too few colours for
# all classes.


class Style(Struct, frozen=True):
    """Style of the cells of a class."""

    letter: str
    """Letter of the class on devices without colours; lower case for a pale cell."""

    colour: str
    """``#rrggbb``."""


FREE_COLOUR = "#ecece8"

LOOKS: dict[int, Style] = {
    PageClass.FREE_BUDDY: Style(".", FREE_COLOUR),
    PageClass.FREE_PCP: Style(".", FREE_COLOUR),
    PageClass.FREE_HUGETLB: Style("Q", "#9977ff"),
    PageClass.FREE_UNACCEPTED: Style("_", "#c9c9d6"),
    PageClass.ANON: Style("A", "#0055cc"),
    PageClass.KSM: Style("K", "#3377aa"),
    PageClass.USER_HUGETLB: Style("H", "#7abfff"),
    PageClass.FILE: Style("F", "#00aa66"),
    PageClass.EXEC: Style("X", "#bbdd66"),
    PageClass.SHMEM: Style("S", "#55ddbb"),
    PageClass.BLOCKDEV: Style("B", "#226633"),
    PageClass.SLAB: Style("L", "#eeaa00"),
    PageClass.LARGE_KMALLOC: Style("M", "#c49a3a"),
    PageClass.PAGE_TABLES: Style("T", "#bb6699"),
    PageClass.PAGE_TABLES_OWN: Style("O", "#dd99bb"),
    PageClass.STACKS: Style("N", "#991188"),
    PageClass.VMALLOC: Style("V", "#cc6622"),
    PageClass.VMAP: Style("C", "#dd7744"),
    PageClass.PERCPU: Style("P", "#994422"),
    PageClass.PIPES: Style("I", "#aa8866"),
    PageClass.SOCKETS: Style("E", "#886655"),
    PageClass.RINGS: Style("&", "#77aa55"),
    PageClass.REQUESTS: Style("#", "#b8a055"),
    PageClass.MEMPOOLS: Style("@", "#a08855"),
    PageClass.DMA: Style("+", "#998844"),
    PageClass.DMABUF: Style("$", "#669977"),
    PageClass.TRACING: Style("=", "#887799"),
    PageClass.GLOBALS: Style("^", "#8a8a60"),
    PageClass.HUGE_ZERO: Style("G", "#88ccee"),
    PageClass.ZSMALLOC: Style("Z", "#f08a5d"),
    PageClass.MOVABLE: Style("J", "#ddaa77"),
    PageClass.RESERVED: Style("R", "#606060"),
    PageClass.OFFLINE: Style("W", "#a5a5a5"),
    PageClass.HWPOISON: Style("!", "#000000"),
    PageClass.DEVICE: Style("D", "#6699aa"),
    PageClass.MEMMAP: Style("Y", "#808070"),
    PageClass.UNATTRIBUTED: Style("U", "#7700ff"),
    PageClass.EXCLUDED: Style("?", "#bbbbbb"),
    PageClass.UNREADABLE: Style("%", "#8b0000"),
}


def mix(colour: str, ground: str, part: float) -> str:
    """
    Return the mix of a colour and its background.

    :param part: Opacity of the colour, 0 to 1.

    >>> mix("#000000", "#ffffff", 0.2)
    '#cccccc'
    """
    pairs = zip(_parts(colour), _parts(ground), strict=True)
    mixed = (round(part * over + (1 - part) * under) for over, under in pairs)
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


# --- A map of memory as rows of cells, independent of the output.
#
# A cell has the colour of its largest class other than free pages, and is paler if more
# of it is free. So used pages are visible even where most is free, and only a cell
# without any used page looks free.


LEVELS = 4
"""Number of shades of a cell that is not free."""

_FREE = (PageClass.FREE_BUDDY, PageClass.FREE_PCP)

_MOST_BANDS = 48
"""Maximum number of bands; with more, zones are not distinguished."""


_FEWEST_COLUMNS = 4
"""Minimum width of a section, in columns, to mark where each section begins."""


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
    """Return the first cell and place of each band: zone; node if there are many."""
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
    """Return a section's width in columns; ``None`` if too narrow or a row or more."""
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


# --- Draws a map of memory as text.


COLUMNS = 64
_ROWS = 32

_SIGNS = "\N{MIDDLE DOT}\N{LIGHT SHADE}\N{MEDIUM SHADE}\N{DARK SHADE}\N{FULL BLOCK}"
_FREE_LETTER = "."
_NO_CELL = " "

_Line = tuple[Cell, ...]


def map_blocks(memory: MemoryMap, page_size: int) -> Iterator[Block]:
    """Yield a map and its legend."""
    memory = memory.at_most(COLUMNS * _ROWS)
    cell = size(memory.cell_pages * page_size)
    yield line()
    yield line(Span(f"Physical memory, {cell} a cell", "title"))
    yield Chart(tuple(_lines(memory, page_size)))
    yield line()
    yield Chart(tuple(_legend(memory, page_size)))


def _lines(memory: MemoryMap, page_size: int) -> Iterator[_Line]:
    shown = shades(memory)
    all_bands = bands(memory, COLUMNS)
    last = all_bands[-1].rows[-1].pfn * page_size if all_bands else 0
    width = len(_address(last))
    ruler = _ruler(memory)
    margin = " " * (width + 2)
    for band in all_bands:
        hole = band.rows[0].hole_pages
        if hole:
            yield _hole(margin, hole * page_size)
        yield margin, Span(band.label, "title"), " " + ruler[len(band.label) + 1 :]
        for row in band.rows:
            if row.hole_pages and row is not band.rows[0]:
                yield _hole(margin, row.hole_pages * page_size)
            address = f"{_address(row.first_pfn * page_size):>{width}}"
            mark = "+" if begins_section(memory, row, COLUMNS) else " "
            yield address, f"{mark} ", *_marks(runs(row, shown))


def _ruler(memory: MemoryMap) -> str:
    """Return a line that marks the starts of sections, if they are within a row."""
    step = section_columns(memory, COLUMNS)
    if step is None:
        return ""
    return "".join(" " if column % step else "|" for column in range(COLUMNS))


def _hole(margin: str, amount: int) -> _Line:
    return margin, Span(f"(no memory: {size(amount)})", "dim")


def _address(address: int) -> str:
    return f"{address:#_x}"


def _marks(row: Iterator[MapRun]) -> Iterator[Cell]:
    end = 0
    for run in row:
        if run.column > end:
            yield _NO_CELL * (run.column - end)
        end = run.column + run.length
        style = LOOKS[run.code]
        if not run.level:
            dots = _FREE_LETTER * run.length
            yield Mark(dots, "dim", signs=_SIGNS[0] * run.length)
            continue
        letter = style.letter if 2 * run.level > LEVELS else style.letter.lower()
        signs = _SIGNS[run.level] * run.length
        yield Mark(letter * run.length, colour=style.colour, signs=signs)


def _legend(memory: MemoryMap, page_size: int) -> Iterator[_Line]:
    lines = legend(memory)
    names = max((len(line.name) for line in lines), default=0)
    pages = max((len(f"{line.pages:,}") for line in lines), default=0)
    for each in lines:
        amount = size(each.pages * page_size)
        yield (
            *_sample(each),
            f"  {each.name:<{names}}  {each.pages:>{pages},}  {amount:>10}"
            f"  {100 * each.share:5.1f} %",
        )
    yield (
        Span("a cell shows its largest class but free, paler if part is free: ", "dim"),
        *(
            Mark(_FREE_LETTER if level == 0 else letter, "dim", signs=_SIGNS[level])
            for level, letter in enumerate(".aaAA")
        ),
    )
    words = section_words(memory, COLUMNS, "under |", "at rows with +")
    yield (Span(words, "dim"),)


def _sample(line: LegendLine) -> Iterator[Cell]:
    if line.is_free:
        yield Mark(_FREE_LETTER * 2, "dim", signs=_SIGNS[0] * 2)
    else:
        yield Mark(
            line.style.letter * 2, colour=line.style.colour, signs=_SIGNS[LEVELS] * 2
        )
