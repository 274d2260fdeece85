# SPDX-License-Identifier: LGPL-2.1-or-later

"""Draws blocks on a terminal with rich, and fits them to its width and height."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, zip_longest
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
    GAP,
    MeasuredTable,
    Part,
    RowLayout,
    Styles,
    TableLayout,
    columns_of,
    lay_out,
    span,
    spans,
)
from msatools.render.plain import lines as plain_lines

# --- Draws blocks on a terminal, with rich.
#
# This module adds to rich: choosing the columns to leave out (msatools.render.plain),
# breaking lines between fields, and tables of very many rows.
#
# rich parses no markup: it gets Text objects with escaped text.


MOST_DRAWN = 100
"""Maximum rows of a table that rich lays out, at 0.5 ms a row; longer tables get the
same lines from RowLayout, at 0.02 ms a row."""

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
"""Indentation of wrapped lines, in addition to that of the first line."""

_NARROWEST = 20
"""Minimum width of wrapped lines, in columns; if narrower, they are not indented."""

_CUT = "…"
_BAR_WIDTH = 20


class Drawing:
    """Draws blocks on a device with a width or colours.

    :param most_drawn: Maximum rows of a table that rich lays out.
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
        """Lay out a block as lines, fitted to the width if there is one."""
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
        """Return a progress bar as text with escape codes."""
        bar = ProgressBar(max(total, 1), done, _BAR_WIDTH)
        rows = self._console.render_lines(bar, self._options, pad=False)
        # Without colours, rich draws only the part that is done.
        return "".join(map(self.styled, rows))

    def styled(self, row: Row) -> str:
        """Return a line with escape codes for its styles, without trailing blanks."""
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
            # With 16 colours or fewer, letters distinguish more classes than signs.
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
            yield from self._flowing(row, text.hang)

    def clipped(self, row: Row) -> Row:
        """Return a line cut to the width of the terminal."""
        joined = _joined(row)
        if self._width is None or columns_of(joined) <= self._width:
            return row
        kept = len(cut(joined, self._width)) - len(_CUT)
        return [*self._slice(row, 0, kept), Segment(_CUT[: self._width], _DIM)]

    def _flowing(self, row: Row, indent: int | None = None) -> Iterator[Row]:
        """Yield a line, wrapped if it is too wide."""
        joined = _joined(row)
        if self._width is None or columns_of(joined) <= self._width:
            yield row
            return
        hang = joined[: len(joined) - len(joined.lstrip(" "))] + _HANG
        if indent is not None:
            hang = " " * indent
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
        """Return a table's header and rows, and lines on rows and columns left out."""
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
        """Yield the header and rows of each part, one part below the other."""
        for number, part in enumerate(layout.parts):
            if number:
                yield []
            # A part is wider than the terminal if its keys alone are.
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
        """Return the cells of a row, each as lines that fit the width of its column.

        Cells that are too wide are cut; with -v they are wrapped.
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
        """Return rich's tree, whose labels are cut if too wide; with -v wrapped."""
        piece = span(tree.label)
        label = _rich_text([piece.text], piece.style)
        label.no_wrap = not self._full
        label.overflow = "fold" if self._full else "ellipsis"
        branch = RichTree(label, guide_style="dim")
        branch.children = list(map(self._branch, tree.children))
        return branch


def console_of(device: Device, out: TextIO) -> Console:
    """Return a rich console with a device's size and colours that parses no markup."""
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
    # A rich Style caches its codes for the first colour system: hence *colours*.
    return Style(color=colour)


def _rich_text(below: Sequence[str], style: blocks.Style | None) -> RichText:
    """Return lines of one style, one below the other."""
    return RichText("\n".join(below), STYLES[style] or "")


