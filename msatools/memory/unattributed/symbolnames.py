# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Names of what lies in the kernel's image and in modules, for many addresses.

The kernel's own symbols name what lies in its image, whatever tells its types, so that
names do not depend on that. These symbols have no sizes: an object is held to reach up
to the next symbol, if that is not too far away. Debug info knows where objects end, and
what lies behind that has no name then. This is the one difference that is left: without
debug info, a pointer to the padding behind an object, or to data without a symbol that
follows it, is named after that object.
"""

import contextlib
import re
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.modules import CodeModules
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.symbols import SortedSymbols
from msatools.selfdesc.finders import finders_of
from msatools.selfdesc.kallsyms import NoSymbolsError, load_symbols
from msatools.selfdesc.load import is_served_by_btf
from msatools.selfdesc.variables import find_variable
from msatools.tasks.text import kernel_symbol

_LONGEST = 512 << 10
"""
What may lie between two symbols, in bytes, and be all the first one's.

The largest variables that others point to are rcu_state, of 359 KiB, and printk's; what
is longer are string constants, which have no symbols, and gaps up to the next section.
"""

_ENDS = ("_etext", "_einittext", "_edata")
_END = re.compile(r"__(?:end|stop)_\w+|\w+_end")
"""Where the linker put the end of something: what lies behind it is something else."""

_SIZED = (drgn.SymbolKind.OBJECT, drgn.SymbolKind.FUNC)


@dataclass(frozen=True)
class SymbolName:
    """What an address belongs to."""

    name: str
    """Of the symbol, with the offset from its start, and the module's."""

    symbol: str | None
    """``None`` if a module has no symbol there."""

    module: str | None
    """``None`` for the kernel itself."""


class SymbolNames:
    """Names functions and variables; modules are read when an address asks for them."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._image = _bounds(reader.prog, "_stext", "_end")
        self._area = _module_area(reader.prog)
        self._modules = CodeModules(reader, losses)
        self._of_kernel: _KernelSymbols | None = None

    def may_name(self, addresses: Addresses) -> npt.NDArray[np.bool_]:
        """Return which addresses are in the image, or between first and last module.

        Where the kernel does not keep where these are, no address is.
        """
        found = np.zeros(len(addresses), np.bool_)
        for first, end in (self._image, self._area):
            found |= (addresses >= np.uint64(first)) & (addresses < np.uint64(end))
        return found

    def name(self, address: int) -> SymbolName | None:
        """Name what lies at an address; ``None`` if that is nothing."""
        if self._image[0] <= address < self._image[1]:
            if self._of_kernel is None:
                self._of_kernel = _KernelSymbols(self._reader.prog, self._image)
            symbol = self._of_kernel.find(address)
            if symbol is None:
                return None
            return SymbolName(_with_offset(symbol, address), symbol.name, None)
        module = self._modules.find(address)
        if module is None:
            return None
        found = self._modules.symbols(module)(self._reader.prog, None, address, True)
        if not found:
            return SymbolName(f"[{module.name}]", None, module.name)
        symbol = found[0]
        name = f"{_with_offset(symbol, address)} [{module.name}]"
        return SymbolName(name, symbol.name, module.name)


class _KernelSymbols:
    """The symbols of the kernel proper, and where they end as far as that is known."""

    def __init__(self, prog: drgn.Program, image: tuple[int, int]) -> None:
        self._end = image[1]
        self._ends: dict[int, int] = {}
        """By where they begin, of what debug info knows the size."""

        if is_served_by_btf(prog):
            symbols = finders_of(prog).symbols(prog, None, None, False)
        else:
            # Those of sections have no name.
            symbols = [symbol for symbol in prog.symbols() if symbol.name]
            for symbol in symbols:
                # Of mere labels nothing tells how far they reach.
                if symbol.size or symbol.kind in _SIZED:
                    end = symbol.address + symbol.size
                    self._ends[symbol.address] = max(
                        end, self._ends.get(symbol.address, 0)
                    )
            # Without any of its own, those of debug info have to do.
            with contextlib.suppress(NoSymbolsError):
                symbols = load_symbols(prog)(prog, None, None, False)
        self._symbols = SortedSymbols(symbols, [image])

    def find(self, address: int) -> drgn.Symbol | None:
        """Find the symbol of what lies at an address; ``None`` if nothing tells it."""
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
    # There are functions with such names as well.
    return symbol.kind != drgn.SymbolKind.FUNC and bool(_END.fullmatch(symbol.name))


def _rank(symbol: drgn.Symbol) -> tuple[bool, bool, bool, int, str]:
    """Put first what names a thing, not its place: the linker's labels begin with _."""
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
    except LookupError:
        return 0, 0


def _module_area(prog: drgn.Program) -> tuple[int, int]:
    """Find what lies between the modules' ends (kernel/module/main.c)."""
    try:
        tree = find_variable(prog, "mod_tree")
        # The last byte: a damaged one may be the last that there is.
        return tree.addr_min.value_(), tree.addr_max.value_()
    except (LookupError, AttributeError, drgn.FaultError):
        return 0, 0
