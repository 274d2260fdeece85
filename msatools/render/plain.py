# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lays out blocks as lines, in columns of fixed width."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from msatools.render.blocks import (
    Advice,
    Block,
    Cell,
    Chart,
    Column,
    Items,
    Mark,
    Span,
    Style,
    Table,
    Text,
    Tree,
    advice,
    escape,
)
from msatools.render.table_layout import GAP, Part, TableLayout, lay_out
from msatools.render.text_width import breaks, columns_of, cut

_MISSING = Span("")

Line = tuple[Span, ...]
"""The pieces of one line, escaped and padded, from left to right."""


def lines(
    block: Block, width: int | None = None, *, full: bool = False
) -> Iterator[Line]:
    """
    Lay out a block; all printers of text use this.

    :param width: Columns of the terminal; ``None`` for no limit.
    :param full: Whether to show all columns, and the ends of lines in further lines.
    """
    if isinstance(block, Text):
        yield from _text(block, width, full)
    elif isinstance(block, Table):
        body, foot = table_lines(block, width, full=full)
        yield from body
        yield from foot
    elif isinstance(block, Items):
        texts = chain(*block.items, block.more.lines)
        yield from (line for text in texts for line in _text(text, width, full))
    elif isinstance(block, Chart):
        for row in block.rows:
            yield clipped(tuple(map(_span, row)), width)
    else:
        for line, rest in _tree(block, first="", rest=""):
            yield from _flowing(line, width, rest) if full else (clipped(line, width),)


def _span(cell: Cell) -> Span:
    if isinstance(cell, str):
        return Span(escape(cell))
    if isinstance(cell, Mark):
        # The text of a mark does not come from a dump.
        return cell
    if isinstance(cell, Advice):
        return cell
    return Span(escape(cell.text), cell.style)


# --- lines that are too wide


_HANG = "  "
"""Indentation of further lines of a text, in addition to its own."""

_NARROWEST = 20
"""Minimum columns of a terminal on which further lines are indented."""


def _text(text: Text, width: int | None, full: bool) -> Iterator[Line]:
    line = tuple(_span(cell) for cell in text.spans)
    if text.narrow == "keep":
        yield line
    elif text.narrow == "cut" and not full:
        yield clipped(line, width)
    else:
        joined = _joined(line)
        indent = len(joined) - len(joined.lstrip(" "))
        yield from _flowing(line, width, joined[:indent])


def _joined(line: Line) -> str:
    return "".join(span.text for span in line)


def clipped(line: Line, width: int | None) -> Line:
    """Return a line without what is beyond the terminal's width."""
    if width is None or columns_of(joined := _joined(line).rstrip()) <= width:
        return line
    kept = cut(joined, width)
    return (*_slice(line, 0, len(kept) - 1), Span(kept[-1:], "dim"))


def _flowing(line: Line, width: int | None, rest: str) -> Iterator[Line]:
    """Yield a line that is too wide as several.

    :param rest: Begins the further lines, before their indentation.
    """
    if width is None or columns_of(joined := _joined(line).rstrip()) <= width:
        yield line
        return
    hang = rest + _HANG
    if len(hang) > width - _NARROWEST:
        hang = ""
    for number, (start, end) in enumerate(breaks(joined, width, width - len(hang))):
        part = _slice(line, start, end)
        yield (Span(hang, "dim"), *part) if number and hang else part


def _slice(line: Line, start: int, end: int) -> Line:
    """Return the characters of a line from *start* to *end*."""
    found: list[Span] = []
    at = 0
    for span in line:
        first, last = max(start - at, 0), min(end - at, len(span.text))
        at += len(span.text)
        if first < last:
            found.append(_shortened(span, first, last))
    return tuple(found)


def _shortened(span: Span, first: int, last: int) -> Span:
    text = span.text[first:last]
    if isinstance(span, Mark):
        return replace(span, text=text, signs=span.signs[first:last])
    return replace(span, text=text)


# --- tables


def table_lines(
    table: Table, width: int | None, *, full: bool
) -> tuple[Iterator[Line], list[Line]]:
    """Return the lines of a table: header and rows, and those about what is missing."""
    keeps_all = full or table.keeps_all
    measured = _Measured(table)
    layout = lay_out(table.columns, measured.widths, width, keeps_all=keeps_all)
    is_whole = not layout.left_out and len(layout.parts) == 1
    if table.narrower is not None and not is_whole and not keeps_all:
        narrower = replace(table.narrower, more=table.more)
        return table_lines(narrower, width, full=full)
    foot = list(table.more.lines) if table.more is not None else []
    if layout.left_out:
        columns = [table.columns[index] for index in layout.left_out]
        names = ", ".join(column.called or column.header for column in columns)
        them = "it" if len(layout.left_out) == 1 else "them"
        how = advice(f"-v or a wider terminal shows {them}")
        foot.append(Text((Span(f"… left out: {names}", "dim"), how)))
    foot_lines = [line for text in foot for line in _text(text, width, full)]
    return measured.lines(layout, width, full), foot_lines


