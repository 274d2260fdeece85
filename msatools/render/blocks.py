# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks of a report, independent of the output device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["title", "good", "warn", "bad", "dim"]


@dataclass(frozen=True)
class Span:
    """Text in one style. Printers escape characters that are not printable."""

    text: str
    style: Style | None = None


@dataclass(frozen=True)
class Mark(Span):
    """Coloured signs; a printer without colours prints the text instead."""

    colour: str | None = None
    """``#rrggbb``."""

    signs: str = ""
    """Signs of one column each, as many as the text has characters."""


Cell = str | Span
"""A piece of text; a string has no style."""


@dataclass(frozen=True)
class Text:
    """One line; made by :func:`text`."""

    spans: tuple[Cell, ...]


def text(*spans: Cell) -> Text:
    """Return a line of pieces of text; an empty line if there are none."""
    return Text(spans)


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    header: str
    align: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class Table:
    """Rows under a line of headers; columns are as wide as needed."""

    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]
    """A cell for each column; a row may have fewer cells."""


@dataclass(frozen=True)
class Chart:
    """Lines with fixed columns: they are never wrapped."""

    rows: Sequence[tuple[Cell, ...]]


@dataclass(frozen=True)
class Tree:
    """A line with subordinate lines."""

    label: Cell
    children: tuple["Tree", ...] = ()


Block = Text | Table | Tree | Chart


def escape(text: str) -> str:
    """Return text from a dump as one line that is safe to print.

    Characters that are not printable become ``\\x1b``, ``\\u202e`` or ``\\U000e0001``:
    control characters, bidirectional overrides, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else _escaped(ord(character))
        for character in text
    )


def _escaped(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
