# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks as plain text in columns of fixed width."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from msatools.render.blocks import (
    Block,
    Cell,
    Column,
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
    """Print lines, whatever the styles of their pieces."""
    for line in lines:
        out.write("".join(span.text for span in line).rstrip() + "\n")


def lines(block: Block) -> Iterator[Line]:
    """Lay out a block; every printer of text stands on this."""
    if isinstance(block, Text):
        yield tuple(_span(cell) for cell in block.spans)
    elif isinstance(block, Table):
        yield from _table(block)
    else:
        yield from _tree(block, first="", rest="")


def _span(cell: Cell) -> Span:
    if isinstance(cell, str):
        return Span(escape(cell))
    return Span(escape(cell.text), cell.style)


def _table(table: Table) -> Iterator[Line]:
    widths = [len(column.header) for column in table.columns]
    rows = []
    for row in table.rows:
        spans = [_span(cell) for cell in row]
        for i, span in enumerate(spans):
            widths[i] = max(widths[i], len(span.text))
        rows.append(_pack(spans))
    header = [Span(column.header, "title") for column in table.columns]
    yield tuple(_row(table.columns, widths, header))
    for packed in rows:
        yield tuple(_row(table.columns, widths, _unpack(packed)))


_SEPARATOR = "\x1f"
_Packed = tuple[str, tuple[Style | None, ...] | None]


def _pack(spans: Sequence[Span]) -> _Packed:
    """Keep a row in little room until all widths are known.

    Of a table with 40,000 rows the spans take 100 MB, their texts a tenth. What is
    escaped has no separators in it.
    """
    styles = tuple(span.style for span in spans)
    texts = _SEPARATOR.join(span.text for span in spans)
    return texts, styles if any(styles) else None


def _unpack(packed: _Packed) -> Sequence[Span]:
    texts, styles = packed
    if styles is None:
        return [Span(text) for text in texts.split(_SEPARATOR)]
    pairs = zip(texts.split(_SEPARATOR), styles, strict=True)
    return [Span(text, style) for text, style in pairs]


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
