# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which rows of a command's reports ``--diff`` compares, and by which fields."""

from msgspec import Struct


class DiffRows(Struct, frozen=True, kw_only=True):
    """Fields to compare in the rows under one key of a report."""

    name: str
    """Key of the rows in the report."""

    by: tuple[str, ...]
    """Fields that identify a row in both reports."""

    counts: tuple[str, ...] = ()
    """Fields whose numeric change is shown, or for lists the change of their length;
    the most important first."""

    facts: tuple[str, ...] = ()
    """Other fields, shown with both values."""

    lived: str | None = None
    """Field with the age of the row's thing; a different start means another thing."""
