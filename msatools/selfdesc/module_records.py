# SPDX-License-Identifier: LGPL-2.1-or-later

"""``struct module`` and the symbols of a loaded module.

kernel/module/kallsyms.c, include/linux/module.h. The caller passes the function that
reads memory, as types and symbols are looked up before a reader exists.
"""

from collections.abc import Callable, Iterable
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import DamagedDataError, MissingError
from msatools.selfdesc.find import (
    drgn_lookups,
    find_type,
    member_of,
    offset_of,
    pointer_to,
)

Read = Callable[[int, int], bytes]
"""``read(address, size)`` returns bytes; raises FaultError."""

_MAX_SYMBOLS = 1 << 20
"""Maximum number of symbols of a module; the largest have about ten thousand."""

_MAX_NAMES_BYTES = 1 << 26
_KSYM_NAME_LEN = 512
_PAGE = 4096

ELF64_SYM = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)
"""``Elf64_Sym`` of elf.h."""

_KINDS = {kind.value: kind for kind in drgn.SymbolKind}
_BINDINGS = {
    0: drgn.SymbolBinding.LOCAL,
    1: drgn.SymbolBinding.GLOBAL,
    2: drgn.SymbolBinding.WEAK,
}


class LoadedModule(Struct, frozen=True):
    """A loaded module."""

    address: int
    """Address of its ``struct module``."""

    name: str
    regions: tuple[tuple[int, int], ...]
    """Start and end of each region of memory."""

    def contains(self, address: int) -> bool:
        """Return whether one of its regions contains an address."""
        return any(start <= address < end for start, end in self.regions)


class ModuleLayout:
    """Layout of ``struct module``: its name, regions and list node.

    :raises MissingError: if the type is unknown
    """

    list: int
    """Offset of the node on the list of all modules."""

    size: int
    """Bytes from the start to the end of the last of these members."""

    def __init__(self, prog: drgn.Program) -> None:
        type_ = find_type(prog, "struct module")
        self.list = offset_of(type_, "list")
        self._name = _MemberSpan.of(type_, "name")
        try:
            # Linux kernel commit ac3b43283923 ("module: replace module_layout with
            # module_memory") (in v6.4)
            count = member_of(type_, "mem").type.length
            parts = [f"mem[{number}]" for number in range(count)]
        except MissingError:
            parts = ["core_layout", "init_layout"]
        self._regions = [
            (
                _MemberSpan.of(type_, f"{part}.base"),
                _MemberSpan.of(type_, f"{part}.size"),
            )
            for part in parts
        ]
        fields = [self._name, *(field for region in self._regions for field in region)]
        node = drgn.sizeof(member_of(type_, "list").type)
        self.size = max(self.list + node, *(field.end for field in fields))

    def parse(self, address: int, record: bytes) -> LoadedModule:
        """Return the module whose ``struct module`` at *address* is *record*."""
        text = record[self._name.offset : self._name.end].partition(b"\0")[0]
        regions = []
        for base, size in self._regions:
            start, length = base.number(record), size.number(record)
            if length:
                regions.append((start, start + length))
        name = text.decode("utf-8", "backslashreplace")
        return LoadedModule(address, name, tuple(regions))


class _MemberSpan(Struct, frozen=True):
    offset: int
    size: int

    @classmethod
    def of(cls, type_: drgn.Type, member: str) -> "_MemberSpan":
        with drgn_lookups:
            field = drgn.Object(type_.prog, type_, address=0).subobject_(member)
        return cls(field.address_, drgn.sizeof(field.type_))

    @property
    def end(self) -> int:
        return self.offset + self.size

    def number(self, record: bytes) -> int:
        return int.from_bytes(record[self.offset : self.end], "little")


class ModuleSymbols:
    """The table of a module's symbols, read as needed.

    :raises MissingError: if the kernel keeps none (CONFIG_KALLSYMS), or their number is
        impossible
    :raises drgn.FaultError: if it cannot be read
    """

    def __init__(self, prog: drgn.Program, module: LoadedModule, read: Read) -> None:
        entry = pointer_to(prog, "struct module", module.address)
        # Before Linux kernel commit 8244062ef1e5 ("modules: fix longstanding
        # /proc/kallsyms vs module insertion race.") (in v4.5) these were members of
        # struct module.
        with drgn_lookups:
            table = entry.member_("kallsyms").read_()[0].read_()
        self._module = module
        self._read = read
        self._symbols: int = table.symtab.value_()
        self._strings: int = table.strtab.value_()
        self._count: int = table.num_symtab.value_()
        if not 0 < self._count <= _MAX_SYMBOLS:
            raise DamagedDataError(f"it has {self._count:,}")

    def index(self) -> drgn.SymbolIndex:
        """Return the symbols within the module's regions.

        :raises MissingError: if the data cannot be symbols
        :raises drgn.FaultError: if they cannot be read
        """
        symbols = self._rows(0, self._count)
        inside = np.zeros(len(symbols), np.bool_)
        for start, end in self._module.regions:
            inside |= (symbols["value"] >= start) & (symbols["value"] < end)
        symbols = symbols[inside & (symbols["name"] != 0)]
        names = self._names(int(symbols["name"].max(initial=0)))
        return drgn.SymbolIndex(_symbols(symbols.tolist(), names))

    def names(self) -> bytes:
        """Return the names of all symbols, with a NUL before and after each.

        :raises MissingError: if the data cannot be symbols
        :raises drgn.FaultError: if they cannot be read
        """
        (last,) = self._rows(self._count - 1, 1)["name"].tolist()
        return self._names(last)

    def _rows(self, first: int, count: int) -> npt.NDArray[Any]:
        size = ELF64_SYM.itemsize
        data = self._read(self._symbols + size * first, size * count)
        return np.frombuffer(data, ELF64_SYM)

    def _names(self, last: int) -> bytes:
        """Read names up to the one at offset *last*; the next page may be missing."""
        if last >= _MAX_NAMES_BYTES:
            raise DamagedDataError("a symbol has its name far away")
        size = last + _PAGE - (self._strings + last) % _PAGE
        names = self._read(self._strings, size)
        if b"\0" not in names[last:]:
            names += self._read(self._strings + size, _KSYM_NAME_LEN)
        return names


def _text(names: bytes, start: int) -> str:
    """Return the name at an offset.

    :raises DamagedDataError: if it has no end
    """
    end = names.find(b"\0", start)
    if end < 0:
        raise DamagedDataError("a symbol's name does not end")
    return names[start:end].decode(errors="backslashreplace")


def _symbols(rows: Iterable[tuple[int, ...]], names: bytes) -> Iterable[drgn.Symbol]:
    return [
        drgn.Symbol(
            _text(names, name),
            address,
            size,
            _BINDINGS.get(info >> 4, drgn.SymbolBinding.UNKNOWN),
            _KINDS.get(info & 15, drgn.SymbolKind.UNKNOWN),
        )
        for name, info, _, _, address, size in rows
    ]
