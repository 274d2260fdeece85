# SPDX-License-Identifier: LGPL-2.1-or-later

"""Symbols and types of loadable modules, from the kernel's memory."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import islice

from drgn import Object, Program, Symbol, SymbolIndex, TypeKind

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.selfdesc.btf import MAX_BYTES, Btf, BtfError
from msatools.selfdesc.find import ask_each, find_variable
from msatools.selfdesc.module_records import LoadedModule, ModuleLayout, ModuleSymbols
from msatools.selfdesc.types import BtfTypes

_MAX_MODULES = 10_000
"""Maximum number of entries of a list; machines have some hundred modules."""


class Module:
    """A loaded module; its symbols are read when first needed."""

    def __init__(self, prog: Program, loaded: LoadedModule) -> None:
        self._prog = prog
        self._loaded = loaded
        self.name = loaded.name
        self.contains = loaded.contains

    def symbols(self) -> SymbolIndex:
        """Return the module's own symbols; none if they cannot be read."""
        return self._symbols

    def may_have(self, name: str) -> bool:
        """Return whether a symbol may have this name, without reading them all."""
        return b"\0" + name.encode() + b"\0" in self._names

    @cached_property
    def _symbols(self) -> SymbolIndex:
        try:
            return self._table().index()
        except LOST:
            return SymbolIndex([])

    @cached_property
    def _names(self) -> bytes:
        try:
            return self._table().names()
        except LOST:
            return b""

    def _table(self) -> ModuleSymbols:
        return ModuleSymbols(self._prog, self._loaded, self._prog.read)


class Modules:
    """The loaded modules, listed when one is first needed.

    :param kernel: Types of the kernel proper, which the BTF of modules refers to.
    """

    def __init__(self, kernel: BtfTypes) -> None:
        self.prog = kernel.prog
        self.kernel = kernel
        self._modules: list[Module] | None = None
        self._types: dict[str, BtfTypes | None] = {}
        self._btf: dict[str, Object] | None = None

    def __iter__(self) -> Iterator[Module]:
        if self._modules is None:
            # Lookups during the walk may search modules for symbols in turn.
            self._modules = []
            loaded: list[Module] | None = None
            try:
                loaded = list(_loaded(self.prog))
            finally:
                self._modules = loaded
        return iter(self._modules)

    def find_symbols(
        self, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        """Find symbols in modules, with the arguments of drgn's symbol finders."""
        found: list[Symbol] = []
        for module in self:
            if address is not None and not module.contains(address):
                continue
            if name is not None and not module.may_have(name):
                continue
            found += module.symbols()(self.prog, name, address, one)
            if found and one:
                return found[:1]
        return found

    def types(self, name: str) -> BtfTypes | None:
        """Return the types of a module's BTF; ``None`` if it has none.

        :raises BtfError: if its BTF is damaged, or refers to that of another kernel
        """
        if name not in self._types:
            self._types[name] = self._read_types(name)
        return self._types[name]

    def with_types(self) -> list[str]:
        """Return the names of the modules whose types were looked up and found."""
        return [name for name, types in self._types.items() if types]

    def with_type(self, kinds: Collection[TypeKind], name: str) -> list[str]:
        """Return the names of the modules whose BTF has a type; reads that of all."""
        return [each for each in self._entries_of_btf() if self._has(each, kinds, name)]

    def _has(self, module: str, kinds: Collection[TypeKind], name: str) -> bool:
        try:
            types = self.types(module)
            return types is not None and types.find(kinds, name) is not None
        except (BtfError, MissingError):
            return False

    def _entries_of_btf(self) -> dict[str, Object]:
        if self._btf is None:
            self._btf = {}
            for entry in _entries(
                self.prog, "btf_modules", "struct btf_module", "list"
            ):
                with suppress(*UNREADABLE):
                    self._btf.setdefault(_name(entry.module), entry)
        return self._btf

    def _read_types(self, name: str) -> BtfTypes | None:
        entry = self._entries_of_btf().get(name)
        if entry is None:
            return None
        try:
            btf = entry.btf
            base = self.kernel.btf
            if (btf.start_id, btf.start_str_off) != (base.end_id, base.end_string):
                raise BtfError(f"module {name} has BTF for another kernel")
            size = btf.data_size.value_()
            if size > MAX_BYTES:
                raise BtfError(f"module {name} has {size} bytes of BTF")
            data = self.prog.read(btf.data, size)
        except UNREADABLE as error:
            raise BtfError(f"module {name}: {error}") from error
        return BtfTypes(self.prog, Btf(data, base), self.kernel.type)


def _loaded(prog: Program) -> Iterator[Module]:
    try:
        layout = ModuleLayout(prog)
    except MissingError:  # a kernel without loadable modules
        return
    for entry in _entries(prog, "modules", "struct module", "list"):
        address = entry.value_()
        try:
            record = prog.read(address, layout.size)
        except UNREADABLE:
            continue
        yield Module(prog, layout.parse(address, record))


def _entries(
    prog: Program, variable: str, entry_type: str, member: str
) -> Iterator[Object]:
    """Yield the entries of a list up to one that cannot be read."""
    from drgn.helpers.linux.list import list_for_each_entry

    try:
        head = find_variable(prog, variable).address_of_()
        seen: set[int] = set()
        for entry in islice(
            ask_each(list_for_each_entry, entry_type, head, member), _MAX_MODULES
        ):
            address = entry.value_()
            if address in seen:
                return
            seen.add(address)
            yield entry
    except LOST:
        return


def _name(module: Object) -> str:
    name: bytes = module.name.string_()
    return name.decode("utf-8", "backslashreplace")
