# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks in no more lines and columns than there are."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from msatools.render import plain
from msatools.render.blocks import Block, Span, Table, Text


def fit(
    blocks: Iterable[Block], width: int, height: int
) -> tuple[list[plain.Line], int]:
    """Lay out blocks in *height* lines: the longest ones lose their last lines first.

    Text goes on in the next line where it is wider than *width*; tables and trees,
    whose lines would look like others then, are left as wide as they are.

    :return: The lines, and how many more there would be.
    """
    parts = []
    left_out = 0
    for block in blocks:
        if isinstance(block, Table):
            # It may have very many rows: those that are not shown need no columns.
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
    """Split a line where it is too long."""
    part: list[Span] = []
    room = width
    for span in line:
        rest = span.text
        while len(rest) > room:
            # After a word, if one ends there.
            end = rest.rfind(" ", 0, room + 1) + 1 or room
            yield (*part, Span(rest[:end], span.style))
            part, rest, room = [], rest[end:], width
        part.append(Span(rest, span.style))
        room -= len(rest)
    yield tuple(part)


def _most(lengths: list[int], height: int) -> int:
    """Tell how many lines each block may have, so that all fit; one at least."""
    room, parts = height, len(lengths)
    for length in sorted(lengths):
        if length * parts > room:
            return max(room // parts, 1)
        room -= length
        parts -= 1
    return height
