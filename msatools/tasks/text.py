# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where the kernel's code lies, and what its functions are called."""

import re
from dataclasses import dataclass

import drgn
import numpy as np
from drgn.helpers.linux.kallsyms import module_kallsyms
from drgn.helpers.linux.module import module_address_regions

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.walks import list_records
from msatools.selfdesc.finders import finders_of
from msatools.selfdesc.load import is_served_by_btf

_BOUNDS = (("_stext", "_etext"), ("_sinittext", "_einittext"))
_BORDER = re.compile(r"_s?text|_sinittext|__\w+_text_start")
"""Where the linker put a part of the text: the first function there has two names."""

_MAX_SYMBOLS = 1 << 20
"""Of a module; the largest have some ten thousand."""


@dataclass(frozen=True)
class Module:
    """A module, and where it lies."""

    address: int
    """Of its ``struct module``."""

    name: str
    regions: tuple[tuple[int, int], ...]
    """Each from its start to its end."""


class KernelText:
    """Functions by address; modules are looked at when the first address asks."""

    def __init__(self, reader: Reader, findings: Findings) -> None:
        self._reader = reader
        self._findings = findings
        self._kernel = _bounds(reader.prog)
        self._modules: list[Module] | None = None
        self._symbols: dict[int, drgn.SymbolIndex] = {}
        self._functions: _Functions | None = None
        self._names: dict[int, str | None] = {}

    def in_kernel(self, address: int) -> bool:
        """Tell whether the kernel proper has code there."""
        return any(start <= address < end for start, end in self._kernel)

    def module(self, address: int) -> Module | None:
        """Find the module that lies there."""
        if self._modules is None:
            self._modules = self._read_modules()
        for module in self._modules:
            if any(start <= address < end for start, end in module.regions):
                return module
        return None

    def name(self, address: int) -> str | None:
        """Name the function that an instruction is in, as the compiler named it."""
        if address not in self._names:
            self._names[address] = self._find_name(address)
        return self._names[address]

    def _find_name(self, address: int) -> str | None:
        prog = self._reader.prog
        served_by_btf = is_served_by_btf(prog)
        if served_by_btf:
            try:
                name: str = prog.symbol(address).name
            except LookupError:
                return None
            if not _BORDER.fullmatch(name):
                return name
        if self.in_kernel(address):
            if self._functions is None:
                finder = finders_of(prog).symbols if served_by_btf else None
                symbols = finder(prog, None, None, False) if finder else prog.symbols()
                self._functions = _Functions(symbols, self._kernel)
            return self._functions.name(address)
        # With debug info of the kernel alone, its modules have no names for drgn.
        module = self.module(address)
        if module is None:
            return None
        if module.address not in self._symbols:
            self._symbols[module.address] = self._read_symbols(module)
        found = self._symbols[module.address](prog, None, address, True)
        return found[0].name if found else None

    def _read_modules(self) -> list[Module]:
        prog, findings = self._reader.prog, self._findings
        try:
            head = prog["modules"].address_
            module = prog.type("struct module")
        except LookupError:  # a kernel without loadable modules
            return []
        node = module.member("list").offset
        found = []
        for address, _ in list_records(
            self._reader, head, node, node + 16, findings, "the list of modules"
        ):
            entry = drgn.Object(prog, "struct module *", value=address)
            try:
                regions = module_address_regions(entry)
                name = entry.name.string_().decode(errors="backslashreplace")
            except (drgn.FaultError, LookupError) as error:
                findings.lose("modules", f"a module is lost: {error}")
                continue
            ends = tuple((start, start + size) for start, size in regions if size)
            found.append(Module(address, name, ends))
        return found

    def _read_symbols(self, module: Module) -> drgn.SymbolIndex:
        entry = drgn.Object(self._reader.prog, "struct module *", value=module.address)
        try:
            count = entry.kallsyms.num_symtab.value_()
            if not 0 < count <= _MAX_SYMBOLS:
                raise LookupError(f"it has {count:,}")
            return drgn.SymbolIndex(module_kallsyms(entry))
        except (drgn.FaultError, LookupError, ValueError) as error:
            self._findings.lose(
                f"symbols of {module.name}",
                f"the symbols of module {module.name} are lost: {error}",
            )
            return drgn.SymbolIndex([])


class _Functions:
    """
    The functions of the kernel proper, by address.

    With debug info drgn reads through all symbols for each address, which takes
    milliseconds. An address is named by the symbol before it, as the kernel does it.
    """

    def __init__(
        self, symbols: list[drgn.Symbol], bounds: list[tuple[int, int]]
    ) -> None:
        addresses = np.array([symbol.address for symbol in symbols], np.uint64)
        inside = np.zeros(len(symbols), np.bool_)
        for start, end in bounds:
            inside |= (addresses >= start) & (addresses < end)
        rows = np.flatnonzero(inside)
        order = rows[np.argsort(addresses[rows], kind="stable")]
        self._addresses = addresses[order]
        self._symbols = [symbols[row] for row in order.tolist()]

    def name(self, address: int) -> str | None:
        """Name the function there; of several names, a function's that is global."""
        end = int(np.searchsorted(self._addresses, np.uint64(address), "right"))
        if not end:
            return None
        start = int(np.searchsorted(self._addresses, self._addresses[end - 1], "left"))
        best = max(self._symbols[start:end], key=_fitness)
        return str(best.name)


def _fitness(symbol: drgn.Symbol) -> tuple[bool, bool, bool, int]:
    return (
        not _BORDER.fullmatch(symbol.name),
        symbol.kind == drgn.SymbolKind.FUNC,
        symbol.binding == drgn.SymbolBinding.GLOBAL,
        -len(symbol.name),
    )


def _bounds(prog: drgn.Program) -> list[tuple[int, int]]:
    found = []
    for first, last in _BOUNDS:
        try:
            found.append((prog.symbol(first).address, prog.symbol(last).address))
        except LookupError:
            continue
    return found