_SEPARATOR = "\x1f"
_Packed = tuple[str, tuple[Style | None, ...] | None]


class _Measured:
    """A table, and the widths of its columns if nothing is cut."""

    def __init__(self, table: Table) -> None:
        self._columns = table.columns
        self._notes = table.notes
        self._rows: list[_Packed] = []
        self.widths = [columns_of(column.header) for column in table.columns]
        for row in table.rows:
            texts = _texts(row)
            packed = _pack(row, texts)
            # There may be very many rows, most of them ASCII.
            measure = len if packed[0].isascii() else columns_of
            # A row may have fewer cells.
            self.widths[: len(texts)] = map(max, self.widths, map(measure, texts))
            self._rows.append(packed)

    def lines(
        self, layout: TableLayout, width: int | None, full: bool
    ) -> Iterator[Line]:
        """Yield the header and the rows, of each part after the other."""
        header = [Span(column.header, "title") for column in self._columns]
        for number, part in enumerate(layout.parts):
            if number:
                yield ()
            yield clipped(tuple(_row(self._columns, part, header)), width)
            for index, row_lines in enumerate(self._part(part, full)):
                for line in row_lines:
                    yield clipped(line, width)
                for note in self._notes.get(index, ()) if not number else ():
                    yield from _text(note, width, full)

    def _part(self, part: Part, full: bool) -> Iterator[Sequence[Line]]:
        """Yield each row, of several lines if cells are shown in full."""
        is_all = [*part.values()] == self.widths
        pattern = GAP.join(map(_field, self._columns, self.widths))
        for joined, styles in self._rows:
            texts = joined.split(_SEPARATOR)
            if styles is None and is_all and joined.isascii():
                # The usual case; there may be very many rows.
                missing = [""] * (len(self._columns) - len(texts))
                yield ((Span(pattern.format(*texts, *missing)),),)
                continue
            spans = list(map(Span, texts, styles or [None] * len(texts)))
            below = _folded(spans, part) if full else [spans]
            yield [tuple(_row(self._columns, part, row)) for row in below]


def _folded(row: Sequence[Span], part: Part) -> Sequence[Sequence[Span]]:
    """Divide cells that are too wide among rows below each other."""
    cells = [
        [
            Span(span.text[start:end], span.style)
            for start, end in breaks(span.text, part[index], part[index])
        ]
        if index in part
        else [_MISSING]
        for index, span in enumerate(row)
    ]
    return list(zip_longest(*cells, fillvalue=_MISSING))


def _texts(row: Sequence[Cell]) -> list[str]:
    texts = [cell if isinstance(cell, str) else cell.text for cell in row]
    return texts if "".join(texts).isprintable() else list(map(escape, texts))


def _pack(row: Sequence[Cell], texts: Sequence[str]) -> _Packed:
    """Pack a row until all widths are known.

    The spans of a table with 40,000 rows take 100 MB, their texts a tenth. Escaped
    texts do not contain the separator.
    """
    styles = tuple(None if isinstance(cell, str) else cell.style for cell in row)
    return _SEPARATOR.join(texts), styles if any(styles) else None


def _field(column: Column, width: int) -> str:
    """Return the field of a str.format() pattern for a column."""
    return f"{{:{'>' if column.align == 'right' else '<'}{width}}}"


def _row(columns: Sequence[Column], part: Part, row: Sequence[Span]) -> Iterator[Span]:
    for number, (index, width) in enumerate(part.items()):
        column, span = columns[index], row[index] if index < len(row) else _MISSING
        if number:
            yield Span(GAP)
        text = cut(span.text, width, column.keeps)
        padding = Span(" " * (width - columns_of(text)))
        shown = Span(text, span.style)
        yield from (padding, shown) if column.align == "right" else (shown, padding)


# --- trees


def _tree(tree: Tree, first: str, rest: str) -> Iterator[tuple[Line, str]]:
    """Yield each line of a tree, and what the lines below its label begin with."""
    yield (Span(first, "dim"), _span(tree.label)), rest
    for i, child in enumerate(tree.children, 1):
        is_last = i == len(tree.children)
        yield from _tree(
            child,
            first=rest + ("`- " if is_last else "|- "),
            rest=rest + ("   " if is_last else "|  "),
        )
