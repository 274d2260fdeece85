# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lays out blocks as lines in plain columns, of any width: for pipes and files.

:mod:`msatools.render.terminal` fits them to a terminal.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

from msatools.render.blocks import (
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
    escape,
)
from msatools.render.table_layout import GAP

MISSING = Span("")

Line = tuple[Span, ...]
"""The pieces of one line, escaped and padded, from left to right."""


def lines(block: Block) -> Iterator[Line]:
    """Lay out a block; nothing of it is left out or cut."""
    if isinstance(block, Text):
        yield spans(block)
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Items):
        yield from map(spans, chain(*block.items, block.more.lines))
    elif isinstance(block, Chart):
        for row in block.rows:
            yield tuple(map(span, row))
    else:
        yield from _tree(block, first="", rest="")


def spans(text: Text) -> Line:
    """Return the pieces of a text, escaped."""
    return tuple(map(span, text.spans))


def span(cell: Cell) -> Span:
    """Return a cell as an escaped span."""
    if isinstance(cell, str):
        return Span(escape(cell))
    if isinstance(cell, Mark):
        # The text of a mark does not come from a dump.
        return cell
    return Span(escape(cell.text), cell.style)


def columns_of(text: str) -> int:
    """Return the number of terminal columns that a text takes.

    >>> columns_of("abc"), columns_of("日本"), columns_of("e\\u0301")
    (3, 4, 1)
    """
    if text.isascii():
        return len(text)
    # Almost all text is ASCII, and rich is not imported in a pipe for nothing.
    from rich.cells import cell_len

    return cell_len(text)


# --- tables


def _table(table: Table) -> Iterator[Line]:
    measured = MeasuredTable(table)
    yield measured.header
    for index, line in enumerate(measured.lines()):
        yield line
        yield from map(spans, table.notes.get(index, ()))
    if table.more is not None:
        yield from map(spans, table.more.lines)


_SEPARATOR = "\x1f"
_Packed = tuple[str, tuple[Style | None, ...] | None]


class MeasuredTable:
    """The rows of a table, and the widths of its columns if nothing is cut."""

    def __init__(self, table: Table) -> None:
        self._columns = table.columns
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

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def header(self) -> Line:
        """The line of headers, if all columns are as wide as they need."""
        return row_line(self._columns, self.widths, header_spans(self._columns))

    def rows(self) -> Iterator[list[Span]]:
        """Yield the cells of each row; there may be fewer than columns."""
        for joined, styles in self._rows:
            texts = joined.split(_SEPARATOR)
            yield list(map(Span, texts, styles or [None] * len(texts)))

    def lines(self) -> Iterator[Line]:
        """Yield each row as a line, if all columns are as wide as they need."""
        pattern = GAP.join(map(_field, self._columns, self.widths))
        for joined, styles in self._rows:
            texts = joined.split(_SEPARATOR)
            if styles is None and joined.isascii():
                # The usual case; there may be very many rows.
                missing = [""] * (len(self._columns) - len(texts))
                yield (Span(pattern.format(*texts, *missing)),)
            else:
                row = list(map(Span, texts, styles or [None] * len(texts)))
                yield row_line(self._columns, self.widths, row)


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


def header_spans(columns: Sequence[Column]) -> list[Span]:
    """Return the headers of a table."""
    return [Span(column.header, "title") for column in columns]


def row_line(
    columns: Sequence[Column], widths: Sequence[int], row: Sequence[Span]
) -> Line:
    """Return a row as a line; its cells are not wider than their columns."""
    line: list[Span] = []
    cells = chain(row, repeat(MISSING))
    for column, width, cell in zip(columns, widths, cells, strict=False):
        if line:
            line.append(Span(GAP))
        padding = Span(" " * (width - columns_of(cell.text)))
        line += (padding, cell) if column.align == "right" else (cell, padding)
    return tuple(line)


# --- trees


def _tree(tree: Tree, first: str, rest: str) -> Iterator[Line]:
    """Yield each line of a tree."""
    yield Span(first, "dim"), span(tree.label)
    for i, child in enumerate(tree.children, 1):
        is_last = i == len(tree.children)
        yield from _tree(
            child,
            first=rest + ("`- " if is_last else "|- "),
            rest=rest + ("   " if is_last else "|  "),
        )
