# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks as plain text in columns of fixed width."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from msatools.render.blocks import Block, Cell, Column, Span, Table, Text, Tree, escape

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
    rows = [[_span(cell) for cell in row] for row in table.rows]
    widths = [
        max([len(column.header), *(len(r[i].text) for r in rows if i < len(r))])
        for i, column in enumerate(table.columns)
    ]
    header = [Span(column.header, "title") for column in table.columns]
    for row in [header, *rows]:
        yield tuple(_row(table.columns, widths, row))


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
