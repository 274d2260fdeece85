# SPDX-License-Identifier: LGPL-2.1-or-later

"""Names of what lies in the kernel's image and in modules, for many addresses."""

from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import Findings
from msatools.selfdesc.finders import finders_of
from msatools.selfdesc.load import is_served_by_btf
from msatools.tasks.modules import Module, Modules, read_symbols
from msatools.tasks.text import kernel_symbol


@dataclass(frozen=True)
class SymbolName:
    """What is known of an address."""

    name: str
    """Of the symbol, with the offset from its start, and the module's."""

    symbol: str | None
    """``None`` if a module has no symbol there."""

    module: str | None
    """``None`` for the kernel itself."""


class SymbolNames:
    """Names functions and variables; modules are read when an address asks for them."""

    def __init__(self, reader: Reader, findings: Findings) -> None:
        self._reader = reader
        self._findings = findings
        self._image = _bounds(reader.prog, "_stext", "_end")
        self._area = _module_area(reader.prog)
        self._modules = Modules(reader, findings)
        self._of_module: dict[int, drgn.SymbolIndex] = {}
        self._of_kernel: drgn.SymbolIndex | None = None

    def may_name(self, addresses: Addresses) -> npt.NDArray[np.bool_]:
        """Tell which addresses are in the image, or between the first and last module.

        Where the kernel does not keep where these are, no address is.
        """
        found = np.zeros(len(addresses), np.bool_)
        for first, end in (self._image, self._area):
            found |= (addresses >= np.uint64(first)) & (addresses < np.uint64(end))
        return found

    def name(self, address: int) -> SymbolName | None:
        """Name what lies at an address; ``None`` if that is nothing."""
        if self._image[0] <= address < self._image[1]:
            symbol = _symbol_at(self._kernel(), self._reader.prog, address)
            if symbol is None:
                return None
            return SymbolName(_with_offset(symbol, address), symbol.name, None)
        module = self._modules.find(address)
        if module is None:
            return None
        symbol = _symbol_at(self._module(module), self._reader.prog, address)
        if symbol is None:
            return SymbolName(f"[{module.name}]", None, module.name)
        name = f"{_with_offset(symbol, address)} [{module.name}]"
        return SymbolName(name, symbol.name, module.name)

    def _kernel(self) -> drgn.SymbolIndex:
        if self._of_kernel is None:
            prog = self._reader.prog
            if is_served_by_btf(prog):
                self._of_kernel = finders_of(prog).symbols
            else:
                # drgn would read through all of them for each address.
                first, end = self._image
                self._of_kernel = drgn.SymbolIndex(
                    s for s in prog.symbols() if first <= s.address < end
                )
        return self._of_kernel

    def _module(self, module: Module) -> drgn.SymbolIndex:
        if module.address not in self._of_module:
            try:
                index = read_symbols(self._reader, module)
            except (drgn.FaultError, LookupError, ValueError) as error:
                self._findings.lose(
                    f"symbols of {module.name}",
                    f"the symbols of module {module.name} are lost: {error}",
                )
                index = drgn.SymbolIndex([])
            self._of_module[module.address] = index
        return self._of_module[module.address]


def _symbol_at(
    index: drgn.SymbolIndex, prog: drgn.Program, address: int
) -> drgn.Symbol | None:
    found = index(prog, None, address, True)
    return found[0] if found else None


def _with_offset(symbol: drgn.Symbol, address: int) -> str:
    offset = address - symbol.address
    return f"{symbol.name}+{offset:#x}" if offset else str(symbol.name)


def _bounds(prog: drgn.Program, first: str, end: str) -> tuple[int, int]:
    try:
        return kernel_symbol(prog, first), kernel_symbol(prog, end)
    except LookupError:
        return 0, 0


def _module_area(prog: drgn.Program) -> tuple[int, int]:
    """Find what lies between the modules' ends (kernel/module/main.c)."""
    try:
        tree = prog["mod_tree"]
        # The last byte: a damaged one may be the last that there is.
        return tree.addr_min.value_(), tree.addr_max.value_()
    except (LookupError, AttributeError, drgn.FaultError):
        return 0, 0
