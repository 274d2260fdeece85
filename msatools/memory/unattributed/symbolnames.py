# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Looks up symbols of addresses in the kernel image and in modules.

Names in the image come from the kernel's own symbols (kallsyms), so that they do not
depend on the source of the types. These symbols have no sizes: an object is assumed to
extend to the next symbol, if that is not too far away. Debug info has sizes, and
addresses after the end of an object have no name. One difference remains: without debug
info, a pointer to the padding after an object, or to data without a symbol that follows
it, is named after that object.
"""

import contextlib
import re
from typing import Any

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import MissingError
from msatools.kernel.generated_code import GeneratedCode
from msatools.kernel.modules import CodeModules, module_area
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.symbols import SortedSymbols
from msatools.model import equal_but, hash_but
from msatools.selfdesc.finders import finders_of
from msatools.selfdesc.kallsyms import NoSymbolsError, load_symbols
from msatools.selfdesc.load import is_served_by_btf
from msatools.selfdesc.symbol_table import Symbols, SymbolTable
from msatools.tasks.text import kernel_symbol
from msatools.tasks.unloaded import UnloadedModules

_LONGEST = 512 << 10
"""
Maximum distance of two symbols, in bytes, that the first may cover.

The largest variables that others point to are rcu_state, of 359 KiB, and printk's.
Longer ranges are string constants, which have no symbols, and gaps before a section.
"""

_ENDS = ("_etext", "_einittext", "_edata")
_END = re.compile(r"__(?:end|stop)_\w+|\w+_end")
"""Labels of the linker for the end of something: they cover nothing after it."""

_SIZED = (drgn.SymbolKind.OBJECT, drgn.SymbolKind.FUNC)


class SymbolName(Struct, frozen=True):
    """The symbol or module that an address belongs to."""

    name: str
    """The symbol, the offset from its start, and the module."""

    symbol: str | None
    """Name of the symbol; ``None`` if the module has no symbol there."""

    module: str | None
    """Name of the module; ``None`` for the kernel image."""

    start: int | None = None
    """Address of the symbol; ``None`` if it has none there."""

    def __eq__(self, other: object) -> Any:
        return equal_but(self, other, "start")

    def __hash__(self) -> int:
        return hash_but(self, "start")


class SymbolNames:
    """Looks up functions and variables; modules are read when needed."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._image = _bounds(reader.prog, "_stext", "_end")
        self._area = module_area(reader.prog)
        self._modules = CodeModules(reader, losses)
        self._generated = GeneratedCode(reader, losses)
        self._unloaded = UnloadedModules(reader, losses)
        self._of_kernel: _KernelSymbols | None = None

    def may_name(self, addresses: Addresses) -> npt.NDArray[np.bool_]:
        """Return which addresses are in the image, or between first and last module.

        If the kernel does not record these bounds, none is.
        """
        inside = np.zeros(len(addresses), np.bool_)
        for first, end in (self._image, self._area):
            inside |= (addresses >= np.uint64(first)) & (addresses < np.uint64(end))
        return inside

    def name(self, address: int) -> SymbolName | None:
        """Return the name of an address; ``None`` if not found."""
        if self._image[0] <= address < self._image[1]:
            if self._of_kernel is None:
                self._of_kernel = _KernelSymbols(self._reader.prog, self._image)
            symbol = self._of_kernel.find(address)
            if symbol is None:
                return None
            name = _with_offset(symbol, address)
            return SymbolName(name, symbol.name, None, symbol.address)
        module = self._modules.find(address)
        if module is None:
            return self._generated_at(address) or self._of_unloaded(address)
        symbols = self._modules.symbols(module)(self._reader.prog, None, address, True)
        if not symbols:
            return SymbolName(f"[{module.name}]", None, module.name)
        symbol = symbols[0]
        name = f"{_with_offset(symbol, address)} [{module.name}]"
        return SymbolName(name, symbol.name, module.name, symbol.address)

    def _generated_at(self, address: int) -> SymbolName | None:
        """Return the name of generated code, with what stands for its module."""
        found = self._generated.find(address)
        if found is None:
            return None
        name = f"{found.name}+{address - found.start:#x} [{found.module}]"
        return SymbolName(name, found.name, found.module, found.start)

    def _of_unloaded(self, address: int) -> SymbolName | None:
        module = self._unloaded.name(address)
        if module is None:
            return None
        return SymbolName(f"{address:#x} [{module}]", None, module)


class _KernelSymbols:
    """The symbols of the kernel image, with their ends where those are known."""

    def __init__(self, prog: drgn.Program, image: tuple[int, int]) -> None:
        self._end = image[1]
        self._ends: dict[int, int] = {}
        """Ends of the symbols that have a size in debug info, by start address."""

        finder: Symbols | None = None
        symbols: list[drgn.Symbol] = []
        if is_served_by_btf(prog):
            finder = finders_of(prog).symbols
        else:
            # Section symbols have no name.
            symbols = [symbol for symbol in prog.symbols() if symbol.name]
            for symbol in symbols:
                # Labels have no size.
                if symbol.size or symbol.kind in _SIZED:
                    end = symbol.address + symbol.size
                    self._ends[symbol.address] = max(
                        end, self._ends.get(symbol.address, 0)
                    )
            # Without kallsyms, use those of debug info.
            with contextlib.suppress(NoSymbolsError):
                finder = load_symbols(prog)
        self._symbols: SymbolTable | SortedSymbols
        if isinstance(finder, SymbolTable):
            # It is sorted; to make an object of each symbol takes half a second.
            self._symbols = finder
        else:
            if finder is not None:
                symbols = finder(prog, None, None, False)
            self._symbols = SortedSymbols(symbols, [image])

    def find(self, address: int) -> drgn.Symbol | None:
        """Return the symbol that covers an address; ``None`` if not found."""
        named, following = self._symbols.before(address)
        if not named:
            return None
        start, end = named[0].address, following or self._end
        if end - start > _LONGEST or all(map(_is_end, named)):
            end = start
        end = min(end, self._ends.get(start, end))
        return min(named, key=_rank) if address == start or address < end else None


def _is_end(symbol: drgn.Symbol) -> bool:
    if symbol.name in _ENDS:
        return True
    # Some functions have such names as well.
    return symbol.kind != drgn.SymbolKind.FUNC and bool(_END.fullmatch(symbol.name))


def _rank(symbol: drgn.Symbol) -> tuple[bool, bool, bool, int, str]:
    """Sort names of objects before labels of the linker, which begin with ``_``."""
    return (
        _is_end(symbol),
        symbol.name.startswith("_"),
        symbol.binding != drgn.SymbolBinding.GLOBAL,
        len(symbol.name),
        symbol.name,
    )


def _with_offset(symbol: drgn.Symbol, address: int) -> str:
    offset = address - symbol.address
    return f"{symbol.name}+{offset:#x}" if offset else str(symbol.name)


def _bounds(prog: drgn.Program, first: str, end: str) -> tuple[int, int]:
    try:
        return kernel_symbol(prog, first), kernel_symbol(prog, end)
    except MissingError:
        return 0, 0
