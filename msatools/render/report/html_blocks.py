# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks as the page of a report shows them: tables, and lines of preformatted text.

What a terminal says of its own options (``-v shows them``) has no place on a page: the
page shows all, up to its bounds, and how many rows and lines are left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from msatools.render import plain
from msatools.render.blocks import (
    Advice,
    Block,
    Cell,
    Column,
    Span,
    Style,
    Table,
    escape,
)
from msatools.render.cells import plural

MAX_ROWS = 400
"""Rows of a table on the page."""

MAX_LINES = 600
"""Lines and rows of a section on the page."""

LONG = 48
"""Characters from which on a cell of words may be wrapped."""

MAX_CHARACTERS = 1000
"""Characters of a line or cell on the page."""


class PagePiece(Struct, frozen=True):
    """A piece of text in one style; its characters are printable."""

    text: str
    style: Style | Literal[""] = ""


class PageLine(Struct, frozen=True):
    """A line of preformatted text."""

    pieces: Sequence[PagePiece]
    indent: int
    """Columns of its indentation, which further lines of it keep if it is wrapped."""


class PageText(Struct, frozen=True):
    """Lines of preformatted text."""

    lines: Sequence[PageLine]


class PageCell(Struct, frozen=True):
    """A cell of a table."""

    text: str
    style: Style | Literal[""]
    kind: Literal["", "right", "words"]
    """``right``: a number; ``words``: text that may be wrapped."""

    indent: int
    """Levels of indentation: a class below a group of classes."""


class PageRow(Struct, frozen=True):
    """A row of a table, and lines below it."""

    cells: Sequence[PageCell]
    notes: Sequence[PageLine]


class PageTable(Struct, frozen=True):
    """A table, with the line on what is left out of it."""

    columns: Sequence[Column]
    rows: Sequence[PageRow]
    left_out: str
    """Empty if it has all rows."""


PageBlock = PageTable | PageText


def page_blocks(make: Callable[[bool], Iterable[Block]]) -> list[PageBlock]:
    """Return the blocks of a section.

    :param make: Makes the blocks, with all details or without. The page has those with
        all, if they are not more than :data:`MAX_LINES` lines.
    """
    for verbose in (True, False):
        made, left = _bounded(make(verbose))
        if not left:
            return made
    return [*made, PageText([_line((Span(f"… {left}", "dim"),))])]


def _bounded(blocks: Iterable[Block]) -> tuple[list[PageBlock], str]:
    """Return blocks of at most MAX_LINES lines, and what is left out of them."""
    made: list[PageBlock] = []
    lines: list[PageLine] = []
    room, left = MAX_LINES, 0
    for block in blocks:
        if isinstance(block, Table):
            if lines:
                made.append(PageText(lines))
                lines = []
            shown = page_table(block, max(room, 1))
            made.append(shown)
            room -= len(shown.rows)
            continue
        for line in plain.lines(block):
            if room > 0:
                lines.append(_line(line))
            else:
                left += 1
            room -= 1
    if lines:
        made.append(PageText(lines))
    return made, f"{plural(left, 'more line')}" if left else ""


def page_table(table: Table, most: int = MAX_ROWS) -> PageTable:
    """Return a table of at most *most* rows, and :data:`MAX_ROWS`."""
    rows = [
        PageRow(
            [
                _cell(cell, column)
                for cell, column in zip(row, table.columns, strict=False)
            ],
            [
                _line(line)
                for note in table.notes.get(index, ())
                for line in plain.lines(note)
            ],
        )
        for index, row in enumerate(table.rows[: min(most, MAX_ROWS)])
    ]
    left, what = len(table.rows) - len(rows), "row"
    if table.more is not None:
        left, what = left + max(table.more.left, 0), table.more.what
    left_out = f"… {plural(left, f'more {what}')}" if left else ""
    return PageTable(table.columns, rows, left_out)


def _cell(cell: Cell, column: Column) -> PageCell:
    span = cell if isinstance(cell, Span) else Span(cell)
    text = escape(span.text).rstrip()
    bare = text.lstrip(" ")
    kind: Literal["", "right", "words"] = ""
    if column.least is not None and len(bare) > LONG:
        kind = "words"
    return PageCell(
        text=_cut(bare),
        style=span.style or "",
        kind="right" if column.align == "right" else kind,
        indent=(len(text) - len(bare) + 1) // 2,
    )


def _line(line: plain.Line) -> PageLine:
    """Return a line without what to type on a terminal."""
    room = MAX_CHARACTERS
    pieces = []
    for span in line:
        text = "" if isinstance(span, Advice) else span.text
        if text and room > 0:
            pieces.append(PagePiece(_cut(text, room), span.style or ""))
        room -= len(text)
    joined = "".join(piece.text for piece in pieces)
    return PageLine(pieces, len(joined) - len(joined.lstrip(" ")))


def _cut(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def texts(blocks: Iterable[PageBlock]) -> Iterator[str]:
    """Yield each line and cell."""
    for block in blocks:
        if isinstance(block, PageTable):
            for row in block.rows:
                yield from (cell.text for cell in row.cells)
                yield from map(_joined, row.notes)
        else:
            yield from map(_joined, block.lines)


def _joined(line: PageLine) -> str:
    return "".join(piece.text for piece in line.pieces)
