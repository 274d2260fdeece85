# SPDX-License-Identifier: LGPL-2.1-or-later

"""Read the declared types of variables, and make them for a given kernel."""

import re
from dataclasses import dataclass

from drgn import Type

from msatools.selfdesc.globals import VARIABLES
from msatools.selfdesc.types import KEYWORDS, BtfTypes


class NotSoError(LookupError):
    """What a declaration presumes is not so of this kernel."""


@dataclass(frozen=True)
class Declaration:
    """One line of the table."""

    name: str
    element: str
    """The type, in C, without the lengths of arrays."""

    lengths: tuple[str, ...] = ()
    """Of arrays, the outermost first: a number, an enumerator, or empty for none."""

    condition: str = ""
    """A type, ``type.member`` or enumerator that must be there; ``!`` for must not."""

    def resolve(self, types: BtfTypes) -> Type:
        """Make the type, out of those that this kernel has.

        :raises LookupError: if the kernel does not have what the line is made of
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
    """Tell whether a condition is met.

    :raises AmbiguousError: if nothing tells: "not there" must not be taken from that
    """
    negated = condition.startswith("!")
    type_name, _, member = condition.lstrip("!").partition(".")
    if " " not in type_name:
        return (types.find_constant(type_name) is not None) != negated
    keyword, _, name = type_name.partition(" ")
    found = types.find({KEYWORDS[keyword]}, name)
    is_there = found is not None and (not member or found.has_member(member))
    return is_there != negated


def _length(types: BtfTypes, length: str) -> tuple[int, ...]:
    if not length:
        return ()
    if length.isdigit():
        return (int(length),)
    constant = types.find_constant(length)
    if constant is None:
        raise LookupError(f"BTF has no constant {length}")
    return (int(constant),)


def parse(text: str) -> dict[str, tuple[Declaration, ...]]:
    """Parse lines of ``type | name`` or ``type | name | condition``.

    :raises ValueError: if a line is none
    """
    table: dict[str, tuple[Declaration, ...]] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split("|")]
        if not 2 <= len(fields) <= 3 or not all(fields):
            raise ValueError(f"not a declaration: {line}")
        element, name, *condition = fields
        lengths = tuple(re.findall(r"\[(\w*)\]", element))
        declaration = Declaration(
            name, element.partition("[")[0].strip(), lengths, *condition
        )
        table[name] = (*table.get(name, ()), declaration)
    return table


FUNCTIONS = frozenset({"vmemmap_populate"})
"""Functions of which only the presence is asked, and which older BTF (5.10) lacks."""

TABLE = parse(VARIABLES)
