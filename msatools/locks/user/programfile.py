# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of a program's or library's functions, by what the page cache has of its file.

ELF of 64 bits, little endian. The table of all symbols is found by section headers,
which mostly lie at the end of the file, and nobody reads as it runs; that of dynamic
symbols by what the dynamic linker needs, which has been read, and is in the memory of
each process that has loaded the file.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.strings import decode_string

_MAX_SYMBOL_BYTES = 16 << 20
"""700,000 symbols; where there are more, none is told."""

_MAX_NAME = 512
_MAX_HEADERS, _MAX_SECTIONS, _MAX_TAGS = 128, 4096, 256
_MAX_BUCKETS, _MAX_CHAIN = 1 << 20, 4096

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_TAG = struct.Struct("<QQ")
_HASH = struct.Struct("<IIII")
_MAGIC = b"\x7fELF\x02\x01"
_LOAD, _DYNAMIC = 1, 2
_SYMTAB = 2
_DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_GNU_HASH = 5, 6, 10, 0x6FFF_FEF5
_FUNCTIONS = (2, 10)
"""``STT_FUNC`` and ``STT_GNU_IFUNC``."""

_SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)

Read = Callable[[int, int], bytes]
"""Reads some bytes of the file from an offset on; a FaultError if they are lost."""

ReadMemory = Callable[[int, int], bytes | None]
"""Reads some bytes of a process that has loaded it; ``None`` if they are lost."""


class Function(NamedTuple):
    """A function that a place in a file is in."""

    name: str
    offset: int
    """How far behind its start."""


@dataclass(frozen=True)
class _Segment:
    """A part of the file that is loaded."""

    offset: int
    address: int
    size: int


@dataclass(frozen=True)
class _SymbolTable:
    """Symbols, and where their names are in the file."""

    symbols: npt.NDArray[np.void]
    names: int
    names_size: int


