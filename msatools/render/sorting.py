# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sorts the rows of a table by a column as it is shown, whatever the command."""

import re
from collections.abc import Sequence

from msatools.render.blocks import Cell

_MARKED = re.compile(r"[~<>=?+]?(-?[\d,]+(?:\.\d+)?)\s*([A-Za-z%]*)(.*)")
_SCALES = {
    "": 1.0,
    "%": 1.0,
    **{unit: float(1 << 10 * n) for n, unit in enumerate(("KiB", "MiB", "GiB"), 1)},
    **{unit: float(1000**n) for n, unit in enumerate("KMGT", 1)},
    "TiB": float(1 << 40),
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_CLOCK = re.compile(r"\d+(?::\d\d)+(?:\.\d+)?")
_MISSING = float("-inf")


def cell_text(cell: Cell) -> str:
    """Return the text of a cell."""
    return cell if isinstance(cell, str) else cell.text


def sort_order(cells: Sequence[Cell], *, reverse: bool) -> list[int]:
    """Return the order of some cells: numbers the largest first, other texts by name.

    A cell without a value comes last.

    :param reverse: Whether the order is the other way round.
    """
    texts = [cell_text(cell).strip() for cell in cells]
    numbers = [number_in(text) for text in texts]
    shown = [text for text in texts if text not in ("", "-")]
    if shown and all(number_in(text) is not None for text in shown):
        known = [_MISSING if number is None else number for number in numbers]
        order = sorted(range(len(texts)), key=lambda n: known[n], reverse=not reverse)
    else:
        order = sorted(range(len(texts)), key=lambda n: texts[n], reverse=reverse)
    # What is missing is last either way; the sort keeps the order of equals.
    return sorted(order, key=lambda n: texts[n] in ("", "-"))


def number_in(text: str) -> float | None:
    """
    Return the number that a cell shows, in its unit's base; ``None`` if it has none.

    >>> number_in("1.5 MiB"), number_in("~2m03s"), number_in("0:01.50")
    (1572864.0, 123.0, 1.5)
    >>> number_in("4.1K"), number_in("<89.5"), number_in("1,024"), number_in("D")
    (4100.0, 89.5, 1024.0, None)
    """
    if _CLOCK.fullmatch(text):
        seconds = 0.0
        for part in text.split(":"):
            seconds = 60 * seconds + float(part)
        return seconds
    total, found = 0.0, False
    # A duration has several parts: 2m03s.
    while text and (matched := _MARKED.fullmatch(text)) is not None:
        number, unit, rest = matched.groups()
        if unit not in _SCALES:
            return None
        total += float(number.replace(",", "")) * _SCALES[unit]
        text, found = rest.strip(), True
        if not text[:1].isdigit():
            break
    return total if found and not text else None
