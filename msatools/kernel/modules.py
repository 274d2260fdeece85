# SPDX-License-Identifier: LGPL-2.1-or-later

"""Loaded modules by address, and their symbols by address, with few reads.

kernel/module: each module needs many reads, and there may be hundreds of modules: so a
module is read only when an address in it is looked up.
"""

import drgn

from msatools.errors import LOST, UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_records
from msatools.kernel.words import unsigned
from msatools.selfdesc.find import drgn_lookups, find_type, find_variable, offset_of
from msatools.selfdesc.module_records import LoadedModule, ModuleLayout, ModuleSymbols

_MAX_DEPTH = 128
"""Maximum depth of the tree of modules: that of a red-black tree with 2^64 nodes."""


class CodeModules:
    """The modules of a kernel, each read when an address in it is first looked up."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self._known: list[LoadedModule] = []
        self._symbols: dict[int, drgn.SymbolIndex] = {}
        self._layout: ModuleLayout | None = None
        self._tree: _Tree | None = None
        self._is_ready = False
        self.is_complete = True
        """Whether each look-up so far could be answered."""

    def find(self, address: int) -> LoadedModule | None:
        """Find the module that contains an address; ``None`` if not found."""
        if not self._is_ready:
            self._prepare()
            self._is_ready = True
        for module in self._known:
            if module.contains(address):
                return module
        if self._tree is None or self._layout is None:
            return None
        try:
            start = self._tree.find(address)
            if start is None:
                return None
            record = self._reader.read(start, self._layout.size)
            module = self._layout.parse(start, record)
        except UNREADABLE as error:
            self._losses.lose(Loss.MODULES, f"cannot read a module: {error}")
            self.is_complete = False
            return None
        if not module.contains(address):
            return None
        self._known.append(module)
        return module

    def symbols(self, module: LoadedModule) -> drgn.SymbolIndex:
        """Return the symbols of a module; none, with a note, if they are lost."""
        if module.address not in self._symbols:
            try:
                symbols = ModuleSymbols(self._reader.prog, module, self._reader.read)
                index = symbols.index()
            except LOST as error:
                text = f"cannot read the symbols of module {module.name}: {error}"
                self._losses.lose(Loss.SYMBOLS, text, about=module.name)
                index = drgn.SymbolIndex([])
            self._symbols[module.address] = index
        return self._symbols[module.address]

    def _prepare(self) -> None:
        prog = self._reader.prog
        try:
            layout = self._layout = ModuleLayout(prog)
            head = find_variable(prog, "modules").address_
        except MissingError:  # a kernel without loadable modules
            self.is_complete = False
            return
        try:
            # With CONFIG_MODULES_TREE_LOOKUP, copy tracing and perf need.
            self._tree = _Tree(self._reader)
        except MissingError:
            self.is_complete = False
            records = list_records(
                self._reader,
                head,
                layout.list,
                layout.size,
                self._losses,
                "the list of modules",
            )
            self._known = [layout.parse(address, data) for address, data in records]


class _Tree:
    """
    ``mod_tree``: the memory ranges of modules (kernel/module/tree_lookup.c).

    It is a latched tree (include/linux/rbtree_latch.h): of its two copies one is always
    consistent.

    :raises MissingError: if this kernel has no such tree
    """

    def __init__(self, reader: Reader) -> None:
        prog = reader.prog
        tree = find_variable(prog, "mod_tree")
        self._reader = reader
        self._sequence = tree.address_ + offset_of(tree.type_, "root.seq")
        self._roots = tree.address_ + offset_of(tree.type_, "root.tree")
        try:
            part = find_type(prog, "struct module_memory")  # ac3b43283923 (in v6.4)
        except MissingError:
            part = find_type(prog, "struct module_layout")
        self._base = offset_of(part, "base")
        self._length = offset_of(part, "size")
        self._module = offset_of(part, "mtn.mod")
        self._nodes = [offset_of(part, f"mtn.node.node[{copy}]") for copy in (0, 1)]
        node = find_type(prog, "struct rb_node")
        self._left = offset_of(node, "rb_left")
        self._right = offset_of(node, "rb_right")
        self._size = max(
            *(offset + drgn.sizeof(node) for offset in self._nodes),
            self._module + 8,
            self._base + 8,
            self._length + 4,
        )

    def find(self, address: int) -> int | None:
        """
        Find the module with a memory range that contains an address.

        :return: Address of its ``struct module``; ``None`` if not found.
        :raises UNREADABLE: if the tree cannot be read
        """
        copy = unsigned(self._reader.read(self._sequence, 4), 0, 4) & 1
        node = int(self._reader.words(self._roots + 8 * copy, 1)[0])
        for _ in range(_MAX_DEPTH):
            if not node:
                return None
            data = self._reader.read(node - self._nodes[copy], self._size)
            base, size = unsigned(data, self._base, 8), unsigned(data, self._length, 4)
            if base <= address < base + size:
                return unsigned(data, self._module, 8)
            child = self._left if address < base else self._right
            node = unsigned(data, self._nodes[copy] + child, 8)
        raise DamagedDataError("the tree of modules has no end", node)


def module_area(prog: drgn.Program) -> tuple[int, int]:
    """Return the first and the last address that any module has had so far; 0 if lost.

    ``mod_tree`` has the lowest and the highest (kernel/module/main.c).
    """
    try:
        with drgn_lookups:
            tree = find_variable(prog, "mod_tree")
            # addr_max is inclusive; damage may make it the highest address: no + 1.
            return tree.addr_min.value_(), tree.addr_max.value_()
    except LOST:
        return 0, 0
