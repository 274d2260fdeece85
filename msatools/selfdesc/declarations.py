# SPDX-License-Identifier: LGPL-2.1-or-later

"""Declared types of variables, from a table, resolved for a given kernel."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from drgn import Type, TypeKind
from msgspec import Struct

from msatools.errors import MissingError
from msatools.selfdesc.find import member_of
from msatools.selfdesc.types import KEYWORDS, BtfTypes

_COUNTED = re.compile(r"(\d*)\*")
"""Length of an array that its room in memory says, a multiple of a number if any."""


class NotSoError(MissingError):
    """The condition of a declaration does not hold for this kernel."""


class Declaration(Struct, frozen=True):
    """One line of the table."""

    name: str
    element: str
    """The type in C, without array lengths."""

    lengths: tuple[str, ...] = ()
    """Array lengths, the outermost first: a number, an enumerator, ``type.member`` of
    an array as long, ``*`` or ``32*`` for what its room says, or empty."""

    condition: str = ""
    """A type, ``type.member``, enumerator or ``function()`` that must exist, or with
    ``!`` must not."""

    @property
    def multiple(self) -> int | None:
        """Number that divides the length, which is the one that fits the room.

        With 1, zeros at the end are no elements. ``None`` if the room does not say it.
        """
        found = _COUNTED.fullmatch(self.lengths[0]) if self.lengths else None
        return int(found[1] or 1) if found else None

    def resolve(self, types: BtfTypes) -> Type:
        """Build the type from those of this kernel, without a length that is counted.

        :raises MissingError: if the condition is not met, or the kernel lacks a part
        """
        if self.condition and not _holds(types, self.condition):
            raise NotSoError(f"it is not so that {self.condition}")
        members = re.fullmatch(r"struct \{(.*)\}", self.element)
        if members:
            made = types.find_anonymous(members[1].split())
        else:
            made = types.parse(self.element)
        for length in reversed(self.lengths):
            made = types.prog.array_type(made, *_length(types, length))
        return made


def _holds(types: BtfTypes, condition: str) -> bool:
    """Return whether a condition is met.

    :raises AmbiguousError: if that cannot be determined
    """
    negated = condition.startswith("!")
    type_name, _, member = condition.lstrip("!").partition(".")
    if type_name.endswith("()"):
        return (types.find_function(type_name[:-2]) is not None) != negated
    if " " not in type_name:
        return (types.find_constant(type_name) is not None) != negated
    keyword, _, name = type_name.partition(" ")
    found = types.find({KEYWORDS[keyword]}, name)
    exists = found is not None and (not member or found.has_member(member))
    return exists != negated


def _length(types: BtfTypes, length: str) -> tuple[int, ...]:
    if not length or _COUNTED.fullmatch(length):
        return ()
    if length.isdigit():
        return (int(length),)
    type_name, _, member = length.partition(".")
    if member:
        return _length_of_member(types, type_name, member)
    constant = types.find_constant(length)
    if constant is None:
        raise MissingError(f"BTF has no constant {length}")
    return (int(constant),)


def _length_of_member(types: BtfTypes, type_name: str, member: str) -> tuple[int, ...]:
    """Return the length of a member that is an array.

    :raises MissingError: if there is none, or it has no length
    """
    array = member_of(types.parse(type_name), member).type
    if array.kind != TypeKind.ARRAY or not array.length:
        raise MissingError(f"{type_name}.{member} is no array of a known length")
    return (array.length,)


class Declarations(Mapping[str, tuple[Declaration, ...]]):
    """Declarations by name of the variable.

    A line is parsed when its variable is looked up: a run needs few of them.

    :param text: Lines of ``type | name`` or ``type | name | condition``.
    :raises ValueError: if a line is malformed
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[str, list[list[str]]] = {}
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            fields = line.split(" | ")
            if not 2 <= len(fields) <= 3 or not all(fields):
                raise ValueError(f"not a declaration: {line}")
            self._lines.setdefault(fields[1], []).append(fields)

    def __getitem__(self, name: str) -> tuple[Declaration, ...]:
        return tuple(
            Declaration(
                name,
                type_name.partition("[")[0].strip(),
                tuple(re.findall(r"\[([\w .]*\*?)\]", type_name)),
                *condition,
            )
            for type_name, _, *condition in self._lines[name]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


FUNCTIONS = frozenset({"vmemmap_populate"})
"""Functions that older BTF (5.10) lacks, and whose type is not needed."""

_VARIABLES = Path(__file__).with_name("globals.txt")
"""The table; its format is described in the file."""

TABLE = Declarations(_VARIABLES.read_text("ascii"))
