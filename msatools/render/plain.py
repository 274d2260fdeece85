# SPDX-License-Identifier: LGPL-2.1-or-later

"""Prints blocks as plain text in columns of fixed width."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from msatools.render import plain
from msatools.render.blocks import (
    Block,
    Cell,
    Chart,
    Column,
    Mark,
    Span,
    Style,
    Table,
    Text,
    Tree,
    escape,
)

_GAP = "  "
_MISSING = Span("")

Line = tuple[Span, ...]
"""The pieces of one line, escaped and padded, from left to right."""


def show(blocks: Iterable[Block], out: TextIO) -> None:
    """Print blocks."""
    for block in blocks:
        write(lines(block), out)


def write(lines: Iterable[Line], out: TextIO) -> None:
    """Print lines without styles."""
    for line in lines:
        out.write("".join(span.text for span in line).rstrip() + "\n")


def lines(block: Block) -> Iterator[Line]:
    """Lay out a block; all printers of text use this."""
    if isinstance(block, Text):
        yield tuple(_span(cell) for cell in block.spans)
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Chart):
        yield from (tuple(map(_span, row)) for row in block.rows)
    else:
        yield from _tree(block, first="", rest="")


def _span(cell: Cell) -> Span:
    if isinstance(cell, str):
        return Span(escape(cell))
    if isinstance(cell, Mark):
        # The text of a mark does not come from a dump.
        return cell
    return Span(escape(cell.text), cell.style)


def _table(table: Table) -> Iterator[Line]:
    columns = table.columns
    widths = [len(column.header) for column in columns]
    rows = []
    for row in table.rows:
        texts = _texts(row)
        # A row may have fewer cells.
        widths[: len(texts)] = map(max, widths, map(len, texts))
        rows.append(_pack(row, texts))
    header = [Span(column.header, "title") for column in columns]
    yield tuple(_row(columns, widths, header))
    pattern = _GAP.join(map(_field, columns, widths))
    for joined, styles in rows:
        texts = joined.split(_SEPARATOR)
        if styles is None:
            # The usual case; there may be very many rows.
            missing = [""] * (len(columns) - len(texts))
            yield (Span(pattern.format(*texts, *missing)),)
        else:
            yield tuple(_row(columns, widths, list(map(Span, texts, styles))))


_SEPARATOR = "\x1f"
_Packed = tuple[str, tuple[Style | None, ...] | None]


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


def _row(
    columns: Sequence[Column], widths: Sequence[int], row: Sequence[Span]
) -> Iterator[Span]:
    for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
        span = row[i] if i < len(row) else _MISSING
        if i:
            yield Span(_GAP)
        padding = Span(" " * (width - len(span.text)))
        yield from (padding, span) if column.align == "right" else (span, padding)


def _tree(tree: Tree, first: str, rest: str) -> Iterator[Line]:
    yield Span(first, "dim"), _span(tree.label)
    for i, child in enumerate(tree.children, 1):
        is_last = i == len(tree.children)
        yield from _tree(
            child,
            first=rest + ("`- " if is_last else "|- "),
            rest=rest + ("   " if is_last else "|  "),
        )


def fit(
    blocks: Iterable[Block], width: int, height: int
) -> tuple[list[plain.Line], int]:
    """Lay out blocks in *height* lines; the longest blocks are cut first.

    Text wider than *width* is wrapped. Tables and trees are not, because wrapped parts
    would look like lines of their own.

    :return: The lines, and the number of lines left out.
    """
    parts = []
    left_out = 0
    for block in blocks:
        if isinstance(block, Table):
            # Rows that are not shown must not cost time, nor widen the columns.
            left_out += max(len(block.rows) - height, 0)
            block = replace(block, rows=block.rows[:height])
        lines = plain.lines(block)
        if isinstance(block, Text):
            lines = (part for line in lines for part in _folded(line, width))
        parts.append(list(lines))
    most = _most([len(part) for part in parts], height)
    fitting = [line for part in parts for line in part[:most]][:height]
    return fitting, left_out + sum(map(len, parts)) - len(fitting)


def _folded(line: plain.Line, width: int) -> Iterator[plain.Line]:
    """Split a line that is too long."""
    part: list[Span] = []
    room = width
    for span in line:
        rest = span.text
        while len(rest) > room:
            # Break after a word if possible.
            end = rest.rfind(" ", 0, room + 1) + 1 or room
            yield (*part, Span(rest[:end], span.style))
            part, rest, room = [], rest[end:], width
        part.append(Span(rest, span.style))
        room -= len(rest)
    yield tuple(part)


def _most(lengths: list[int], height: int) -> int:
    """Return the maximum lines of a block so that all blocks fit; at least one."""
    room, parts = height, len(lengths)
    for length in sorted(lengths):
        if length * parts > room:
            return max(room // parts, 1)
        room -= length
        parts -= 1
    return height
