# SPDX-License-Identifier: LGPL-2.1-or-later

"""Fits the blocks of a report to a terminal.

A report that stays on the terminal has no more rows than the screen; one that is drawn
in place of the last has no more lines either.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from msgspec.structs import replace

from msatools.render.blocks import Block, Items, Table
from msatools.render.device import Device
from msatools.render.terminal import Drawing, Row

_PROMPT_LINES = 1


def drawn(blocks: Iterable[Block], device: Device) -> Iterator[str]:
    """Yield the lines of a report, with the codes for their styles."""
    drawing = Drawing(device)
    if device.height is not None:
        blocks = _limited(list(blocks), drawing, device.height)
    for block in blocks:
        yield from map(drawing.styled, drawing.lines(block))


def _limited(blocks: list[Block], drawing: Drawing, height: int) -> list[Block]:
    """Leave out the rows of tables, and other things, that the screen is too small for.

    If the other lines leave little room, half of the screen is used.
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
    """Return the number of lines of a table besides its rows, if not all are shown."""
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
    """Return a block with at most so many rows, or lines of items; at least one."""
    if isinstance(block, Items):
        ends = list(accumulate(_lengths(block, drawing)))
        fitting = max(sum(end <= most for end in ends), 1)
        left = max(block.more.left, 0) + len(block.items[fitting:])
        more = replace(block.more, left=left)
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
        # Rows that are not shown must not cost time, nor widen the columns.
        left_out += max(len(block.rows) - height, 0)
        shown = _first_rows(block, height)
        body, foot = drawing.table_lines(shown)
        parts += [list(body), foot]
    most = _most([len(part) for part in parts if part], height)
    fitting = [line for part in parts for line in part[:most]][:height]
    return fitting, left_out + sum(map(len, parts)) - len(fitting)


def _most(lengths: list[int], height: int) -> int:
    """Return the maximum lines of a block so that all blocks fit; at least one."""
    room, parts = height, len(lengths)
    for length in sorted(lengths):
        if length * parts > room:
            return max(room // parts, 1)
        room -= length
        parts -= 1
    return height
