# SPDX-License-Identifier: LGPL-2.1-or-later

"""Draws a map of memory as text."""

from collections.abc import Iterator

from msatools.memory.map.model import MemoryMap
from msatools.render.blocks import Block, Cell, Chart, Mark, Span, text
from msatools.render.memstat.map import (
    LEVELS,
    LegendLine,
    MapRun,
    bands,
    begins_section,
    legend,
    runs,
    section_columns,
    section_words,
    shades,
)
from msatools.render.memstat.palette import LOOKS
from msatools.reports.units import size

COLUMNS = 64
_ROWS = 32

_SIGNS = "\N{MIDDLE DOT}\N{LIGHT SHADE}\N{MEDIUM SHADE}\N{DARK SHADE}\N{FULL BLOCK}"
_FREE_LETTER = "."
_NO_CELL = " "

_Line = tuple[Cell, ...]


def blocks(memory: MemoryMap, page_size: int) -> Iterator[Block]:
    """Yield a map and its legend."""
    memory = memory.at_most(COLUMNS * _ROWS)
    cell = size(memory.cell_pages * page_size)
    yield text()
    yield text(Span(f"Physical memory, {cell} a cell", "title"))
    yield Chart(tuple(_lines(memory, page_size)))
    yield text()
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
    for line in lines:
        amount = size(line.pages * page_size)
        yield (
            *_sample(line),
            f"  {line.name:<{names}}  {line.pages:>{pages},}  {amount:>10}"
            f"  {100 * line.share:5.1f} %",
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
