# SPDX-License-Identifier: LGPL-2.1-or-later

"""Fits the blocks of a report to a terminal.

A report that stays on the terminal has no more rows than the screen; one that is drawn
in place of the last has no more lines either.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from msatools.render import plain
from msatools.render.blocks import Block, Items, Table
from msatools.render.device import Device

_PROMPT_LINES = 1


def laid_out(blocks: Iterable[Block], device: Device) -> Iterator[plain.Line]:
    """Yield the lines of a report."""
    if device.height is not None:
        blocks = _limited(list(blocks), device, device.height)
    for block in blocks:
        yield from plain.lines(block, device.width, full=device.full)


def _limited(blocks: list[Block], device: Device, height: int) -> list[Block]:
    """Leave out the rows of tables, and other things, that the screen is too small for.

    If the other lines leave little room, half of the screen is used.
    """
    lengths = []
    others = 0
    for block in blocks:
        if not _is_limited(block):
            laid = plain.lines(block, device.width, full=device.full)
            others += sum(1 for _ in laid)
        elif isinstance(block, Table):
            lengths.append(len(block.rows))
            others += _further_lines(block, device, height)
        elif isinstance(block, Items):
            lengths.append(sum(_lengths(block, device)))
            others += 1
    if not lengths:
        return blocks
    most = _most(lengths, max(height - _PROMPT_LINES - others, height // 2))
    return [
        _shortened(block, most, device) if _is_limited(block) else block
        for block in blocks
    ]


def _is_limited(block: Block) -> bool:
    if not isinstance(block, (Table, Items)) or block.more is None:
        return False
    return not block.more.is_chosen


def _further_lines(table: Table, device: Device, height: int) -> int:
    """Return the number of lines of a table besides its rows, if not all are shown."""
    more = replace(table.more, left=len(table.rows)) if table.more else None
    shown = replace(_first_rows(table, height), more=more)
    _, foot = plain.table_lines(shown, device.width, full=device.full)
    return 1 + sum(map(len, table.notes.values())) + len(foot)


def _lengths(block: Items, device: Device) -> list[int]:
    """Return the number of lines of each item."""
    return [
        sum(
            1
            for text in item
            for _ in plain.lines(text, device.width, full=device.full)
        )
        for item in block.items
    ]


def _shortened(block: Block, most: int, device: Device) -> Block:
    """Return a block with at most so many rows, or lines of items; at least one."""
    if isinstance(block, Items):
        ends = list(accumulate(_lengths(block, device)))
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
    blocks: Iterable[Block], width: int, height: int, *, full: bool = False
) -> tuple[list[plain.Line], int]:
    """Lay out blocks in *height* lines; the longest blocks are cut first.

    :return: The lines, and the number of lines left out.
    """
    parts: list[Sequence[plain.Line]] = []
    left_out = 0
    for block in blocks:
        if not isinstance(block, Table):
            parts.append(list(plain.lines(block, width, full=full)))
            continue
        # Rows that are not shown must not cost time, nor widen the columns.
        left_out += max(len(block.rows) - height, 0)
        shown = _first_rows(block, height)
        body, foot = plain.table_lines(shown, width, full=full)
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
