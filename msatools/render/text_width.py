# SPDX-License-Identifier: LGPL-2.1-or-later

"""The width of text on a terminal, and cutting text to a width."""

import unicodedata
from functools import lru_cache

from msatools.render.blocks import Side

_CUT = "…"


def columns_of(text: str) -> int:
    """Return the number of terminal columns that a text takes.

    >>> columns_of("abc"), columns_of("日本"), columns_of("e\\u0301")
    (3, 4, 1)
    """
    return len(text) if text.isascii() else sum(map(_columns_of, text))


@lru_cache(maxsize=1024)
def _columns_of(character: str) -> int:
    """Return the columns of a character: Unicode Standard Annex #11."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "FW" else 1


def fitting(text: str, width: int) -> int:
    """Return the number of leading characters that fit in a number of columns."""
    if text.isascii():
        return min(len(text), width)
    room = width
    for number, character in enumerate(text):
        room -= _columns_of(character)
        if room < 0:
            return number
    return len(text)


def cut(text: str, width: int, keeps: Side = "start") -> str:
    """
    Return a text that takes at most *width* columns.

    >>> cut("abcdef", 4), cut("abcdef", 4, "end"), cut("abc", 4), cut("abc", 0)
    ('abc…', '…def', 'abc', '')
    """
    if columns_of(text) <= width:
        return text
    if width <= 0:
        return ""
    if keeps == "end":
        # A mirrored text has the same widths.
        return _CUT + text[len(text) - fitting(text[::-1], width - 1) :]
    return text[: fitting(text, width - 1)].rstrip(" ") + _CUT


def breaks(text: str, width: int, further: int) -> list[tuple[int, int]]:
    """
    Divide a line between words, if possible where two spaces are.

    :param further: Columns of all lines but the first.
    :return: Start and end of each part, without the spaces between them.
    """
    parts = []
    start, room = 0, width
    while columns_of(text[start:]) > room:
        fits = max(fitting(text[start:], room), 1)
        end = start + _end_of_words(text[start : start + fits + 1], fits)
        parts.append((start, end))
        start = end + len(text[end:]) - len(text[end:].lstrip(" "))
        room = further
    if start < len(text) or not parts:
        parts.append((start, len(text)))
    return parts


def _end_of_words(text: str, fits: int) -> int:
    """Return where to break a text of which only *fits* characters fit."""
    indent = len(text) - len(text.lstrip(" "))
    gap = text.rfind("  ", 0, fits + 1)
    if gap > max(indent, fits // 2):
        return len(text[:gap].rstrip(" "))
    space = text.rfind(" ", 0, fits + 1)
    return len(text[:space].rstrip(" ")) if space > indent else fits
