# SPDX-License-Identifier: LGPL-2.1-or-later

"""Members of many structures of one type, read in bulk; and values of enumerators."""

import struct
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import (
    DamagedDataError,
    MissingError,
    MissingMemberError,
    MissingSymbolError,
)
from msatools.kernel.reader import MAX_READ, Addresses, Reader, distinct
from msatools.kernel.report import LossLog, struct_key
from msatools.selfdesc.find import (
    drgn_lookups,
    find_constant,
    find_type,
    member_of,
    note_member,
    offset_of,
)

Booleans = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


class WordArray(Struct, frozen=True):
    """A member that is read whole as 64-bit words, such as a mask or list heads."""

    members: tuple[str, ...]
    """Names of the member, the newest first."""


Members = Mapping[str, tuple[str, ...] | WordArray]
"""Maps a column to the names of its member, the newest first.

The member's type determines the width and the sign of the column: see
:func:`column_type`.
"""


class Structs(Struct, frozen=True):
    """Members of many structures, one row for each requested address."""

    columns: Mapping[str, npt.NDArray[Any]]
    """Columns by name: zero in unreadable rows; absent if the kernel has no member."""

    readable: Booleans

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        """Return a column.

        :raises MissingMemberError: if the kernel has no such member
        """
        try:
            return self.columns[column]
        except KeyError:
            raise MissingMemberError(f"no structure has a {column}") from None

    def has(self, column: str) -> bool:
        """Return whether the kernel has the member of a column."""
        return column in self.columns


class Values(dict[str, Any]):
    """Members of one structure by column; those that the kernel lacks are absent."""

    def __missing__(self, column: str) -> Any:
        raise MissingMemberError(f"no structure has a {column}")


class Decoder:
    """Converts one record to Python integers, faster than numpy does."""

    def __init__(self, record: np.dtype[Any], names: Iterable[str]) -> None:
        """
        :param names: Integer fields of the record.
        :raises DamagedDataError: if the fields overlap, as those of damaged types do
        """
        fields = record.fields
        assert fields is not None
        ordered = sorted((fields[name][1], fields[name][0], name) for name in names)
        self.names = tuple(name for _, _, name in ordered)
        format_, end = "<", 0
        for offset, column, _ in ordered:
            if offset < end:
                raise DamagedDataError("members of a structure overlap")
            letter = _LETTERS[column.kind, column.itemsize]
            format_ += f"{offset - end}x{letter}"
            end = offset + column.itemsize
        self._unpack = struct.Struct(format_).unpack_from

    def __call__(self, data: bytes) -> Values:
        """Return the value of each column."""
        return Values(zip(self.names, self._unpack(data), strict=True))


_LETTERS = {
    ("i", 1): "b",
    ("i", 2): "h",
    ("i", 4): "i",
    ("i", 8): "q",
    ("u", 1): "B",
    ("u", 2): "H",
    ("u", 4): "I",
    ("u", 8): "Q",
}


_FORMATS = {kind: struct.Struct(f"<{letter}") for kind, letter in _LETTERS.items()}
_INTEGERS = (drgn.TypeKind.INT, drgn.TypeKind.BOOL, drgn.TypeKind.POINTER)
_WRAPPERS = (drgn.TypeKind.TYPEDEF, drgn.TypeKind.ENUM, drgn.TypeKind.ARRAY)


class StructLayout(Struct, frozen=True, dict=True):
    """The part of a structure from the first to the last of some members."""

    start: int
    """Offset of the part in the structure."""

    records: np.dtype[Any]
    """numpy type of the part: a structure with one field per column."""

    @property
    def end(self) -> int:
        """Offset of the end of the part in the structure."""
        return self.start + self.records.itemsize

    @cached_property
    def decode(self) -> Decoder:
        """Decoder of the part, if all members are integers."""
        return Decoder(self.records, self.records.names or ())


def read_structs(
    reader: Reader,
    type_name: str,
    members: Members,
    addresses: Addresses,
    losses: LossLog,
) -> Structs:
    """Read members of the structures at *addresses*, each structure once.

    Each unreadable structure is a loss (:func:`struct_key`). NULL is unreadable, but no
    loss.

    :raises MissingError: if the type is unknown
    """
    layout = struct_layout(reader, type_name, members)
    if layout is None:
        return Structs({}, np.zeros(len(addresses), np.bool_))
    unique, index = each_once(addresses)
    rows, readable = read_rows(reader, layout, unique)
    # NULL plus a member's offset may be readable, but is no structure.
    nulls = len(unique) - int(np.count_nonzero(unique))
    if nulls:
        readable[unique == 0] = False
        rows[unique == 0] = np.zeros(1, layout.records)
    lost = len(unique) - nulls - int(np.count_nonzero(readable))
    lose_many(losses, type_name, lost)
    columns = {name: rows[name][index] for name in layout.records.names or ()}
    return Structs(columns, readable[index])


