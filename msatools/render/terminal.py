# SPDX-License-Identifier: LGPL-2.1-or-later

"""Draws blocks on a terminal, with rich.

Ours is what rich lacks: which columns go first (:mod:`msatools.render.table_layout`),
lines that are broken between fields, and tables of very many rows.

Nothing is parsed as rich's markup: rich gets text objects, of escaped text.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, zip_longest
from typing import TextIO

from msgspec.structs import replace
from rich.cells import set_cell_size
from rich.console import COLOR_SYSTEMS, Console
from rich.progress_bar import ProgressBar
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text as RichText
from rich.tree import Tree as RichTree

from msatools.render import blocks
from msatools.render.blocks import (
    Block,
    Chart,
    Column,
    Items,
    Mark,
    Side,
    Span,
    Table,
    Tree,
)
from msatools.render.device import Colours, Device
from msatools.render.plain import (
    MeasuredTable,
    RowLayout,
    Styles,
    columns_of,
    span,
    spans,
)
from msatools.render.plain import lines as plain_lines
from msatools.render.table_layout import GAP, Part, TableLayout, lay_out

MOST_DRAWN = 100
"""Rows of a table up to which rich lays it out, at 0.5 ms a row; beyond, the same lines
are laid out as in a pipe, in 0.02 ms a row."""

STYLES: dict[blocks.Style | None, Style | None] = {
    None: None,
    "title": Style(bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "dim": Style(dim=True),
}
_DIM = STYLES["dim"]

Row = Sequence[Segment]
"""The pieces of one line on the terminal."""

_HANG = "  "
"""Indentation of further lines of a text, in addition to its own."""

_NARROWEST = 20
"""Minimum columns of a terminal on which further lines are indented."""

_CUT = "…"
_BAR_WIDTH = 20


class Drawing:
    """Draws blocks on a device that has a width, or colours.

    :param most_drawn: Rows of a table up to which rich lays it out.
    """

    def __init__(self, device: Device, most_drawn: int = MOST_DRAWN) -> None:
        self._device = device
        self._most_drawn = most_drawn
        self._full = device.full
        self._width = device.width
        self._console = console_of(device, io.StringIO())
        self._options = self._console.options.copy()
        self._options.encoding = "utf-8" if device.has_signs else "ascii"

    def lines(self, block: Block) -> Iterator[Row]:
        """Lay out a block."""
        if self._width is None:
            yield from map(self._segments, plain_lines(block))
        elif isinstance(block, blocks.Text):
            yield from self._text(block)
        elif isinstance(block, Table):
            body, foot = self.table_lines(block)
            yield from body
            yield from foot
        elif isinstance(block, Items):
            for text in chain(*block.items, block.more.lines):
                yield from self._text(text)
        elif isinstance(block, Chart):
            for cells in block.rows:
                yield self.clipped(self._segments(map(span, cells)))
        else:
            yield from self._tree(block)

    @property
    def width(self) -> int:
        """Columns of the device."""
        return self._console.width

    def frame(self, rows: Iterable[Row]) -> Segments:
        """Return the lines of a whole screen for rich's live screen."""
        new_line = Segment.line()
        return Segments(piece for row in rows for piece in (*row, new_line))

    def bar(self, done: int, total: int) -> str:
        """Return a bar of how much is done, in a line with its codes."""
        bar = ProgressBar(max(total, 1), done, _BAR_WIDTH)
        rows = self._console.render_lines(bar, self._options, pad=False)
        # Without colours nothing is drawn of what is not done.
        return "".join(map(self.styled, rows))

    def styled(self, row: Row) -> str:
        """Return a line with the codes for its styles, without blanks at its end."""
        if len(row) == 1 and row[0].style is None:
            return row[0].text.rstrip(" ")
        system = COLOR_SYSTEMS.get(self._device.colours or "")
        text = ""
        for piece, style, _ in reversed([*Segment.simplify(row)]):
            shown = piece if text else piece.rstrip(" ")
            if style is not None:
                shown = style.render(shown, color_system=system)
            text = shown + text
        return text

    def _segments(self, line: Iterable[Span]) -> Row:
        return [Segment(*self._piece(span)) for span in line]

    def _piece(self, span: Span) -> tuple[str, Style | None]:
        if not isinstance(span, Mark) or self._device.colours in (None, "standard"):
            # With few colours, letters say more than signs.
            return span.text, STYLES[span.style]
        text = span.signs if self._device.has_signs else span.text
        if span.colour is None:
            return text, STYLES[span.style]
        return text, _foreground(span.colour, self._device.colours)

    # --- lines that are too wide

    def _text(self, text: blocks.Text) -> Iterator[Row]:
        row = self._segments(spans(text))
        if text.narrow == "keep":
            yield row
        elif text.narrow == "cut" and not self._full:
            yield self.clipped(row)
        else:
            yield from self._flowing(row)

    def clipped(self, row: Row) -> Row:
        """Return a line without what is beyond the terminal's width."""
        joined = _joined(row)
        if self._width is None or columns_of(joined) <= self._width:
            return row
        kept = len(cut(joined, self._width)) - len(_CUT)
        return [*self._slice(row, 0, kept), Segment(_CUT[: self._width], _DIM)]

    def _flowing(self, row: Row) -> Iterator[Row]:
        """Yield a line that is too wide as several."""
        joined = _joined(row)
        if self._width is None or columns_of(joined) <= self._width:
            yield row
            return
        hang = joined[: len(joined) - len(joined.lstrip(" "))] + _HANG
        if len(hang) > self._width - _NARROWEST:
            hang = ""
        further = self._width - len(hang)
        for number, (start, end) in enumerate(breaks(joined, self._width, further)):
            before = [Segment(hang)] if number and hang else []
            yield [*before, *self._slice(row, start, end)]

    def _slice(self, row: Row, start: int, end: int) -> Row:
        """Return the characters of a line from *start* to *end*."""
        text = RichText.assemble(*((piece.text, piece.style or "") for piece in row))
        return list(text[start:end].render(self._console)) if start < end else []

    # --- tables

    def table_lines(self, table: Table) -> tuple[Iterator[Row], list[Row]]:
        """Return the header and rows of a table, and lines about what is missing."""
        keeps_all = self._full or table.keeps_all
        measured = MeasuredTable(table)
        layout = lay_out(
            table.columns, measured.widths, self._width, keeps_all=keeps_all
        )
        is_whole = not layout.left_out and len(layout.parts) == 1
        if table.narrower is not None and not is_whole and not keeps_all:
            return self.table_lines(replace(table.narrower, more=table.more))
        foot = list(table.more.lines) if table.more is not None else []
        foot += _left_out(table, layout)
        foot_lines = [row for text in foot for row in self._text(text)]
        return self._body(table, measured, layout), foot_lines

    def _body(
        self, table: Table, measured: MeasuredTable, layout: TableLayout
    ) -> Iterator[Row]:
        """Yield the header and the rows, of each part after the other."""
        for number, part in enumerate(layout.parts):
            if number:
                yield []
            # Keys alone may be wider than the terminal.
            is_fitting = _width_of([*part.values()]) <= self.width
            all_rows = self._rows(table, part, measured)
            for index, rows in enumerate(all_rows, -1):
                yield from rows if is_fitting else map(self.clipped, rows)
                for note in table.notes.get(index, ()) if not number else ():
                    yield from self._text(note)

    def _rows(
        self, table: Table, part: Part, measured: MeasuredTable
    ) -> Iterator[Iterable[Row]]:
        """Yield the lines of the header and of each row, in the columns of a part."""
        columns = [table.columns[index] for index in part]
        widths = [*part.values()]
        title: Styles = ["title"] * len(table.columns)
        titles = measured.headers, title
        rows = (
            (
                self._fitted(columns, widths, [texts[index] for index in part]),
                styles and [styles[index] for index in part],
            )
            for texts, styles in chain([titles], measured.rows())
        )
        if len(measured) <= self._most_drawn:
            yield from self._drawn(columns, widths, list(rows))
            return
        row_line = RowLayout(columns, widths)
        for cells, styles in rows:
            below = zip_longest(*cells, fillvalue="")
            yield [self._segments(row_line(texts, styles)) for texts in below]

    def _drawn(
        self,
        columns: Sequence[Column],
        widths: Sequence[int],
        rows: Sequence[tuple[Sequence[Sequence[str]], Styles]],
    ) -> Iterator[Sequence[Row]]:
        """Yield the lines of each row, laid out by rich."""
        grid = RichTable(box=None, show_header=False, padding=(0, len(GAP), 0, 0))
        for column, width in zip(columns, widths, strict=True):
            grid.add_column(justify=column.align, width=width, no_wrap=True)
        for cells, styles in rows:
            all_styles = styles or [None] * len(cells)
            grid.add_row(*map(_rich_text, cells, all_styles))
        options = self._options.update(width=_width_of(widths) + len(GAP))
        drawn = iter(self._console.render_lines(grid, options, pad=False))
        for cells, _ in rows:
            yield [next(drawn) for _ in range(max(map(len, cells), default=1))]

    def _fitted(
        self, columns: Sequence[Column], widths: Sequence[int], texts: Sequence[str]
    ) -> list[list[str]]:
        """Return the cells of a row, each in lines of the width of its column.

        Those that are too wide are cut, or go on in lines below.
        """
        fitted = []
        for column, width, text in zip(columns, widths, texts, strict=True):
            if columns_of(text) <= width:
                fitted.append([text])
            elif self._full:
                ends = breaks(text, width, width)
                fitted.append([text[start:end] for start, end in ends])
            else:
                fitted.append([cut(text, width, column.keeps)])
        return fitted

    # --- trees

    def _tree(self, tree: Tree) -> Iterator[Row]:
        drawn = self._console.render_lines(self._branch(tree), self._options, pad=False)
        yield from map(self.clipped, drawn)

    def _branch(self, tree: Tree) -> RichTree:
        """Return a tree of which rich cuts the labels, or with -v wraps them."""
        piece = span(tree.label)
        label = _rich_text([piece.text], piece.style)
        label.no_wrap = not self._full
        label.overflow = "fold" if self._full else "ellipsis"
        branch = RichTree(label, guide_style="dim")
        branch.children = list(map(self._branch, tree.children))
        return branch


