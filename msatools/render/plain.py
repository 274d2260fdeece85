# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lays out blocks as lines in plain columns, of any width: for pipes and files.

:mod:`msatools.render.terminal` fits them to a terminal.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

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
    escape,
)
from msatools.render.table_layout import GAP

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
    if isinstance(cell, Advice):
        return cell
    return Span(escape(cell.text), cell.style)


def columns_of(text: str) -> int:
    """Return the number of terminal columns that a text takes.

    >>> columns_of("abc"), columns_of("日本"), columns_of("e\\u0301")
    (3, 4, 1)
    """
    # Almost all text is ASCII but for what is cut. In a pipe, rich is not imported.
    if text.isascii() or text.replace("…", "").isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


# --- tables


def _table(table: Table) -> Iterator[Line]:
    measured = MeasuredTable(table)
    row_line = RowLayout(table.columns, measured.widths)
    yield row_line(measured.headers, ["title"] * len(table.columns))
    for index, (texts, styles) in enumerate(measured.rows()):
        yield row_line(texts, styles)
        yield from map(spans, table.notes.get(index, ()))
    if table.more is not None:
        yield from map(spans, table.more.lines)


Styles = Sequence[Style | None]
"""The style of each cell of a row; empty if none has one."""

_SEPARATOR = "\x1f"


class MeasuredTable:
    """The texts of a table, and the widths of its columns if nothing is cut."""

    def __init__(self, table: Table) -> None:
        self.headers = [column.header for column in table.columns]
        self.widths = list(map(columns_of, self.headers))
        self._rows: list[tuple[str, Styles]] = []
        for row in table.rows:
            texts = _texts(row)
            styles = [None if isinstance(cell, str) else cell.style for cell in row]
            # The cells of a table with 40,000 rows take 100 MB, their texts a tenth.
            # Escaped texts do not contain the separator.
            joined = _SEPARATOR.join(texts)
            # There may be very many rows, most of them ASCII.
            measure = len if joined.isascii() else columns_of
            # A row may have fewer cells.
            self.widths[: len(texts)] = map(max, self.widths, map(measure, texts))
            self._rows.append((joined, styles if any(styles) else ()))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> Iterator[tuple[list[str], Styles]]:
        """Yield the cells of each row, one for each column."""
        width = len(self.widths)
        for joined, styles in self._rows:
            texts = joined.split(_SEPARATOR)
            missing = width - len(texts)
            yield texts + [""] * missing, styles and [*styles, *[None] * missing]


def _texts(row: Sequence[Cell]) -> list[str]:
    texts = [cell if isinstance(cell, str) else cell.text for cell in row]
    return texts if "".join(texts).isprintable() else list(map(escape, texts))


class RowLayout:
    """Puts the cells of a row beside each other; none is wider than its column."""

    def __init__(self, columns: Sequence[Column], widths: Sequence[int]) -> None:
        self._widths = widths
        self._are_right = [column.align == "right" for column in columns]
        fields = zip(self._are_right, widths, strict=True)
        self._format = GAP.join(
            f"{{:{'>' if is_right else '<'}{width}}}" for is_right, width in fields
        ).format

    def __call__(self, texts: Sequence[str], styles: Styles = ()) -> Line:
        """Return a row as a line."""
        if not styles:
            line = self._format(*texts)
            if line.isascii():
                # The usual case; there may be very many rows.
                return (Span(line),)
        gaps = [
            " " * (width - columns_of(text))
            for text, width in zip(texts, self._widths, strict=True)
        ]
        all_styles = styles or [None] * len(texts)
        pieces: list[Span] = []
        before = ""
        for text, style, gap, is_right in zip(
            texts, all_styles, gaps, self._are_right, strict=True
        ):
            if is_right:
                before += gap
            if style is None:
                before += text
            else:
                pieces += (Span(before), Span(text, style))
                before = ""
            before += GAP if is_right else gap + GAP
        return (*pieces, Span(before.rstrip(" ")))


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
