# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks of a report, independent of the output device."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

Style = Literal["title", "good", "warn", "bad", "dim"]


class Span(Struct, frozen=True):
    """Text in one style. Printers escape characters that are not printable."""

    text: str
    style: Style | None = None


class Advice(Span, frozen=True):
    """What to type to see more, and what joins it to the text before.

    A page, which has no options, leaves it out.
    """


def advice(words: str, joint: str = ": ") -> Advice:
    """Return what to type to see more: ``-v shows them``."""
    return Advice(f"{joint}{words}", "dim")


class Mark(Span, frozen=True):
    """Coloured signs; a printer without colours prints the text instead."""

    colour: str | None = None
    """``#rrggbb``."""

    signs: str = ""
    """Signs of one column each, as many as the text has characters."""


Cell = str | Span
"""A piece of text; a string has no style."""


class Text(Struct, frozen=True):
    """One line; made by :func:`text`, :func:`one_line` or :func:`verbatim`."""

    spans: tuple[Cell, ...]

    narrow: Literal["flow", "cut", "keep"] = "flow"
    """What becomes of a line that is wider than the terminal: it goes on in further
    lines; or its end is cut off, unless more detail is wanted; or nothing."""


def text(*spans: Cell) -> Text:
    """Return a line of pieces of text; an empty line if there are none."""
    return Text(spans)


def one_line(*spans: Cell) -> Text:
    """Return a line that is one of many, such as a line of a tree."""
    return Text(spans, narrow="cut")


def verbatim(line: str) -> Text:
    """Return a line for another program."""
    return Text((line,), narrow="keep")


Side = Literal["start", "end"]


class Column(Struct, frozen=True):
    """A column of a table."""

    header: str
    align: Literal["left", "right"] = "left"

    worth: int | None = None
    """Where a table is too wide, its columns of least worth are left out first, and of
    equal worth the last. ``None`` if the answer makes no sense without the column."""

    least: int | None = None
    """Where a table is too wide, long cells are cut to so many characters before any
    column is left out. ``None`` if a cell makes no sense without its end."""

    keeps: Side = "start"
    """The part of a cell that is kept: the end of a path says more than its start."""

    is_key: bool = False
    """Whether the column says what a row is about. If all columns of a table must be
    shown, they are put below each other, each part with the keys. The first column is
    a key if none is."""

    called: str | None = None
    """What the line about columns that are left out calls it, if not by its header."""


def free_text(
    header: str, worth: int | None = None, *, least: int = 16, keeps: Side = "start"
) -> Column:
    """Return a column of words of any length."""
    return Column(header, worth=worth, least=least, keeps=keeps)


class More(Struct, frozen=True):
    """How many rows, or other things, there are besides those that a block has."""

    what: str
    """What a row is, in the singular: ``row``."""

    left: int = 0
    """Number of rows that are left out; negative if there is room for more."""

    is_chosen: bool = False
    """Whether the user chose how many are shown; if not, the screen limits it."""

    @property
    def lines(self) -> tuple[Text, ...]:
        """The line about the rows that are left out, if there are any."""
        if self.left <= 0:
            return ()
        it, s = ("it", "") if self.left == 1 else ("them", "s")
        words = Span(f"… {self.left:,} more {self.what}{s}", "dim")
        return (text(words, advice(f"-n COUNT shows {it}")),)


class Table(Struct, frozen=True):
    """Rows under a line of headers; columns are as wide as needed, if they fit."""

    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]
    """A cell for each column; a row may have fewer cells."""

    more: More | None = None
    """``None`` if the table always has all rows."""

    notes: Mapping[int, Sequence[Text]] = field(default_factory=dict)
    """Lines below rows, by the index of the row."""

    keeps_all: bool = False
    """Whether no column is left out: the user chose them, or they are all alike."""

    narrower: "Table | None" = None
    """A table that says the same in fewer columns, where this is too wide."""


class Items(Struct, frozen=True):
    """Things of one line or several each, as many as a screen has room for."""

    items: Sequence[Sequence[Text]]
    more: More


class Chart(Struct, frozen=True):
    """Lines with fixed columns: they are never wrapped."""

    rows: Sequence[tuple[Cell, ...]]


class Tree(Struct, frozen=True):
    """A line with subordinate lines."""

    label: Cell
    children: tuple["Tree", ...] = ()


Block = Text | Table | Items | Tree | Chart


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
