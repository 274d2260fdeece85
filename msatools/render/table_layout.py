# SPDX-License-Identifier: LGPL-2.1-or-later

"""Decides which columns of a table a terminal has room for, and how wide they are."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from msatools.render.blocks import Column

GAP = "  "

Part = Mapping[int, int]
"""The columns that stand beside each other: maps the index of each to its width."""


class TableLayout(Struct, frozen=True):
    """The columns to show."""

    parts: tuple[Part, ...]
    """Parts of the table, below each other; one unless all columns must be shown."""

    left_out: tuple[int, ...] = ()
    """Columns that are not shown."""


def lay_out(
    columns: Sequence[Column],
    natural: Sequence[int],
    width: int | None,
    *,
    keeps_all: bool,
) -> TableLayout:
    """
    Choose columns, and the width of each, so that a table is at most *width* wide.

    Long cells become shorter first, then the columns of least worth are left out. If
    only columns that are always shown are left, the table may be wider all the same.

    :param natural: Widths of the columns if nothing is cut.
    :param width: Columns of the terminal; ``None`` for no limit.
    :param keeps_all: Whether to divide the table rather than to leave columns out.
    """
    if width is None or _total(natural) <= width:
        return TableLayout((dict(enumerate(natural)),))
    least = [
        wide if column.least is None else min(wide, column.least)
        for column, wide in zip(columns, natural, strict=True)
    ]
    if keeps_all:
        divided = _divided(columns, least, width)
        return TableLayout(
            tuple(_widened(part, natural, least, width) for part in divided)
        )
    kept = list(range(len(columns)))
    for index in _by_worth(columns):
        if _total(least[i] for i in kept) <= width:
            break
        kept.remove(index)
    left_out = tuple(i for i in range(len(columns)) if i not in kept)
    return TableLayout((_widened(kept, natural, least, width),), left_out)


def _total(widths: Iterable[int]) -> int:
    all_widths = list(widths)
    return sum(all_widths) + len(GAP) * (len(all_widths) - 1)


def _by_worth(columns: Sequence[Column]) -> list[int]:
    """Return the columns that can be left out, in this order."""
    ranked = [
        (column.worth, -index)
        for index, column in enumerate(columns)
        if column.worth is not None
    ]
    return [-index for _, index in sorted(ranked)]


def _widened(
    part: Sequence[int], natural: Sequence[int], least: Sequence[int], width: int
) -> Part:
    """Divide the room that is left evenly among the columns that are cut."""
    room = max(width - _total(least[i] for i in part), 0)
    wanting = sorted((natural[i] - least[i], i) for i in part if natural[i] > least[i])
    widths = {i: least[i] for i in part}
    for number, (more, index) in enumerate(wanting):
        extra = min(more, room // (len(wanting) - number))
        widths[index] += extra
        room -= extra
    return widths


def _divided(
    columns: Sequence[Column], least: Sequence[int], width: int
) -> list[Sequence[int]]:
    """Divide the columns into parts, each of which has the keys."""
    keys = [i for i, column in enumerate(columns) if column.is_key] or [0]
    parts: list[list[int]] = [[]]
    for index in range(len(columns)):
        if index in keys:
            continue
        with_it = [*keys, *parts[-1], index]
        if parts[-1] and _total(least[i] for i in with_it) > width:
            parts.append([])
        parts[-1].append(index)
    return [sorted((*keys, *part)) for part in parts]
