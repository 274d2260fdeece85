# SPDX-License-Identifier: LGPL-2.1-or-later

"""Cells and lines that the reports of several commands share."""

import pwd
from collections.abc import Iterator
from functools import lru_cache

from msatools.render.blocks import Cell, More, Span, Text
from msatools.reports.units import count as short_count

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
    Return a share of one CPU in percent.

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

    A table has its own: :attr:`msatools.render.blocks.Table.more`.
    """
    yield from More(what, left).lines
