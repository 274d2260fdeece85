# SPDX-License-Identifier: LGPL-2.1-or-later

"""Comparison of types by layout, and rejection of impossible types.

Several types of one name may be the same, such as ``u8`` declared twice, or different,
such as ``struct irq_info`` of two drivers.
"""

from contextlib import suppress

from msatools.selfdesc.btf import Btf, BtfError, BtfKind

_TRANSPARENT = {
    BtfKind.TYPEDEF,
    BtfKind.CONST,
    BtfKind.VOLATILE,
    BtfKind.RESTRICT,
    BtfKind.TYPE_TAG,
}
_COMPOUND = {BtfKind.STRUCT, BtfKind.UNION}
_MAX_DEPTH = 32
"""Maximum nesting of types; C sources have about ten levels."""

_MAX_PARTS = 1 << 17
"""Maximum number of members of a structure with all its parts: the largest in a Debian
6.12 has 2,773."""

_MAX_PAIRS = 10_000
"""Maximum number of pairs of types in a comparison."""


def agree(btf: Btf, ids: list[int]) -> bool:
    """Return whether all these types have the same layout.

    Qualifiers and typedefs are ignored. The targets of pointers are compared by name,
    if they have one, to avoid a walk through all types.

    :raises BtfError: if one is damaged
    """
    return all(_Comparison(btf).same(ids[0], other) for other in ids[1:])


def strip(btf: Btf, type_id: int) -> int:
    """Return the type without typedefs, qualifiers and tags.

    :raises BtfError: if they form a cycle
    """
    for _ in range(_MAX_DEPTH):
        if btf.kind(type_id) not in _TRANSPARENT:
            return type_id
        type_id = btf.target(type_id)
    raise BtfError(f"type {type_id} has no end")


class MemberCounts:
    """The number of members of structures, with all members of their parts.

    A member is looked for in all parts without a name, and an offset in all parts: a
    few unions of unions have more of them than can be searched.
    """

    def __init__(self, btf: Btf) -> None:
        self._btf = btf
        self._counts: dict[int, int] = {}
        # Most members have one of a few types.
        self._parts: dict[int, int | None] = {}

    def check(self, type_id: int) -> None:
        """Check that a structure can be searched.

        :raises BtfError: if it contains itself, or more than any structure does
        """
        if self._count(type_id, 0) > _MAX_PARTS:
            raise BtfError(f"type {type_id} contains itself, or too many members")

    def _count(self, type_id: int, depth: int) -> int:
        """Return the number, or more than :data:`_MAX_PARTS`."""
        found = self._counts.get(type_id)
        if found is not None:
            return found
        if depth > _MAX_DEPTH:
            return _MAX_PARTS + 1
        total, parts = 0, self._parts
        # A type that is not there is an error where the members are looked at.
        with suppress(BtfError):
            for member_type in self._btf.member_types(type_id):
                total += 1
                part = (
                    parts[member_type]
                    if member_type in parts
                    else self._part(member_type)
                )
                if part is not None:
                    total += self._count(part, depth + 1)
                    if total > _MAX_PARTS:
                        break
        self._counts[type_id] = total
        return total

    def _part(self, member_type: int) -> int | None:
        part = None
        # An error is raised again where this member is looked at.
        with suppress(BtfError):
            part = _compound_in(self._btf, member_type)
        self._parts[member_type] = part
        return part


def _compound_in(btf: Btf, type_id: int) -> int | None:
    """Return the structure or union that a member is, or is an array of, if any."""
    for _ in range(_MAX_DEPTH):
        kind = btf.kind(type_id)
        if kind in _COMPOUND:
            return type_id
        if kind in _TRANSPARENT:
            type_id = strip(btf, type_id)
        elif kind == BtfKind.ARRAY:
            type_id = btf.as_array(type_id).type_id
        else:
            return None
    raise BtfError(f"type {type_id} has no end")


class _Comparison:
    """A comparison of two types; each pair of parts is compared once."""

    def __init__(self, btf: Btf) -> None:
        self.btf = btf
        self.depth = 0
        self.seen: set[tuple[int, int]] = set()

    def same(self, one: int, other: int) -> bool:
        pair = one, other = strip(self.btf, one), strip(self.btf, other)
        if one == other or pair in self.seen:
            return True
        if self.depth > _MAX_DEPTH or len(self.seen) > _MAX_PAIRS:
            raise BtfError(f"type {one} has no end")
        self.seen.add(pair)
        self.depth += 1
        result = self.btf.kind(one) == self.btf.kind(other) and self._same_kind(*pair)
        self.depth -= 1
        return result

    def _same_kind(self, one: int, other: int) -> bool:
        btf = self.btf
        match btf.kind(one):
            case BtfKind.INT:
                return btf.as_int(one) == btf.as_int(other)
            case BtfKind.FLOAT:
                return btf.size(one) == btf.size(other)
            case BtfKind.PTR:
                return self._same_pointee(btf.target(one), btf.target(other))
            case BtfKind.ARRAY:
                array, other_array = btf.as_array(one), btf.as_array(other)
                return array.length == other_array.length and self.same(
                    array.type_id, other_array.type_id
                )
            case BtfKind.STRUCT | BtfKind.UNION:
                return (
                    btf.name(one) == btf.name(other)
                    and btf.size(one) == btf.size(other)
                    and self._same_members(one, other)
                )
            case BtfKind.ENUM | BtfKind.ENUM64:
                return btf.size(one) == btf.size(other) and list(
                    btf.enumerators(one)
                ) == list(btf.enumerators(other))
            case BtfKind.FUNC_PROTO:
                return self._same_prototype(one, other)
            case BtfKind.FUNC | BtfKind.VAR:
                return self.same(btf.target(one), btf.target(other))
            case BtfKind.FWD:
                return btf.name(one) == btf.name(other)
            case _:
                return False

    def _same_pointee(self, one: int, other: int) -> bool:
        one, other = strip(self.btf, one), strip(self.btf, other)
        if self.btf.name(one) or self.btf.name(other):
            return self.btf.name(one) == self.btf.name(other)
        return self.same(one, other)

    def _same_members(self, one: int, other: int) -> bool:
        members = list(self.btf.members(one))
        other_members = list(self.btf.members(other))
        return len(members) == len(other_members) and all(
            member._replace(type_id=0) == other_member._replace(type_id=0)
            and self.same(member.type_id, other_member.type_id)
            for member, other_member in zip(members, other_members, strict=True)
        )

    def _same_prototype(self, one: int, other: int) -> bool:
        parameters, is_variadic = self.btf.parameters(one)
        other_parameters, other_is_variadic = self.btf.parameters(other)
        return (
            is_variadic == other_is_variadic
            and len(parameters) == len(other_parameters)
            and self._same_pointee(self.btf.target(one), self.btf.target(other))
            and all(
                self.same(parameter.type_id, other_parameter.type_id)
                for parameter, other_parameter in zip(
                    parameters, other_parameters, strict=True
                )
            )
        )
