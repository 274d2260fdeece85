# SPDX-License-Identifier: LGPL-2.1-or-later

"""Symbols and types of loadable modules, from what the kernel keeps of each."""

from collections.abc import Iterator
from functools import cached_property
from itertools import islice

from drgn import FaultError, Object, Program, Symbol, SymbolIndex

from msatools.selfdesc.btf import MAX_BYTES, Btf, BtfError
from msatools.selfdesc.module_records import LoadedModule, ModuleLayout, ModuleSymbols
from msatools.selfdesc.types import BtfTypes
from msatools.selfdesc.variables import find_variable

_MAX_MODULES = 10_000
"""So that a damaged list has an end; machines have some hundred."""


class Module:
    """A loaded module; its symbols are read when one is asked for."""

    def __init__(self, prog: Program, loaded: LoadedModule) -> None:
        self._prog = prog
        self._loaded = loaded
        self.name = loaded.name
        self.contains = loaded.contains

    def symbols(self) -> SymbolIndex:
        """Read the module's own symbols; none where they cannot be read."""
        return self._symbols

    def may_have(self, name: str) -> bool:
        """Return whether a symbol may have this name, without reading them all."""
        return b"\0" + name.encode() + b"\0" in self._names

    @cached_property
    def _symbols(self) -> SymbolIndex:
        try:
            return self._table().index()
        except (FaultError, LookupError, ValueError):
            return SymbolIndex([])

    @cached_property
    def _names(self) -> bytes:
        try:
            return self._table().names()
        except (FaultError, LookupError):
            return b""

    def _table(self) -> ModuleSymbols:
        return ModuleSymbols(self._prog, self._loaded, self._prog.read)


class Modules:
    """The modules that were loaded when it was first asked for one.

    :param kernel: the types of the kernel proper, upon which those of modules build
    """

    def __init__(self, kernel: BtfTypes) -> None:
        self.prog = kernel.prog
        self.kernel = kernel
        self._modules: list[Module] | None = None
        self._types: dict[str, BtfTypes | None] = {}

    def __iter__(self) -> Iterator[Module]:
        if self._modules is None:
            # Looking up what the walk needs may ask for symbols in turn.
            self._modules = []
            found: list[Module] | None = None
            try:
                found = list(_loaded(self.prog))
            finally:
                self._modules = found
        return iter(self._modules)

    def find_symbols(
        self, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        """Find symbols in modules, as drgn asks for them."""
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
        """Return the types that a module's BTF adds, ``None`` if it has none.

        :raises BtfError: if its BTF is damaged, or builds upon another kernel's
        """
        if name not in self._types:
            self._types[name] = self._read_types(name)
        return self._types[name]

    def with_types(self) -> list[str]:
        """Name the modules of which types were asked for, and found."""
        return [name for name, types in self._types.items() if types]

    def _read_types(self, name: str) -> BtfTypes | None:
        for entry in _entries(self.prog, "btf_modules", "struct btf_module", "list"):
            try:
                if _name(entry.module) != name:
                    continue
                btf = entry.btf
                base = self.kernel.btf
                if (btf.start_id, btf.start_str_off) != (base.end_id, base.end_string):
                    raise BtfError(f"module {name} has BTF for another kernel")
                size = btf.data_size.value_()
                if size > MAX_BYTES:
                    raise BtfError(f"module {name} has {size} bytes of BTF")
                data = self.prog.read(btf.data, size)
            except FaultError as error:
                raise BtfError(f"module {name}: {error}") from error
            return BtfTypes(self.prog, Btf(data, base), self.kernel.type)
        return None


def _loaded(prog: Program) -> Iterator[Module]:
    try:
        layout = ModuleLayout(prog)
    except LookupError:  # a kernel without loadable modules
        return
    for entry in _entries(prog, "modules", "struct module", "list"):
        address = entry.value_()
        try:
            record = prog.read(address, layout.size)
        except FaultError:
            continue
        yield Module(prog, layout.parse(address, record))


def _entries(
    prog: Program, variable: str, entry_type: str, member: str
) -> Iterator[Object]:
    """Walk a list of the kernel's, as far as it can be read."""
    from drgn.helpers.linux.list import list_for_each_entry

    try:
        head = find_variable(prog, variable).address_of_()
        seen: set[int] = set()
        for entry in islice(
            list_for_each_entry(entry_type, head, member), _MAX_MODULES
        ):
            address = entry.value_()
            if address in seen:
                return
            seen.add(address)
            yield entry
    except (FaultError, LookupError):
        return


def _name(module: Object) -> str:
    name: bytes = module.name.string_()
    return name.decode("utf-8", "backslashreplace")
