# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks of a report, independent of the output device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["title", "good", "warn", "bad", "dim"]


@dataclass(frozen=True)
class Span:
    """Text in one style. The text is data: printers escape what is not printable."""

    text: str
    style: Style | None = None


@dataclass(frozen=True)
class Mark(Span):
    """Signs in a colour; where a printer has no colours, the text stands for them."""

    colour: str | None = None
    """``#rrggbb``"""

    signs: str = ""
    """As many as the text has, of which each takes a column."""


Cell = str | Span
"""A piece of text; a string is one without a style."""


@dataclass(frozen=True)
class Text:
    """One line, written with :func:`text`."""

    spans: tuple[Cell, ...]


def text(*spans: Cell) -> Text:
    """Make a line of pieces of text; of none, an empty one."""
    return Text(spans)


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    header: str
    align: Literal["left", "right"] = "left"


@dataclass(frozen=True)
class Table:
    """Rows under a line of headers, as wide as they need to be."""

    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]
    """A cell for each column; a row may end early."""


@dataclass(frozen=True)
class Chart:
    """Lines whose columns are where they are: none is folded."""

    rows: Sequence[tuple[Cell, ...]]


@dataclass(frozen=True)
class Tree:
    """A line with others hanging from it."""

    label: Cell
    children: tuple["Tree", ...] = ()


Block = Text | Table | Tree | Chart


def escape(text: str) -> str:
    """Make text from a dump safe to print, and one line.

    What is not printable becomes ``\\x1b``, ``\\u202e`` or ``\\U000e0001``: control
    characters, those that turn the direction of writing, lone surrogates.
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