def console_of(device: Device, out: TextIO) -> Console:
    """Return rich's console of a device's size and colours, which parses no text."""
    return Console(
        file=out,
        width=device.width,
        height=device.height,
        color_system=device.colours,
        force_terminal=True,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )


@lru_cache(maxsize=1024)
def _foreground(colour: str, colours: Colours | None) -> Style:
    # A style of rich keeps the codes that it had first, for whatever colours.
    return Style(color=colour)


def _rich_text(below: Sequence[str], style: blocks.Style | None) -> RichText:
    """Return some lines below each other, of one style."""
    return RichText("\n".join(below), STYLES[style] or "")


def _width_of(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _left_out(table: Table, layout: TableLayout) -> Iterator[blocks.Text]:
    """Yield a line about the columns that are left out, if there are any."""
    if not layout.left_out:
        return
    columns = [table.columns[index] for index in layout.left_out]
    names = ", ".join(column.called or column.header for column in columns)
    it = "it" if len(columns) == 1 else "them"
    how = blocks.advice(f"-v or a wider terminal shows {it}")
    yield blocks.text(Span(f"… left out: {names}", "dim"), how)


# --- the widths of text, by rich's tables


def _joined(row: Row) -> str:
    return "".join(piece.text for piece in row).rstrip(" ")


def _fitting(text: str, width: int) -> int:
    """Return the number of leading characters that fit in a number of columns."""
    if text.isascii():
        return min(len(text), width)
    kept = set_cell_size(text, width)
    # Half of a wide character is a blank, which the text does not have there.
    return len(kept) if text.startswith(kept) else len(kept) - 1


def cut(text: str, width: int, keeps: Side = "start") -> str:
    """
    Return a text that takes at most *width* columns.

    >>> cut("abcdef", 4), cut("abcdef", 4, "end"), cut("abc", 4), cut("abc", 0)
    ('abc…', '…def', 'abc', '')
    """
    taken = columns_of(text)
    if taken <= width:
        return text
    if width <= 0:
        return ""
    if keeps == "start":
        return text[: _fitting(text, width - 1)].rstrip(" ") + _CUT
    start = _fitting(text, taken - width + 1)
    while columns_of(text[start:]) >= width:
        start += 1
    return _CUT + text[start:]


def breaks(text: str, width: int, further: int) -> list[tuple[int, int]]:
    """
    Divide a line between words, if possible where two spaces are.

    rich breaks lines as well, but knows no fields.

    :param further: Columns of all lines but the first.
    :return: Start and end of each part, without the spaces between them.
    """
    parts = []
    start, room = 0, width
    while columns_of(text[start:]) > room:
        fits = max(_fitting(text[start:], room), 1)
        end = start + _end_of_words(text[start : start + fits + 1], fits)
        parts.append((start, end))
        start = end + len(text[end:]) - len(text[end:].lstrip(" "))
        room = further
    if start < len(text) or not parts:
        parts.append((start, len(text)))
    return parts


def _end_of_words(text: str, fits: int) -> int:
    """Return where to break a text of which only *fits* characters fit."""
    indent = len(text) - len(text.lstrip(" "))
    gap = text.rfind("  ", 0, fits + 1)
    if gap > max(indent, fits // 2):
        return len(text[:gap].rstrip(" "))
    space = text.rfind(" ", 0, fits + 1)
    return len(text[:space].rstrip(" ")) if space > indent else fits
