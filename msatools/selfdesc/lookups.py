# SPDX-License-Identifier: LGPL-2.1-or-later

"""What was looked up in a kernel's types and symbols, for ``--self-check``.

A kernel that lacks a variable or a member is read another way, or not at all; on a
kernel that nobody tried, this list is the first thing to look at.
"""

import drgn
from msgspec import Struct, field

_KEY = "msatools.lookups"
"""Key of the program's cache."""


class Lookups(Struct):
    """Names that were looked up in one program."""

    variables_missing: set[str] = field(default_factory=set)
    members: dict[tuple[str, str], str | None] = field(default_factory=dict)
    """Maps a type and the newest name of a member to the name that was found."""


def lookups(prog: drgn.Program) -> Lookups:
    """Return what was looked up in a program so far."""
    found: Lookups = prog.cache.setdefault(_KEY, Lookups())
    return found


def note_member(
    type_: drgn.Type, candidates: tuple[str, ...], found: str | None
) -> None:
    """Note by which of its names, the newest first, a member was found."""
    if candidates:
        key = type_.type_name(), candidates[0]
        lookups(type_.prog).members[key] = found
