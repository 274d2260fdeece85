# SPDX-License-Identifier: LGPL-2.1-or-later

"""Loaded modules by address, and their functions by address, with few reads.

kernel/module: a module lies where many reads are needed to find each piece, and there
may be hundreds: so only those are looked at that somebody asks for.
"""

from dataclasses import dataclass
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import decode_string
from msatools.kernel.walks import list_records

_MAX_DEPTH = 128
"""More than any path in a tree of modules: a red-black tree of 2^64 is as deep."""

_MAX_SYMBOLS = 1 << 20
"""Of a module; the largest have some ten thousand."""

_MAX_NAMES_BYTES = 1 << 26
_KSYM_NAME_LEN = 512
_PAGE = 4096

# Elf64_Sym, of elf.h.
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
_KINDS = {kind.value: kind for kind in drgn.SymbolKind}
_BINDINGS = {
    0: drgn.SymbolBinding.LOCAL,
    1: drgn.SymbolBinding.GLOBAL,
    2: drgn.SymbolBinding.WEAK,
}


@dataclass(frozen=True)
class CodeModule:
    """A module, and where it lies."""

    address: int
    """Of its ``struct module``."""

    name: str
    regions: tuple[tuple[int, int], ...]
    """Each from its start to its end."""

    def contains(self, address: int) -> bool:
        """Return whether the module lies there."""
        return any(start <= address < end for start, end in self.regions)