def _width_of(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _left_out(table: Table, layout: TableLayout) -> Iterator[blocks.Text]:
    """Yield a line that lists the columns left out, if there are any."""
    if not layout.left_out:
        return
    columns = [table.columns[index] for index in layout.left_out]
    names = ", ".join(column.called or column.header for column in columns)
    it = "it" if len(columns) == 1 else "them"
    how = blocks.advice(f"-v or a wider terminal shows {it}")
    yield blocks.line(Span(f"… left out: {names}", "dim"), how)


# --- cutting and breaking text by its width in columns


def _joined(row: Row) -> str:
    return "".join(piece.text for piece in row).rstrip(" ")


def _fitting(text: str, width: int) -> int:
    """Return the number of leading characters that fit in *width* columns."""
    if text.isascii():
        return min(len(text), width)
    kept = set_cell_size(text, width)
    # rich replaces half of a wide character by a blank, which is not in the text.
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
    Divide a line between words, preferably at two spaces, which separate fields.

    rich breaks lines as well, but not by fields.

    :param width: Columns of the first part.
    :param further: Columns of each further part.
    :return: Start and end of each part, without the spaces between them.
    """
    parts = []
    start, room = 0, width
    while columns_of(text[start:]) > room:
        fits = max(_fitting(text[start:], room), 1)
        end = start + _end_of_words(text[start:], fits)
        parts.append((start, end))
        start = end + len(text[end:]) - len(text[end:].lstrip(" "))
        room = further
    if start < len(text) or not parts:
        parts.append((start, len(text)))
    return parts


def _end_of_words(text: str, fits: int) -> int:
    """Return the index at which to break a text: at most *fits*, between words."""
    indent = len(text) - len(text.lstrip(" "))
    gap = text.rfind("  ", 0, fits + 1)
    if gap > max(indent, fits // 2):
        return len(text[:gap].rstrip(" "))
    space = text.rfind(" ", 0, fits + 1)
    if space > indent and _is_glued(text, space):
        before = text.rfind(" ", 0, space)
        space = before if before > indent else space
    return len(text[:space].rstrip(" ")) if space > indent else fits


_UNIT = re.compile(r" ([KMGTPE]iB|%)(?!\w)")
_NUMBERED = re.compile(r"(^|\W)(pid|CPU|irq)$")
_ARGUMENT = re.compile(r" -n$")


def _is_glued(text: str, space: int) -> bool:
    """Return whether a line must not be broken at a space: in ``5 GiB``, ``pid 7`` or
    ``-n 7``."""
    if _UNIT.match(text, space):
        return text[space - 1].isdigit()
    before = text[:space]
    if _ARGUMENT.search(before):
        return True
    # A slice, because the space may be the last character.
    following = text[space + 1 : space + 2]
    return following.isdigit() and _NUMBERED.search(before) is not None


# --- Fits the blocks of a report to a terminal.
#
# A printed report (drawn()) has no more rows of tables and items than the screen; a
# live report (fit()), which replaces the last, has no more lines than the screen.


_PROMPT_LINES = 1


def drawn(blocks: Iterable[Block], device: Device) -> Iterator[str]:
    """Yield the lines of a report, with escape codes for their styles."""
    drawing = Drawing(device)
    if device.height is not None:
        blocks = _limited(list(blocks), drawing, device.height)
    for block in blocks:
        yield from map(drawing.styled, drawing.lines(block))


def _limited(blocks: list[Block], drawing: Drawing, height: int) -> list[Block]:
    """Leave out rows of tables and items for which the screen is too small.

    They get at least half of the screen, even if other lines leave less room.
    """
    lengths = []
    others = 0
    for block in blocks:
        if not _is_limited(block):
            others += _count(drawing.lines(block))
        elif isinstance(block, Table):
            lengths.append(len(block.rows))
            others += _further_lines(block, drawing, height)
        elif isinstance(block, Items):
            lengths.append(sum(_lengths(block, drawing)))
            others += 1
    if not lengths:
        return blocks
    most = _most(lengths, max(height - _PROMPT_LINES - others, height // 2))
    return [
        _shortened(block, most, drawing) if _is_limited(block) else block
        for block in blocks
    ]


def _is_limited(block: Block) -> bool:
    if not isinstance(block, (Table, Items)) or block.more is None:
        return False
    return not block.more.is_chosen


def _further_lines(table: Table, drawing: Drawing, height: int) -> int:
    """Return the number of a table's lines besides its rows, if rows are left out."""
    more = replace(table.more, left=len(table.rows)) if table.more else None
    shown = replace(_first_rows(table, height), more=more)
    _, foot = drawing.table_lines(shown)
    return 1 + sum(map(len, table.notes.values())) + len(foot)


def _lengths(block: Items, drawing: Drawing) -> list[int]:
    """Return the number of lines of each item."""
    return [sum(_count(drawing.lines(text)) for text in item) for item in block.items]


def _count(rows: Iterable[Row]) -> int:
    return sum(1 for _ in rows)


def _shortened(block: Block, most: int, drawing: Drawing) -> Block:
    """Return a block of at most *most* rows or lines, but at least Items.least."""
    if isinstance(block, Items):
        ends = list(accumulate(_lengths(block, drawing)))
        fitting = max(sum(end <= most for end in ends), block.least)
        names = [*chain.from_iterable(block.names[fitting:])]
        count = len(names) if block.names else len(block.items[fitting:])
        left = max(block.more.left, 0) + count
        more = replace(block.more, left=left, names=names)
        return replace(block, items=block.items[:fitting], more=more)
    if isinstance(block, Table) and block.more is not None:
        left = max(block.more.left, 0) + len(block.rows[most:])
        return replace(_first_rows(block, most), more=replace(block.more, left=left))
    return block


def _first_rows(table: Table, most: int) -> Table:
    narrower = table.narrower and _first_rows(table.narrower, most)
    return replace(table, rows=table.rows[:most], narrower=narrower)


def fit(
    blocks: Iterable[Block], drawing: Drawing, height: int
) -> tuple[list[Row], int]:
    """Lay out blocks in *height* lines; the longest blocks are cut first.

    :return: The lines, and the number of lines left out.
    """
    parts: list[Sequence[Row]] = []
    left_out = 0
    for block in blocks:
        if not isinstance(block, Table):
            parts.append(list(drawing.lines(block)))
            continue
        # Rows beyond the screen must not cost time, nor widen the columns.
        left_out += max(len(block.rows) - height, 0)
        shown = _first_rows(block, height)
        body, foot = drawing.table_lines(shown)
        parts += [list(body), foot]
    most = _most([len(part) for part in parts if part], height)
    fitting = [line for part in parts for line in part[:most]][:height]
    return fitting, left_out + sum(map(len, parts)) - len(fitting)


def _most(lengths: list[int], height: int) -> int:
    """Return the maximum lines of each block so that all blocks fit; at least 1."""
    room, parts = height, len(lengths)
    for length in sorted(lengths):
        if length * parts > room:
            return max(room // parts, 1)
        room -= length
        parts -= 1
    return height
