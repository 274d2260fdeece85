# SPDX-License-Identifier: LGPL-2.1-or-later

"""Members of structures and addresses of functions, each looked up once."""

import struct
from functools import lru_cache
from typing import NamedTuple

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Reader
from msatools.kernel.strings import decode_string
from msatools.kernel.structs import find_member, integer_format
from msatools.target.addresses import START_KERNEL_MAP, kernel_start
from msatools.tasks.text import kernel_symbol

_WORD = struct.Struct("<Q")


class _MemberBlock(NamedTuple):
    """Members of a structure that are read together."""

    start: int
    """Offset of the first."""

    size: int
    """Bytes from there to the end of the last."""

    values: tuple[tuple[struct.Struct, int], ...]
    """The format of each member, and its offset from *start*."""


class Layout:
    """Members of structures and their offsets, and addresses of functions."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._prog = reader.prog
        self.kernel_start = kernel_start(reader.prog)
        self._member = lru_cache(maxsize=None)(self._find_member)
        self._row = lru_cache(maxsize=None)(self._find_row)
        self._size = lru_cache(maxsize=None)(self._find_size)
        self._symbol = lru_cache(maxsize=None)(self._find_symbol)

    def data_pointers(self, words: npt.NDArray[np.uint64]) -> list[int]:
        """Return the words that may be addresses of data, each once, in their order."""
        data = words[
            (words >= np.uint64(self.kernel_start))
            & (words < np.uint64(START_KERNEL_MAP))
        ]
        return list(dict.fromkeys(data.tolist()))

    def offset(self, type_name: str, *members: str) -> int:
        """Find where a member is, by the first of some names that there is.

        :raises LookupError: if there is none, or no such type
        """
        return int(self._known(type_name, members).address_)

    def has(self, type_name: str, *members: str) -> bool:
        """Return whether a structure has one of some members."""
        return self._member(type_name, members) is not None

    def size(self, type_name: str) -> int:
        """Return the size of a structure.

        :raises LookupError: if the type is unknown
        """
        return self._size(type_name)

    def symbol(self, name: str) -> int | None:
        """Find a function or variable."""
        return self._symbol(name)

    def word(self, address: int) -> int:
        """Read a pointer, such as a node of a list has.

        :raises drgn.FaultError: if it cannot be read
        """
        value: int = _WORD.unpack(self.reader.read(address, 8))[0]
        return value

    def member(self, address: int, type_name: str, *members: str) -> int:
        """Read a member of a structure, as wide and with the sign that its type has.

        :param members: Names that it may have, the newest first. Of a structure or an
            array it is the first integer or pointer. ``atomic_long_t`` has a sign, even
            where the kernel keeps flags or a pointer in it.
        :raises drgn.FaultError: if it cannot be read
        :raises LookupError: if the structure has none of the members
        """
        return self._read(address, self._row(type_name, (members,)))[0]

    def members(
        self, address: int, type_name: str, *wanted: tuple[str, ...] | str
    ) -> tuple[int, ...]:
        """Read members of a structure with one read; each by the names it may have.

        :raises drgn.FaultError: if they cannot be read
        :raises LookupError: if the structure lacks one
        """
        return self._read(address, self._row(type_name, wanted))

    def _read(self, address: int, row: "_MemberBlock") -> tuple[int, ...]:
        data = self.reader.read(address + row.start, row.size)
        return tuple(value.unpack_from(data, at)[0] for value, at in row.values)

    def text(self, address: int, type_name: str, *members: str) -> str:
        """Read an array of characters in a structure.

        :raises drgn.FaultError: if it cannot be read
        :raises LookupError: if the structure has none of the members
        """
        member = self._known(type_name, members)
        place = address + member.address_
        return decode_string(self.reader.read(place, drgn.sizeof(member)))

    def _find_member(
        self, type_name: str, members: tuple[str, ...]
    ) -> drgn.Object | None:
        try:
            return find_member(self._type(type_name), members)
        except LookupError:
            return None

    def _known(self, type_name: str, members: tuple[str, ...]) -> drgn.Object:
        """Return a member of a structure at address 0."""
        member = self._member(type_name, members)
        if member is None:
            raise LookupError(f"struct {type_name} has no {' or '.join(members)}")
        return member

    def _find_row(
        self, type_name: str, wanted: tuple[tuple[str, ...] | str, ...]
    ) -> "_MemberBlock":
        places = []
        for names in wanted:
            candidates = (names,) if isinstance(names, str) else names
            member = self._known(type_name, candidates)
            places.append((integer_format(member), int(member.address_)))
        start = min(at for _, at in places)
        end = max(at + value.size for value, at in places)
        values = tuple((value, at - start) for value, at in places)
        return _MemberBlock(start, end - start, values)

    def _find_size(self, type_name: str) -> int:
        size: int = drgn.sizeof(self._type(type_name))
        return size

    def _type(self, type_name: str) -> drgn.Type:
        return self._prog.type(f"struct {type_name}")

    def _find_symbol(self, name: str) -> int | None:
        try:
            return kernel_symbol(self._prog, name)
        except LookupError:
            return None
