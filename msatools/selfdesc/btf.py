# SPDX-License-Identifier: LGPL-2.1-or-later

"""Parser of BTF, the type format that a kernel carries in its own memory.

Also comparison of types by layout, and rejection of impossible types.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from msatools.errors import DamagedDataError
from msatools.selfdesc.tables import (
    NAME_LEN,
    NONE,
    NoNameError,
    Words,
    at,
    index_names,
    library,
)

# --- Parser of BTF, the type format that a kernel carries in its own memory.
#
# The parser does no I/O: bytes in, records out. The format is described in the kernel's
# Documentation/bpf/btf.rst and include/uapi/linux/btf.h. A blob is not trusted: damage
# raises BtfError, at the latest when the damaged type is looked up.


MAGIC = 0xEB9F
MAX_BYTES = 1 << 28
"""Maximum size of a blob in bytes; Debian's 6.12 has one of 4.7 million."""

_HEADER = "HBBIIIII"
_MAX_TYPES = 1 << 24
"""Maximum number of types; Debian's 6.12 has 107,000."""


class BtfError(DamagedDataError):
    """The blob is not BTF, or it contradicts itself."""


class BtfKind(IntEnum):
    """``BTF_KIND_*`` of include/uapi/linux/btf.h."""

    VOID = 0
    INT = 1
    PTR = 2
    ARRAY = 3
    STRUCT = 4
    UNION = 5
    ENUM = 6
    FWD = 7
    TYPEDEF = 8
    VOLATILE = 9
    CONST = 10
    RESTRICT = 11
    FUNC = 12
    FUNC_PROTO = 13
    VAR = 14
    DATASEC = 15
    FLOAT = 16
    DECL_TAG = 17
    TYPE_TAG = 18
    ENUM64 = 19


# Number of words after a type's three common ones, by kind: a fixed number, and the
# number for each of the type's vlen entries.
_FIXED = {
    BtfKind.INT: 1,
    BtfKind.ARRAY: 3,
    BtfKind.VAR: 1,
    BtfKind.DECL_TAG: 1,
}
_PER_ENTRY = {
    BtfKind.STRUCT: 3,
    BtfKind.UNION: 3,
    BtfKind.ENUM: 2,
    BtfKind.ENUM64: 3,
    BtfKind.FUNC_PROTO: 2,
    BtfKind.DATASEC: 3,
}
_KIND_OF = tuple(BtfKind)
"""Each kind by its number. ``_walk()`` has rejected blobs with any other number."""

_KINDS = len(BtfKind)
_FIXED_WORDS = [3 + _FIXED.get(BtfKind(kind), 0) for kind in range(_KINDS)]
_FIXED_WORDS[BtfKind.VOID] = _MAX_TYPES * 4  # past any blob's end: VOID is no type
_ENTRY_WORDS = [_PER_ENTRY.get(BtfKind(kind), 0) for kind in range(_KINDS)]
# Up to Linux 7.0 there were 5 bits for the kind and 16 for the length; "bpf: Extend BTF
# UAPI vlen, kinds to use unused bits" (in v7.1) extended both by bits that were zero.
_KIND = 0x7F
_VLEN = 0xFFFFFF


class Int(NamedTuple):
    """A BTF_KIND_INT: size in bytes; offset and width in bits, for bit-fields only."""

    size: int
    is_signed: bool
    is_bool: bool
    offset: int
    bits: int


class Array(NamedTuple):
    """A BTF_KIND_ARRAY: the ID of its element type, and the number of elements."""

    type_id: int
    length: int


class Member(NamedTuple):
    """A member of a structure or union."""

    name: str
    type_id: int
    bit_offset: int
    bit_field_size: int
    """Bits of a bit-field; 0 for other members."""


class Enumerator(NamedTuple):
    """A constant of an enumeration, with its sign applied."""

    name: str
    value: int


class Parameter(NamedTuple):
    """A parameter of a function."""

    name: str
    type_id: int