class ProgramFile:
    """The functions of one file."""

    def __init__(self, read: Read, read_around_gaps: Read) -> None:
        """
        :param read_around_gaps: The same with zeros for what is lost.
        """
        self._read = read
        self._read_around_gaps = read_around_gaps
        self._tables: list[_SymbolTable] | None = None

    def function(
        self, offset: int, place: int, read_memory: ReadMemory
    ) -> Function | None:
        """Find the function that a place in the file is in; ``None`` if none is known.

        :param offset: How far behind the start of the file.
        :param place: Where that is in the memory of a process.
        """
        try:
            address = self._address(offset)
        except drgn.FaultError:
            return None
        if address is None:
            return None
        if self._tables is None:
            self._tables = self._find_tables(place - address, read_memory)
        for table in self._tables:
            found = self._in_table(table, address)
            if found is not None:
                return found
        return None

    def _in_table(self, table: _SymbolTable, address: int) -> Function | None:
        symbols = table.symbols
        start, size = symbols["value"], symbols["size"]
        # What begins behind it is huge then.
        inside = np.uint64(address) - start < size
        inside &= np.isin(symbols["info"] & 0xF, _FUNCTIONS) & (symbols["section"] != 0)
        found = symbols[inside]
        names = [
            (name, address - int(symbol["value"]))
            for symbol in found[:_MAX_HEADERS]
            if (name := self._name(table, int(symbol["name"])))
        ]
        # The innermost; of several names the plainest.
        best = min(
            names, key=lambda each: (each[1], _is_inner(each[0]), each), default=None
        )
        return None if best is None else Function(*best)

    def _name(self, table: _SymbolTable, place: int) -> str | None:
        if not 0 < place < table.names_size:
            return None
        size = min(_MAX_NAME, table.names_size - place)
        data = self._read_around_gaps(table.names + place, size)
        name, end, _ = data.partition(b"\0")
        # Of a name at the edge of what is lost only a part may be known.
        try:
            self._read(table.names + place, len(name) + 1)
        except drgn.FaultError:
            return None
        return decode_string(name) if name and end else None

    # --- where things are in the file

    @cached_property
    def _header(self) -> tuple[int, ...] | None:
        values = _HEADER.unpack(self._read(0, _HEADER.size))
        if not values[0].startswith(_MAGIC) or values[9] != _SEGMENT.size:
            return None
        return values[1:]

    @cached_property
    def _segments(self) -> list[tuple[int, ...]]:
        """The program headers.

        :raises drgn.FaultError: if they are lost
        """
        if self._header is None:
            return []
        offset, count = self._header[4], self._header[9]
        data = self._read(offset, min(count, _MAX_HEADERS) * _SEGMENT.size)
        return list(_SEGMENT.iter_unpack(data))

    @cached_property
    def _loaded(self) -> list[_Segment]:
        return [
            _Segment(offset, address, size)
            for kind, _, offset, address, _, size, _, _ in self._segments
            if kind == _LOAD
        ]

    def _address(self, offset: int) -> int | None:
        for segment in self._loaded:
            if 0 <= offset - segment.offset < segment.size:
                return offset - segment.offset + segment.address
        return None

    def _offset(self, address: int) -> int | None:
        for segment in self._loaded:
            if 0 <= address - segment.address < segment.size:
                return address - segment.address + segment.offset
        return None

    # --- tables of symbols

    def _find_tables(self, moved: int, read_memory: ReadMemory) -> list[_SymbolTable]:
        """
        Find the tables that are there.

        :param moved: How far behind its addresses in the file all is in memory.
        """
        tables: list[_SymbolTable] = []
        with suppress(drgn.FaultError):
            tables.extend(self._all_symbols())
        with suppress(drgn.FaultError):
            tables.extend(self._dynamic_symbols(moved, read_memory))
        return tables

    def _table(
        self, offset: int, size: int, names: int, names_size: int
    ) -> _SymbolTable:
        data = self._read_around_gaps(
            offset, size // _SYMBOL.itemsize * _SYMBOL.itemsize
        )
        return _SymbolTable(np.frombuffer(data, _SYMBOL), names, names_size)

    def _all_symbols(self) -> Iterator[_SymbolTable]:
        """Find the table by section headers.

        :raises drgn.FaultError: if they are lost
        """
        if self._header is None:
            return
        offset, size, count = self._header[5], self._header[10], self._header[11]
        if not offset or size != _SECTION.size or not 0 < count <= _MAX_SECTIONS:
            return
        sections = list(_SECTION.iter_unpack(self._read(offset, count * size)))
        for _, kind, _, _, place, length, link, _, _, _ in sections:
            if kind == _SYMTAB and link < count and length <= _MAX_SYMBOL_BYTES:
                names = sections[link]
                yield self._table(place, length, names[4], names[5])

    def _dynamic_symbols(
        self, moved: int, read_memory: ReadMemory
    ) -> Iterator[_SymbolTable]:
        """Find the table by the dynamic segment, as it is in memory.

        :raises drgn.FaultError: if it is lost
        """
        for kind, _, _, address, _, size, _, _ in self._segments:
            if kind != _DYNAMIC:
                continue
            count = min(size // _TAG.size, _MAX_TAGS)
            data = read_memory(address + moved, count * _TAG.size)
            tags = dict(_TAG.iter_unpack(data or b""))
            # The dynamic linker mostly puts addresses in memory in place of the file's.
            symbols, names, hashes = (
                self._offset(tags.get(tag, 0) - moved) or self._offset(tags.get(tag, 0))
                for tag in (_DT_SYMTAB, _DT_STRTAB, _DT_GNU_HASH)
            )
            if symbols is None or names is None or hashes is None:
                continue
            size = self._hashed(hashes) * _SYMBOL.itemsize
            if 0 < size <= _MAX_SYMBOL_BYTES:
                yield self._table(symbols, size, names, tags.get(_DT_STRSZ, 0))

    def _hashed(self, offset: int) -> int:
        """Count the dynamic symbols, as their hash table ends with the last.

        :raises drgn.FaultError: if it is lost
        """
        header: tuple[int, ...] = _HASH.unpack(self._read(offset, _HASH.size))
        buckets, first, blooms, _ = header
        if not 0 < buckets <= _MAX_BUCKETS or blooms > _MAX_BUCKETS:
            return 0
        place = offset + _HASH.size + 8 * blooms
        last = max(np.frombuffer(self._read(place, 4 * buckets), "<u4").tolist())
        if last < first:
            return first
        chain = place + 4 * buckets
        for number in range(last, last + _MAX_CHAIN):
            word = self._read(chain + 4 * (number - first), 4)
            if word[0] & 1:
                return number + 1
        return 0


def _is_inner(name: str) -> int:
    """Return how much a name is one of a library's own: by its leading underscores."""
    return len(name) - len(name.lstrip("_"))
