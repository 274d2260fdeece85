# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds functions of a program or library in those pages of its file that are cached.

The file is little-endian ELF64. The table of all symbols is found by section headers.
These are usually at the end of the file, which a running program does not read, so they
may be missing. The table of dynamic symbols is found by the dynamic segment, which the
dynamic linker has read, and which is in the memory of each process.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.strings import decode_string
from msatools.selfdesc.module_records import ELF64_SYM

_MAX_SYMBOL_BYTES = 16 << 20
"""Maximum size of a symbol table, 700,000 symbols; a larger one is not used."""

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

Read = Callable[[int, int], bytes]
"""Reads bytes of the file, by offset and size; raises FaultError if any is missing."""

ReadMemory = Callable[[int, int], bytes | None]
"""Reads memory of a process that has loaded the file, by address and size; returns
``None`` if any byte is missing."""


class Function(NamedTuple):
    """A function, and an offset in it."""

    name: str
    offset: int
    """Bytes from the start of the function."""


class _Segment(Struct, frozen=True):
    """A part of the file that is loaded."""

    offset: int
    address: int
    size: int


class _SymbolTable(Struct, frozen=True):
    """Symbols and their string table."""

    symbols: npt.NDArray[np.void]
    names: int
    """Offset of the string table in the file."""

    names_size: int


class ProgramFile:
    """The functions of one file."""

    def __init__(self, read: Read, read_around_gaps: Read) -> None:
        """
        :param read_around_gaps: Like *read*, with zeros in place of missing bytes.
        """
        self._read = read
        self._read_around_gaps = read_around_gaps
        self._tables: list[_SymbolTable] | None = None

    @property
    def has_symbols(self) -> bool:
        """Whether a table of symbols was found, once a function was asked for."""
        return bool(self._tables)

    def function(
        self, offset: int, loaded_at: int, read_memory: ReadMemory
    ) -> Function | None:
        """Find the function at an offset in the file; ``None`` if unknown.

        :param offset: Offset in the file.
        :param loaded_at: Address of that offset in the memory of a process.
        """
        try:
            address = self._address(offset)
        except UNREADABLE:
            return None
        if address is None:
            return None
        if self._tables is None:
            self._tables = self._find_tables(loaded_at - address, read_memory)
        for table in self._tables:
            found = self._in_table(table, address)
            if found is not None:
                return found
        return None

    def _in_table(self, table: _SymbolTable, address: int) -> Function | None:
        symbols = table.symbols
        start, size = symbols["value"], symbols["size"]
        # For a start after the address, the unsigned difference is huge.
        inside = np.uint64(address) - start < size
        inside &= np.isin(symbols["info"] & 0xF, _FUNCTIONS) & (symbols["section"] != 0)
        functions = [
            Function(name, address - int(symbol["value"]))
            for symbol in symbols[inside][:_MAX_HEADERS]
            if (name := self._name(table, int(symbol["name"])))
        ]
        return min(functions, key=_preference, default=None)

    def _name(self, table: _SymbolTable, offset: int) -> str | None:
        """Read a name; ``None`` also if a part of it is missing."""
        if not 0 < offset < table.names_size:
            return None
        size = min(_MAX_NAME, table.names_size - offset)
        data = self._read_around_gaps(table.names + offset, size)
        name, end, _ = data.partition(b"\0")
        # The zero may be that of a gap.
        try:
            self._read(table.names + offset, len(name) + 1)
        except UNREADABLE:
            return None
        return decode_string(name) if name and end else None

    # --- offsets and addresses

    @cached_property
    def _header(self) -> tuple[int, ...] | None:
        values = _HEADER.unpack(self._read(0, _HEADER.size))
        if not values[0].startswith(_MAGIC) or values[9] != _SEGMENT.size:
            return None
        return values[1:]

    @cached_property
    def _segments(self) -> list[tuple[int, ...]]:
        """The program headers.

        :raises drgn.FaultError: if they are not in the page cache
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

    # --- symbol tables

    def _find_tables(self, bias: int, read_memory: ReadMemory) -> list[_SymbolTable]:
        """
        Find the symbol tables that can be read.

        :param bias: Difference between addresses in memory and in the file.
        """
        tables: list[_SymbolTable] = []
        with suppress(*UNREADABLE):
            tables.extend(self._all_symbols())
        with suppress(*UNREADABLE):
            tables.extend(self._dynamic_symbols(bias, read_memory))
        return tables

    def _table(
        self, offset: int, size: int, names: int, names_size: int
    ) -> _SymbolTable:
        data = self._read_around_gaps(
            offset, size // ELF64_SYM.itemsize * ELF64_SYM.itemsize
        )
        return _SymbolTable(np.frombuffer(data, ELF64_SYM), names, names_size)

    def _all_symbols(self) -> Iterator[_SymbolTable]:
        """Find the table of all symbols by section headers.

        :raises drgn.FaultError: if they are not in the page cache
        """
        if self._header is None:
            return
        offset, size, count = self._header[5], self._header[10], self._header[11]
        if not offset or size != _SECTION.size or not 0 < count <= _MAX_SECTIONS:
            return
        sections = list(_SECTION.iter_unpack(self._read(offset, count * size)))
        for _, kind, _, _, start, length, link, _, _, _ in sections:
            if kind == _SYMTAB and link < count and length <= _MAX_SYMBOL_BYTES:
                names = sections[link]
                yield self._table(start, length, names[4], names[5])

    def _dynamic_symbols(
        self, bias: int, read_memory: ReadMemory
    ) -> Iterator[_SymbolTable]:
        """Find the table of dynamic symbols by the dynamic segment in memory.

        :raises drgn.FaultError: if a part of the file is not in the page cache
        """
        for kind, _, _, address, _, size, _, _ in self._segments:
            if kind != _DYNAMIC:
                continue
            count = min(size // _TAG.size, _MAX_TAGS)
            data = read_memory(address + bias, count * _TAG.size)
            tags = dict(_TAG.iter_unpack(data or b""))
            # The dynamic linker usually adds the bias to addresses in the segment.
            symbols, names, hashes = (
                self._offset(tags.get(tag, 0) - bias) or self._offset(tags.get(tag, 0))
                for tag in (_DT_SYMTAB, _DT_STRTAB, _DT_GNU_HASH)
            )
            if symbols is None or names is None or hashes is None:
                continue
            size = self._count_hashed(hashes) * ELF64_SYM.itemsize
            if 0 < size <= _MAX_SYMBOL_BYTES:
                yield self._table(symbols, size, names, tags.get(_DT_STRSZ, 0))

    def _count_hashed(self, offset: int) -> int:
        """Count the dynamic symbols by DT_GNU_HASH: its last chain ends with the last.

        :raises drgn.FaultError: if the hash table is not in the page cache
        """
        header: tuple[int, ...] = _HASH.unpack(self._read(offset, _HASH.size))
        buckets, first, blooms, _ = header
        if not 0 < buckets <= _MAX_BUCKETS or blooms > _MAX_BUCKETS:
            return 0
        table = offset + _HASH.size + 8 * blooms
        last = max(np.frombuffer(self._read(table, 4 * buckets), "<u4").tolist())
        if last < first:
            return first
        chains = table + 4 * buckets
        for index in range(last, last + _MAX_CHAIN):
            entry = self._read(chains + 4 * (index - first), 4)
            if entry[0] & 1:
                return index + 1
        return 0


def _preference(function: Function) -> tuple[int, int, str]:
    """Return a sort key: the innermost first, then the fewest leading underscores."""
    name, offset = function
    return offset, len(name) - len(name.lstrip("_")), name