class Btf:
    """The types of one blob, by ID and by name.

    A module's blob is split BTF: its IDs and string offsets continue those of the
    kernel's blob, its *base*.

    :param data: The blob.
    :param base: The kernel's BTF, for the blob of a module.
    :raises BtfError: if the header, the strings or the sequence of types is damaged
    """

    def __init__(self, data: bytes, base: "Btf | None" = None) -> None:
        self.base = base
        self.first_id = base.end_id if base else 1
        self._first_string = base.end_string if base else 0
        self.byteorder = _byteorder(data)
        types, self._strings = _sections(data, self.byteorder)
        self.end_string: int = self._first_string + len(self._strings)
        self._words = _words(types, self.byteorder)
        self._types = _walk(self._words)
        # array.array returns a single number faster than a numpy array does.
        self._positions = array("I", self._types.starts.tobytes())
        self.end_id: int = self.first_id + len(self._positions)
        # Enumerations have a sign flag since pahole 1.24 (Linux kernel commit
        # 6089fb325cf7 "bpf: Add btf enum64 support", in v6.0). A kernel always has some
        # signed ones: if none is flagged, pahole was older.
        self._has_enum_signs: bool = self._types.has_signed_enums() or bool(
            base and base._has_enum_signs
        )
        self._types_of: Callable[[str], list[int]] | None = None
        self._functions_of: Callable[[str], list[int]] | None = None
        self._enumerators_of: Callable[[str], list[int]] | None = None
        self._enumerations: npt.NDArray[np.intp]
        self._composed: bytes | None = None

    def kind(self, type_id: int) -> BtfKind:
        """Return the kind of a type."""
        return _KIND_OF[self._head(type_id)[1] >> 24 & _KIND]

    def name(self, type_id: int) -> str:
        """Return the name of a type; empty if it has none."""
        return self._string(self._head(type_id)[0])

    def size(self, type_id: int) -> int:
        """Return the size in bytes of an INT, FLOAT, STRUCT, UNION, ENUM or ENUM64."""
        return self._head(type_id)[2]

    def target(self, type_id: int) -> int:
        """Return the ID of the type that a PTR, TYPEDEF, qualifier or FUNC refers to.

        For a FUNC_PROTO, it is the return type.
        """
        return self._checked(self._head(type_id)[2])

    def is_union(self, type_id: int) -> bool:
        """Return whether a FWD declares a union, not a structure."""
        return bool(self._head(type_id)[1] >> 31)

    def as_int(self, type_id: int) -> Int:
        """Decode a BTF_KIND_INT."""
        (word,) = self._tail(type_id)
        encoding = word >> 24 & 0xF
        size = self.size(type_id)
        bits = word & 0xFF
        if not 0 < size <= 16 or bits > size * 8:
            raise BtfError(f"integer type {type_id} has {bits} bits in {size} bytes")
        return Int(
            size, bool(encoding & 1), bool(encoding & 4), word >> 16 & 0xFF, bits
        )

    def as_array(self, type_id: int) -> Array:
        """Decode a BTF_KIND_ARRAY."""
        element, _index, length = self._tail(type_id)
        return Array(self._checked(element), length)

    def members(self, type_id: int) -> Iterator[Member]:
        """Decode the members of a STRUCT or UNION, in their order."""
        has_bit_fields = self._head(type_id)[1] >> 31
        string, end = self._string, self.end_id
        for name, member_type, offset in self._entries(type_id, 3):
            if member_type >= end:
                self._checked(member_type)
            if has_bit_fields:
                yield Member(string(name), member_type, offset & 0xFFFFFF, offset >> 24)
            else:
                yield Member(string(name), member_type, offset, 0)

    def may_have_members(self, type_id: int) -> bool:
        """Return whether a type may be a STRUCT or UNION, or alias or array of one."""
        if type_id < self.first_id and self.base:
            return self.base.may_have_members(type_id)
        if self._composed is None:
            self._composed = _COMPOSED[self._types.kinds()].tobytes()
        return bool(self._composed[self._position(type_id)]) if type_id else False

    def member_types(self, type_id: int) -> Sequence[int]:
        """Return the type IDs of the members of a STRUCT or UNION, in their order.

        The IDs are not checked: a damaged one may be out of range.
        """
        return self._tail(type_id)[1::3]

    def is_signed_enum(self, type_id: int) -> bool:
        """Return whether the constants of an ENUM or ENUM64 are signed."""
        if self._has_enum_signs or self.kind(type_id) == BtfKind.ENUM64:
            return bool(self._head(type_id)[1] >> 31)
        return any(value >> 31 for _, value in self._entries(type_id, 2))

    def enumerators(self, type_id: int) -> Iterator[Enumerator]:
        """Decode the constants of an ENUM or ENUM64."""
        signed = self.is_signed_enum(type_id)
        if self.kind(type_id) == BtfKind.ENUM64:
            for name, low, high in self._entries(type_id, 3):
                yield Enumerator(
                    self._string(name), _signed(low | high << 32, 64, signed)
                )
        else:
            string = self._string
            for name, value in self._entries(type_id, 2):
                negative = signed and value >> 31
                yield Enumerator(string(name), value - (1 << 32) if negative else value)

    def is_value_told(self, type_id: int, value: int) -> bool:
        """Return whether *value*, decoded from an enumeration, is certain.

        Before ENUM64, values wider than 32 bits were silently truncated; and without
        the sign flag, a value with the highest bit set may be negative or not.
        """
        if self.kind(type_id) == BtfKind.ENUM64:
            return True
        return self.size(type_id) <= 4 and (self._has_enum_signs or value >= 0)

    def parameters(self, type_id: int) -> tuple[list[Parameter], bool]:
        """Decode a FUNC_PROTO: its parameters, and whether it is variadic."""
        entries = list(self._entries(type_id, 2))
        is_variadic = bool(entries) and entries[-1] == (0, 0)
        if is_variadic:
            entries.pop()
        return [
            Parameter(self._string(name), self._checked(parameter_type))
            for name, parameter_type in entries
        ], is_variadic

    def find(self, name: str, *kinds: BtfKind) -> list[int]:
        """Return the IDs of this blob's own types of a name and of one of *kinds*.

        FUNCs are not found; see :meth:`find_functions`.
        """
        if self._types_of is None:
            self._types_of = self._index(self._types.kinds() != BtfKind.FUNC)
        found = [self.first_id + row for row in self._types_of(name)]
        return [type_id for type_id in found if self.kind(type_id) in kinds]

    def find_functions(self, name: str) -> list[int]:
        """Return the IDs of the FUNCs of a name, without those of the base."""
        if self._functions_of is None:
            # Almost half of all types are FUNCs, and they are rarely looked up.
            self._functions_of = self._index(self._types.kinds() == BtfKind.FUNC)
        return [self.first_id + row for row in self._functions_of(name)]

    def find_enumerations(self, name: str) -> list[int]:
        """Return the IDs of the ENUMs and ENUM64s that have a constant of this name.

        Those of the base are not included.
        """
        if self._enumerators_of is None:
            names, self._enumerations = self._types.enumerators(self._words)
            self._enumerators_of = self._index_names(names)
        rows = self._enumerators_of(name)
        return [self.first_id + int(self._enumerations[row]) for row in rows]

    def of_kind(self, *kinds: BtfKind) -> Iterator[int]:
        """Yield the IDs of the types of these kinds, without those of the base."""
        for row in np.flatnonzero(np.isin(self._types.kinds(), kinds)):
            yield self.first_id + int(row)

    def unnamed(self, kind: BtfKind, members: list[str]) -> Iterator[int]:
        """Yield the IDs of the unnamed STRUCTs or UNIONs with exactly these members."""
        types = self._types
        wanted = (types.names == 0) & (types.kinds() == kind)
        wanted &= types.infos & _VLEN == len(members)
        for row in np.flatnonzero(wanted).tolist():
            type_id = self.first_id + row
            # Not len(): all() ends at the first member that differs.
            if all(
                self._string(offset) == name
                for (offset, _, _), name in zip(
                    self._entries(type_id, 3), members, strict=True
                )
            ):
                yield type_id

    def _index(self, wanted: npt.NDArray[np.bool_]) -> Callable[[str], list[int]]:
        """Return a function that finds the rows of *wanted* types by name."""
        names = self._types.names
        return self._index_names(np.where(wanted & (names != 0), names, NONE))

    def _index_names(self, offsets: Words) -> Callable[[str], list[int]]:
        text = self.base._strings + self._strings if self.base else self._strings
        try:
            return index_names(text, offsets.astype(np.uint32))
        except NoNameError as error:
            offset = int(offsets[error.args[0]])
            raise BtfError(f"there is no string at {offset}") from None

    def _head(self, type_id: int) -> tuple[int, int, int]:
        if type_id < self.first_id and self.base:
            return self.base._head(type_id)
        if type_id == 0:
            return 0, 0, 0
        words = self._words
        position = self._positions[self._position(type_id)]
        return words[position], words[position + 1], words[position + 2]

    def _tail(self, type_id: int) -> "array[int]":
        if type_id < self.first_id and self.base:
            return self.base._tail(type_id)
        index = self._position(type_id)
        start = self._positions[index] + 3
        end = (
            self._positions[index + 1]
            if index + 1 < len(self._positions)
            else len(self._words)
        )
        return self._words[start:end]

    def _entries(self, type_id: int, width: int) -> Iterator[tuple[int, ...]]:
        tail = iter(self._tail(type_id))
        return zip(*[tail] * width, strict=True)

    def _position(self, type_id: int) -> int:
        if not self.first_id <= type_id < self.end_id:
            raise BtfError(f"there is no type {type_id}")
        return type_id - self.first_id

    def _checked(self, type_id: int) -> int:
        if type_id >= self.end_id:
            raise BtfError(f"there is no type {type_id}")
        return type_id

    def _string(self, offset: int) -> str:
        if offset < self._first_string and self.base:
            return self.base._string(offset)
        start = offset - self._first_string
        end = self._strings.find(b"\0", start, start + NAME_LEN)
        if not 0 <= start <= end:
            raise BtfError(f"there is no string at {offset}")
        return self._strings[start:end].decode("utf-8", "backslashreplace")