class CodeModules:
    """The modules of a kernel, each read when the first address in it is asked for."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._known: list[CodeModule] = []
        self._symbols: dict[int, drgn.SymbolIndex] = {}
        self._record: _Record | None = None
        self._tree: _Tree | None = None
        self._is_ready = False

    def find(self, address: int) -> CodeModule | None:
        """Find the module that lies at an address."""
        if not self._is_ready:
            self._prepare()
            self._is_ready = True
        for module in self._known:
            if module.contains(address):
                return module
        if self._tree is None or self._record is None:
            return None
        try:
            place = self._tree.find(address)
            if place is None:
                return None
            found = self._record.read(self._reader, place)
        except drgn.FaultError as error:
            self._losses.lose(Loss.MODULES, f"a module is lost: {error}")
            return None
        if not found.contains(address):
            return None
        self._known.append(found)
        return found

    def symbols(self, module: CodeModule) -> drgn.SymbolIndex:
        """Return the symbols in a module; none, and a note, if they are lost."""
        if module.address not in self._symbols:
            try:
                index = _read_symbols(self._reader, module)
            except (drgn.FaultError, LookupError, ValueError) as error:
                text = f"the symbols of module {module.name} are lost: {error}"
                self._losses.lose(Loss.SYMBOLS, text, about=module.name)
                index = drgn.SymbolIndex([])
            self._symbols[module.address] = index
        return self._symbols[module.address]

    def _prepare(self) -> None:
        prog = self._reader.prog
        try:
            self._record = _Record(prog)
            head = prog["modules"].address_
        except LookupError:  # a kernel without loadable modules
            return
        try:
            # With CONFIG_MODULES_TREE_LOOKUP, which tracing and perf need.
            self._tree = _Tree(self._reader)
        except LookupError:
            self._known = self._record.read_all(self._reader, head, self._losses)


class _Record:
    """What a ``struct module`` looks like."""

    def __init__(self, prog: drgn.Program) -> None:
        type_ = prog.type("struct module")
        self._list = drgn.offsetof(type_, "list")
        self._name = drgn.offsetof(type_, "name")
        self._name_bytes = drgn.sizeof(type_.member("name").type)
        try:
            # Linux kernel commit ac3b43283923 ("module: replace module_layout with
            # module_memory") (in v6.4)
            count = type_.member("mem").type.length
            parts = [f"mem[{number}]" for number in range(count)]
        except LookupError:
            parts = ["core_layout", "init_layout"]
        self._regions = [
            (
                drgn.offsetof(type_, f"{part}.base"),
                drgn.offsetof(type_, f"{part}.size"),
            )
            for part in parts
        ]
        self._size = max(
            self._list + 16,
            self._name + self._name_bytes,
            *(offset + 8 for region in self._regions for offset in region),
        )

    def read(self, reader: Reader, address: int) -> CodeModule:
        return self._parse(address, reader.read(address, self._size))

    def read_all(self, reader: Reader, head: int, losses: LossLog) -> list[CodeModule]:
        records = list_records(
            reader, head, self._list, self._size, losses, "the list of modules"
        )
        return [self._parse(address, data) for address, data in records]

    def _parse(self, address: int, data: bytes) -> CodeModule:
        name = decode_string(data[self._name : self._name + self._name_bytes])
        ends = []
        for base, size in self._regions:
            start, length = _number(data, base, 8), _number(data, size, 4)
            if length:
                ends.append((start, start + length))
        return CodeModule(address, name, tuple(ends))


class _Tree:
    """
    The parts of modules by address (kernel/module/tree_lookup.c).

    It is there twice (include/linux/rbtree_latch.h), so that one is whole at any time.

    :raises LookupError: if this kernel has no such tree
    """

    def __init__(self, reader: Reader) -> None:
        prog = reader.prog
        tree = prog["mod_tree"]
        self._reader = reader
        self._sequence = tree.address_ + drgn.offsetof(tree.type_, "root.seq")
        self._roots = tree.address_ + drgn.offsetof(tree.type_, "root.tree")
        try:
            part = prog.type("struct module_memory")  # ac3b43283923 (in v6.4)
        except LookupError:
            part = prog.type("struct module_layout")
        self._base = drgn.offsetof(part, "base")
        self._length = drgn.offsetof(part, "size")
        self._module = drgn.offsetof(part, "mtn.mod")
        self._nodes = [
            drgn.offsetof(part, f"mtn.node.node[{which}]") for which in (0, 1)
        ]
        node = prog.type("struct rb_node")
        self._left = drgn.offsetof(node, "rb_left")
        self._right = drgn.offsetof(node, "rb_right")
        self._size = max(
            *(offset + drgn.sizeof(node) for offset in self._nodes),
            self._module + 8,
            self._base + 8,
            self._length + 4,
        )

    def find(self, address: int) -> int | None:
        """
        Find the module of which some part lies at an address.

        :return: The address of its ``struct module``.
        :raises drgn.FaultError: if the tree cannot be read
        """
        which = _number(self._reader.read(self._sequence, 4), 0, 4) & 1
        node = int(self._reader.words(self._roots + 8 * which, 1)[0])
        for _ in range(_MAX_DEPTH):
            if not node:
                return None
            data = self._reader.read(node - self._nodes[which], self._size)
            base, size = _number(data, self._base, 8), _number(data, self._length, 4)
            if base <= address < base + size:
                return _number(data, self._module, 8)
            child = self._left if address < base else self._right
            node = _number(data, self._nodes[which] + child, 8)
        raise drgn.FaultError("the tree of modules has no end", node)


def _read_symbols(reader: Reader, module: CodeModule) -> drgn.SymbolIndex:
    """
    Read the symbols that lie in a module.

    :raises LookupError: if the kernel keeps none (CONFIG_KALLSYMS), or there cannot be
        as many as it says
    :raises drgn.FaultError: if they cannot be read
    """
    entry = drgn.Object(reader.prog, "struct module *", value=module.address)
    table = entry.member_("kallsyms").read_()[0].read_()
    count = table.num_symtab.value_()
    if not 0 < count <= _MAX_SYMBOLS:
        raise LookupError(f"it has {count:,}")
    data = reader.read(table.symtab.value_(), _SYMBOL.itemsize * count)
    symbols = np.frombuffer(data, _SYMBOL)
    inside = np.zeros(count, np.bool_)
    for start, end in module.regions:
        inside |= (symbols["value"] >= start) & (symbols["value"] < end)
    symbols = symbols[inside & (symbols["name"] != 0)]
    last = int(symbols["name"].max(initial=0))
    if last >= _MAX_NAMES_BYTES:
        raise LookupError("a symbol has its name far away")
    names = _read_names(reader, table.strtab.value_(), last)
    return drgn.SymbolIndex(_symbols(symbols, names))


def _read_names(reader: Reader, start: int, last: int) -> bytes:
    """Read names up to the one at *last*; what follows it may not be readable."""
    size = last + _PAGE - (start + last) % _PAGE
    names = reader.read(start, size)
    if b"\0" not in names[last:]:
        names += reader.read(start + size, _KSYM_NAME_LEN)
    return names


def _symbols(symbols: npt.NDArray[Any], names: bytes) -> list[drgn.Symbol]:
    return [
        drgn.Symbol(
            names[name : names.index(b"\0", name)].decode(errors="backslashreplace"),
            address,
            size,
            _BINDINGS.get(info >> 4, drgn.SymbolBinding.UNKNOWN),
            _KINDS.get(info & 15, drgn.SymbolKind.UNKNOWN),
        )
        for name, info, _, _, address, size in symbols.tolist()
    ]


def _number(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")