def read_rows(
    reader: Reader, layout: StructLayout, addresses: Addresses
) -> tuple[npt.NDArray[Any], Booleans]:
    """Read the members of the structures at *addresses*; the caller counts losses.

    :return: One row per address, zero if unreadable, and whether it is readable.
    """
    size = layout.records.itemsize
    records, readable = reader.read_records(addresses + np.uint64(layout.start), size)
    return records.view(layout.records)[:, 0], readable


def read_bits(
    reader: Reader, type_name: str, member: str, addresses: Addresses
) -> Booleans:
    """Return a one-bit member of each structure.

    It is False if the kernel lacks the member, or the structure is unreadable.
    """
    bit_offset = reader.once(
        (type_name, member), lambda: _bit_offset(reader, type_name, member)
    )
    if bit_offset is None:
        return np.zeros(len(addresses), np.bool_)
    byte, bit = divmod(bit_offset, 8)
    records, _ = reader.read_records(addresses + np.uint64(byte), 1)
    bits: Booleans = (records[:, 0] >> bit & 1) != 0
    return bits


def _bit_offset(reader: Reader, type_name: str, member: str) -> int | None:
    try:
        return int(member_of(find_type(reader.prog, type_name), member).bit_offset)
    except MissingError:
        return None


def read_struct(
    reader: Reader, type_name: str, members: Members, address: int
) -> Values:
    """Read members of one structure, all integers, without the cost of arrays.

    :return: Python integers by column; absent if the kernel has no member.
    :raises drgn.FaultError: if it cannot be read, or is NULL
    :raises MissingError: if the type is unknown
    """
    layout = struct_layout(reader, type_name, members)
    if layout is None:
        return Values()
    if not address:
        raise drgn.FaultError(f"no {type_name}", address)
    return layout.decode(reader.read(address + layout.start, layout.records.itemsize))


def struct_layout(
    reader: Reader, type_name: str, members: Members
) -> StructLayout | None:
    """Find the layout of members, once per reader; ``None`` if none of them exists.

    :raises MissingError: if the type is unknown
    :raises DamagedDataError: if the members have impossible offsets or sizes
    """
    return reader.once(
        (type_name, tuple(members.items())),
        lambda: _find_layout(find_type(reader.prog, type_name), members),
    )