def _byteorder(data: bytes) -> Literal["little", "big"]:
    if int.from_bytes(data[:2], "little") == MAGIC:
        return "little"
    if int.from_bytes(data[:2], "big") == MAGIC:
        return "big"
    raise BtfError("it does not start as BTF does")


def _sections(data: bytes, byteorder: str) -> tuple[memoryview, bytes]:
    """Split a blob into its types and its strings."""
    header = struct.Struct(("<" if byteorder == "little" else ">") + _HEADER)
    if len(data) < header.size:
        raise BtfError("its header is cut off")
    _, version, _, length, types, types_size, strings, strings_size = (
        header.unpack_from(data)
    )
    if version != 1:
        raise BtfError(f"its version is {version}, and only 1 is known")
    if length < header.size or types % 4 or types_size % 4:
        raise BtfError("its header contradicts itself")
    types += length
    strings += length
    if types + types_size > len(data) or strings + strings_size > len(data):
        raise BtfError("it is cut off")
    strings_data = data[strings : strings + strings_size]
    if strings_size and strings_data[-1]:
        raise BtfError("its last string has no end")
    return memoryview(data)[types : types + types_size], strings_data


def _words(types: memoryview, byteorder: str) -> "array[int]":
    words = array("I")
    assert words.itemsize == 4
    words.frombytes(types)
    if byteorder != sys.byteorder:
        words.byteswap()
    return words


