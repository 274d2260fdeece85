# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where members and functions of one kernel are, looked up once each."""

import struct
from functools import lru_cache

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Reader
from msatools.kernel.strings import decode_string
from msatools.kernel.structs import find_member, find_offset
from msatools.target.addresses import START_KERNEL_MAP, kernel_start
from msatools.tasks.text import kernel_symbol

_WORD = struct.Struct("<Q")
_FORMATS = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}


class Layout:
    """Offsets in structures, and addresses of functions."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._prog = reader.prog
        self.kernel_start = kernel_start(reader.prog)
        self._offset = lru_cache(maxsize=None)(self._find_offset)
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
        offset = self._offset(type_name, members)
        if offset is None:
            raise LookupError(f"struct {type_name} has no {' or '.join(members)}")
        return offset

    def has(self, type_name: str, *members: str) -> bool:
        """Tell whether a structure has one of some members."""
        return self._offset(type_name, members) is not None

    def size(self, type_name: str) -> int:
        """Tell the size of a structure.

        :raises LookupError: if nothing tells the type
        """
        return self._size(type_name)

    def symbol(self, name: str) -> int | None:
        """Find a function or variable."""
        return self._symbol(name)

    def word(self, address: int) -> int:
        """Read a word.

        :raises drgn.FaultError: if it cannot be read
        """
        value: int = _WORD.unpack(self.reader.read(address, 8))[0]
        return value

    def member(self, address: int, type_name: str, *members: str, size: int = 8) -> int:
        """Read an unsigned member of a structure.

        :raises drgn.FaultError: if it cannot be read
        :raises LookupError: if the structure has none of the members
        """
        place = address + self.offset(type_name, *members)
        value: int = struct.unpack(_FORMATS[size], self.reader.read(place, size))[0]
        return value

    def members(
        self, address: int, type_name: str, *wanted: tuple[str, ...] | str
    ) -> list[int]:
        """Read words of a structure with one read; each by the names it may have.

        :raises drgn.FaultError: if they cannot be read
        :raises LookupError: if the structure lacks one
        """
        names = [(name,) if isinstance(name, str) else name for name in wanted]
        offsets = [self.offset(type_name, *members) for members in names]
        start = min(offsets)
        data = self.reader.read(address + start, max(offsets) + 8 - start)
        return [_WORD.unpack_from(data, offset - start)[0] for offset in offsets]

    def text(self, address: int, type_name: str, *members: str) -> str:
        """Read an array of characters in a structure.

        :raises drgn.FaultError: if it cannot be read
        :raises LookupError: if the structure has none of the members
        """
        member = find_member(self._type(type_name), members)
        if member is None:
            raise LookupError(f"struct {type_name} has no {' or '.join(members)}")
        place = address + member.address_
        return decode_string(self.reader.read(place, drgn.sizeof(member)))

    def _find_offset(self, type_name: str, members: tuple[str, ...]) -> int | None:
        try:
            return find_offset(self._type(type_name), members)
        except LookupError:
            return None

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
