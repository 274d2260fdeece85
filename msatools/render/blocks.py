# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks of a report (text, tables, trees, charts) and cells, for any device."""

import pwd
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal

from msgspec import Struct, field

from msatools.reports.units import count as short_count

# --- Blocks of a report, independent of the output device.


Style = Literal["title", "good", "warn", "bad", "dim"]


class Span(Struct, frozen=True):
    """Text in one style. Printers escape characters that are not printable."""

    text: str
    style: Style | None = None


class Advice(Span, frozen=True):
    """A hint at an option that shows more, with the punctuation before it.

    HTML pages leave it out, because they have no options.
    """


def advice(words: str, joint: str = ": ") -> Advice:
    """Return a hint such as ``-v shows them``, with *joint* before it."""
    return Advice(f"{joint}{words}", "dim")


class Mark(Span, frozen=True):
    """Signs in a colour; where they cannot be printed, the text is printed instead."""

    colour: str | None = None
    """``#rrggbb``."""

    signs: str = ""
    """Signs of one column each, as many as the text has characters."""


Cell = str | Span
"""A piece of text; a string has no style."""


class Text(Struct, frozen=True):
    """One line; made by :func:`line`, :func:`cut_line` or :func:`verbatim`."""

    spans: tuple[Cell, ...]

    narrow: Literal["flow", "cut", "keep"] = "flow"
    """How a line that is wider than the terminal is printed: ``flow`` wraps it, ``cut``
    cuts its end off (with -v, wraps it), ``keep`` prints it as it is."""

    hang: int | None = None
    """Indentation of wrapped lines, in columns; ``None`` for 2 more than the first."""


def term(name: str, width: int, meaning: str) -> Text:
    """Return a line of a list: a name in *width* columns, and what it means."""
    words = f"  {name:{width}}  {meaning}"
    return Text((words,), hang=len(words) - len(meaning))


def line(*spans: Cell) -> Text:
    """Return a line of pieces of text; an empty line if there are none."""
    return Text(spans)


def cut_line(*spans: Cell) -> Text:
    """Return a line that is cut, not wrapped, if too wide, such as a line of a tree."""
    return Text(spans, narrow="cut")


def verbatim(words: str) -> Text:
    """Return a line that is never cut or wrapped: input for another program."""
    return Text((words,), narrow="keep")


Side = Literal["start", "end"]


class Column(Struct, frozen=True):
    """A column of a table."""

    header: str
    align: Literal["left", "right"] = "left"

    worth: int | None = None
    """If a table is too wide, the column of least worth is left out first; of equal
    worth, the last one. ``None`` if the column is never left out."""

    least: int | None = None
    """If a table is too wide, cells are cut to this minimum width in characters before
    any column is left out. ``None`` if cells are never cut."""

    keeps: Side = "start"
    """The part of a cut cell that is kept; ``end`` for paths, whose end says more."""

    is_key: bool = False
    """Whether the column identifies a row. A table that must show all columns but is
    too wide is divided into parts below each other, each with the keys. The first
    column is a key if none is."""

    called: str | None = None
    """Name in the line on columns left out; ``None`` for the header."""


def free_text(
    header: str, worth: int | None = None, *, least: int = 16, keeps: Side = "start"
) -> Column:
    """Return a column for text of any length; see :attr:`Column.least`."""
    return Column(header, worth=worth, least=least, keeps=keeps)


class CellColumns(Sequence[Sequence[Cell]]):
    """Rows of a table, made by column and in batches because there may be very many."""

    @abstractmethod
    def batches(self) -> Iterator[Sequence[Sequence[Cell]]]:
        """Yield batches of rows, each as a sequence of cells for every column."""


class More(Struct, frozen=True):
    """The number of rows or items that a block leaves out."""

    what: str
    """Noun for a row or item, in the singular: ``row``."""

    left: int = 0
    """Number of rows that are left out; negative if there is room for more."""

    is_chosen: bool = False
    """Whether the user chose the number of rows; if not, the screen limits it."""

    names: Sequence[str] = ()
    """Names of the rows left out, if known; several may share a name."""

    @property
    def lines(self) -> tuple[Text, ...]:
        """The line about the rows that are left out, if there are any."""
        if self.left <= 0:
            return ()
        it, s = ("it", "") if self.left == 1 else ("them", "s")
        named = ", ".join(
            name if count == 1 else f"{count:,} {name}"
            for name, count in Counter(self.names).items()
        )
        which = f" ({named})" if named else ""
        words = Span(f"… {self.left:,} more {self.what}{s}{which}", "dim")
        return (line(words, advice(f"-n COUNT shows {it}")),)


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
    """Whether all columns are kept: the user chose them, or all are equally useful."""

    narrower: "Table | None" = None
    """The table to print instead if this one is too wide; ``None`` if there is none."""


class Items(Struct, frozen=True):
    """Items of one or more lines each; a screen shows as many as fit."""

    items: Sequence[Sequence[Text]]
    more: More
    names: Sequence[Sequence[str]] = ()
    """The names of each item, for :attr:`More.names` if the item is left out; an item
    may stand for several things. Empty if items have no names."""

    least: int = 1
    """How many items are shown even if the screen has no room for them."""


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


# --- Cells and lines that the reports of several commands share.


NOT_KEPT = "-"
"""A value that the kernel does not record, or that could not be read."""

ESTIMATE = "~"
UPPER = "<"
LOWER = ">"

BOUND_MARKS = {"exact": "", "upper": UPPER, "estimate": ESTIMATE, "lower": LOWER}
"""Maps the accuracy of a time to the mark before it."""

_BAD_STATES = frozenset("DZ")


def number_text(value: int | None) -> str:
    """Return a number, or ``-`` if it is unknown."""
    return NOT_KEPT if value is None else str(value)


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count and a noun in the singular or plural.

    :param many: The plural, if it is not the singular with an s.
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def share(ns: int, of_ns: int) -> str:
    """
    Return *ns* in percent of *of_ns*; ``-`` if that is not positive.

    >>> share(237, 1000), share(1, 10**6), share(3, 1)
    ('23.7', '0.0', '300')
    """
    if of_ns <= 0:
        return NOT_KEPT
    percent = 100 * ns / of_ns
    return f"{percent:.1f}" if percent < 99.95 else short_count(round(percent))


def user(uid: int | None, names: bool) -> str:
    """Return the name of a user if *names*, otherwise the number."""
    if uid is None:
        return NOT_KEPT
    return _user_name(uid) if names else str(uid)


@lru_cache(maxsize=1024)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def state_cell(state: str | None) -> Cell:
    """Return the cell for the state of a task."""
    if state is None:
        return NOT_KEPT
    return Span(state, "warn") if state in _BAD_STATES else state


def more(left: int, what: str) -> Iterator[Text]:
    """Yield a line with the number of rows left out, if there are any.

    Not for tables, which have :attr:`msatools.render.blocks.Table.more`.
    """
    yield from More(what, left).lines