class _Types(NamedTuple):
    """Columns of a table with one row per type of a blob."""

    starts: Words
    """Index of the type's first word."""

    names: Words
    """Offset of the type's name in the strings; 0 if it has none."""

    infos: Words
    """The type's second word: kind, flag and number of entries."""

    def kinds(self) -> Words:
        return (self.infos >> np.uint32(24)) & np.uint32(_KIND)

    def has_signed_enums(self) -> bool:
        """Return whether any enumeration has the sign flag."""
        return bool(((self.infos >> 31 != 0) & (self.kinds() == BtfKind.ENUM)).any())

    def enumerators(self, words: "array[int]") -> tuple[Words, npt.NDArray[np.intp]]:
        """Return the name's offset and the enumeration's row for each constant."""
        kinds = self.kinds()
        rows = np.flatnonzero((kinds == BtfKind.ENUM) | (kinds == BtfKind.ENUM64))
        counts = (self.infos[rows] & _VLEN).astype(np.int64)
        of_rows = np.repeat(rows, counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        nth = np.arange(len(of_rows)) - firsts
        width = np.where(kinds[of_rows] == BtfKind.ENUM, 2, 3)
        names = np.asarray(words)[self.starts[of_rows] + 3 + nth * width]
        return names, of_rows


def _walk(words: "array[int]") -> _Types:
    """Return the table of all types in the *words* of a blob.

    :raises BtfError: if a type is cut off, or of an unknown kind
    """
    loaded = library()
    if loaded is None:
        return _walk_in_python(words)
    here = np.asarray(words)
    columns = [np.empty(len(words) // 3 + 1, np.uint32) for _ in range(3)]
    fixed, entry = np.array(_FIXED_WORDS), np.array(_ENTRY_WORDS)
    count = loaded.msa_walk_btf(
        at(here), len(words), at(fixed), at(entry), _KINDS, *map(at, columns)
    )
    if count < 0:
        # The C function does not say what is wrong; this one raises an error that does.
        return _walk_in_python(words)
    return _checked_types(*(column[:count].copy() for column in columns))


def _walk_in_python(words: "array[int]") -> _Types:
    starts, names, infos = array("I"), array("I"), array("I")
    kind = position = 0
    end = len(words)
    try:
        while position < end:
            starts.append(position)
            info = words[position + 1]
            kind = info >> 24 & _KIND
            names.append(words[position])
            infos.append(info)
            position += _FIXED_WORDS[kind] + _ENTRY_WORDS[kind] * (info & _VLEN)
    except IndexError:
        raise BtfError(
            f"type {len(starts)} is cut off, or of kind {kind}, which is not known"
        ) from None
    if position != end:
        raise BtfError(f"type {len(starts)} is cut off")
    return _checked_types(*(np.asarray(column) for column in (starts, names, infos)))


def _checked_types(*columns: Any) -> _Types:
    types = _Types(*columns)
    if len(types.starts) > _MAX_TYPES:
        raise BtfError(f"it has {len(types.starts)} types")
    return types


def _signed(value: int, bits: int, is_signed: bool) -> int:
    return value - (1 << bits) if is_signed and value >> (bits - 1) else value


# --- Comparison of types by layout, and rejection of impossible types.
#
# Several types of one name may be the same, such as u8 declared twice, or different,
# such as struct irq_info of two drivers.


_TRANSPARENT = {
    BtfKind.TYPEDEF,
    BtfKind.CONST,
    BtfKind.VOLATILE,
    BtfKind.RESTRICT,
    BtfKind.TYPE_TAG,
}
_COMPOUND = {BtfKind.STRUCT, BtfKind.UNION}
_COMPOSED = np.isin(np.arange(_KIND + 1), [*_TRANSPARENT, *_COMPOUND, BtfKind.ARRAY])
"""Whether types of a kind may be a STRUCT or UNION, or an alias or array of one."""

_MAX_DEPTH = 32
"""Maximum nesting of types; C sources have about ten levels."""

_MAX_PARTS = 1 << 17
"""Maximum number of members of a structure, those of nested structures included; the
largest in Debian's 6.12 has 2,773."""

_MAX_PAIRS = 10_000
"""Maximum number of pairs of types in a comparison."""


def agree(btf: Btf, ids: list[int]) -> bool:
    """Return whether all these types have the same layout.

    Qualifiers and typedefs are ignored. The targets of pointers are compared by name,
    if they have one, to avoid a walk through all types.

    :raises BtfError: if a type is damaged
    """
    return all(_Comparison(btf).same(ids[0], other) for other in ids[1:])


def strip(btf: Btf, type_id: int) -> int:
    """Return the ID of the type behind typedefs, qualifiers and tags.

    :raises BtfError: if these form a cycle
    """
    for _ in range(_MAX_DEPTH):
        if btf.kind(type_id) not in _TRANSPARENT:
            return type_id
        type_id = btf.target(type_id)
    raise BtfError(f"type {type_id} has no end")


class MemberCounts:
    """Counts the members of structures, those of nested structures included.

    drgn searches all unnamed parts for a member, and all parts for an offset. Damaged
    BTF may nest unions so that there are too many parts to search.
    """

    def __init__(self, btf: Btf) -> None:
        self._btf = btf
        self._counts: dict[int, int] = {}
        # By the member's type: most members have one of a few types.
        self._parts: dict[int, int | None] = {}

    def check(self, type_id: int) -> None:
        """Check that a structure has few enough members to be searched.

        :raises BtfError: if it contains itself, or has more than :data:`_MAX_PARTS`
        """
        if self._count(type_id, 0) > _MAX_PARTS:
            raise BtfError(f"type {type_id} contains itself, or too many members")

    def _count(self, type_id: int, depth: int) -> int:
        """Return the number of members; any number above :data:`_MAX_PARTS` if more."""
        found = self._counts.get(type_id)
        if found is not None:
            return found
        if depth > _MAX_DEPTH:
            return _MAX_PARTS + 1
        total, parts = 0, self._parts
        # Where the members are decoded, an ID out of range raises BtfError again.
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
        # Where this member is decoded, the error is raised again.
        with suppress(BtfError):
            # A quick test first: most members are pointers and integers.
            if self._btf.may_have_members(member_type):
                part = _compound_in(self._btf, member_type)
        self._parts[member_type] = part
        return part


def _compound_in(btf: Btf, type_id: int) -> int | None:
    """Return the STRUCT or UNION that a type is, or is an array of; None if neither."""
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