def _find_layout(type_: drgn.Type, members: Members) -> StructLayout | None:
    columns: dict[str, tuple[int, np.dtype[Any]]] = {}
    for name, wanted in members.items():
        member = find_member(type_, member_names(wanted))
        if member is None:
            continue
        if isinstance(wanted, WordArray):
            format_ = np.dtype((np.uint64, (_size_of(member) // 8,)))
        else:
            format_ = column_type(member)
        columns[name] = member.address_, format_
    if not columns:
        return None
    start = min(offset for offset, _ in columns.values())
    end = max(offset + format_.itemsize for offset, format_ in columns.values())
    if end - start > MAX_READ:
        raise DamagedDataError(f"members of {type_.type_name()} are far apart")
    records = np.dtype(
        {
            "names": list(columns),
            "formats": [format_ for _, format_ in columns.values()],
            "offsets": [offset - start for offset, _ in columns.values()],
            "itemsize": end - start,
        }
    )
    return StructLayout(start, records)


def _size_of(member: drgn.Object) -> int:
    """Return the size of a member in bytes.

    :raises DamagedDataError: if it exceeds :data:`.reader.MAX_READ`
    """
    size: int = drgn.sizeof(member.type_)
    if size > MAX_READ:
        raise DamagedDataError(f"a member of {size:,} bytes")
    return size


def member_names(wanted: tuple[str, ...] | WordArray) -> tuple[str, ...]:
    """Return the names that a column's member may have, the newest first."""
    return wanted.members if isinstance(wanted, WordArray) else wanted


def column_type(member: drgn.Object) -> np.dtype[Any]:
    """Return the numpy type that a member has in memory.

    An array of bytes is a string. For a structure or another array, return the type of
    the first integer or pointer in it.

    :raises MissingError: if it contains no integer, or a bit field first
    """
    type_ = member.type_
    while type_.kind == drgn.TypeKind.TYPEDEF:
        type_ = type_.type
    if type_.kind == drgn.TypeKind.ARRAY and drgn.sizeof(type_.type) == 1:
        return np.dtype((np.bytes_, _size_of(member)))
    return np.dtype(integer_format(member).format)


_FEW = 8
"""Number of addresses up to which a check that all differ is faster than sorting."""


def each_once(
    addresses: Addresses,
) -> tuple[Addresses, npt.NDArray[np.intp] | slice]:
    """Return the distinct addresses, and an index: ``distinct[index]`` are all."""
    if len(addresses) <= _FEW and len(set(addresses.tolist())) == len(addresses):
        return addresses, slice(None)
    found = distinct(addresses)
    return found, np.searchsorted(found, addresses)


def lose_many(losses: LossLog, type_name: str, count: int) -> None:
    """Count unreadable structures of a type as losses, with one note per type."""
    text = f"some {type_name} cannot be read"
    losses.lose(struct_key(type_name), text, count=count)


def find_member(type_: drgn.Type, candidates: tuple[str, ...]) -> drgn.Object | None:
    """Find a member by the first of some names that exists.

    :return: The member of a structure at address 0; ``None`` if not found.
    """
    structure = drgn.Object(type_.prog, type_, address=0)
    for member in candidates:
        try:
            with drgn_lookups:
                found = structure.subobject_(member)
        except (MissingError, TypeError):
            # No such member, or a part of one that is not a structure or array here.
            continue
        note_member(type_, candidates, member)
        return found
    note_member(type_, candidates, None)
    return None


def integer_format(member: drgn.Object) -> struct.Struct:
    """Return the format of an integer or a pointer: its width and sign.

    For a structure or an array, return the format of the first integer in it.

    :raises MissingError: if it contains no integer, or a bit field first
    """
    type_ = member.type_
    while type_.kind not in _INTEGERS:
        if type_.kind in (drgn.TypeKind.STRUCT, drgn.TypeKind.UNION) and type_.members:
            type_ = type_.members[0].type
        elif type_.kind in _WRAPPERS:
            type_ = type_.type
        else:
            raise MissingError(f"{member.type_.type_name()} is no integer")
    if member.bit_field_size_ is not None:
        raise MissingError(f"a bit field of {member.type_.type_name()}")
    is_signed = type_.kind == drgn.TypeKind.INT and type_.is_signed
    size = drgn.sizeof(type_)
    try:
        return _FORMATS["i" if is_signed else "u", size]
    except KeyError:
        name = member.type_.type_name()
        raise MissingError(f"{name} is an integer of {size} bytes") from None


def find_offset(type_: drgn.Type, candidates: tuple[str, ...]) -> int | None:
    """Find the offset in bytes of a member by the first of some names that exists.

    :return: ``None`` if none exists.
    """
    for member in candidates:
        try:
            offset: int = offset_of(type_, member)
        except (MissingError, TypeError):
            # No such member, or a part of one that is not a structure or array here.
            continue
        note_member(type_, candidates, member)
        return offset
    note_member(type_, candidates, None)
    return None


# --- Values of the kernel's enumerators, cached: some are looked up with each sample.


_ENUMS, _CONSTANTS = "msatools.enumerators", "msatools.constants"
"""Keys in ``prog.cache`` of the values that were looked up."""


class Enumerators(dict[str, int]):
    """Values of an enum by name."""

    def __missing__(self, name: str) -> int:
        raise MissingSymbolError(f"the kernel has no {name}")


def enumerators(prog: drgn.Program, name: str) -> Enumerators:
    """
    Return the values of an enum by name, in their order; none if it is incomplete.

    Indexing it with another name raises :class:`msatools.errors.MissingSymbolError`.

    Each enum is decoded once per program: drgn makes an object of each enumerator at
    every call, and some enums have hundreds.

    :param name: Such as ``enum vm_event_item``.
    :raises MissingError: if the type is unknown
    """
    known: dict[str, Enumerators] = prog.cache.setdefault(_ENUMS, {})
    if name not in known:
        values = {
            item.name: item.value for item in find_type(prog, name).enumerators or ()
        }
        known[name] = Enumerators(values)
    return known[name]


def constant(prog: drgn.Program, name: str) -> int:
    """
    Return the value of a constant, such as an enumerator.

    It is looked up once per program, which takes drgn some 20 us.

    :raises MissingError: if the kernel has no constant of that name
    """
    known: dict[str, int] = prog.cache.setdefault(_CONSTANTS, {})
    if name not in known:
        known[name] = int(find_constant(prog, name).value_())
    return known[name]


# --- Finds rows of a table by a column of unique values.


NOT_FOUND = -1


def find_rows(
    known: npt.NDArray[Any], wanted: npt.NDArray[Any]
) -> npt.NDArray[np.intp]:
    """
    Return the row in *known* of each wanted value; :data:`NOT_FOUND` if none.

    :param known: Unique values by row, in any order.
    """
    if not len(known):
        return np.full(len(wanted), NOT_FOUND, np.intp)
    if np.array_equal(known, wanted):
        return np.arange(len(known))
    order = np.argsort(known, kind="stable")
    index = np.searchsorted(known, wanted, sorter=order)
    row = order[np.minimum(index, len(known) - 1)]
    return np.where(known[row] == wanted, row, NOT_FOUND)


# --- Constants that no type has: the mapping of a page, and entries of swap.


MAPPING_ANON = 0b01
MAPPING_FLAGS = 0b11
"""PAGE_MAPPING_ANON and PAGE_MAPPING_FLAGS (include/linux/page-flags.h). With these
bits cleared, an anonymous page's ``mapping`` points at its ``struct anon_vma``."""

SWAP_TYPE_SHIFT = 58
"""Shift of the type in a swap entry (linux/swapops.h): 63 - 5 bits."""
