# SPDX-License-Identifier: LGPL-2.1-or-later

"""Address ranges of the kernel's code, and its functions by address."""

import re

import drgn

from msatools.errors import LOST, MissingError
from msatools.kernel.generated_code import GeneratedCode, GeneratedSymbol
from msatools.kernel.modules import CodeModules, module_area
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.kernel.symbols import SortedSymbols
from msatools.selfdesc.find import find_symbol
from msatools.selfdesc.finders import finders_of
from msatools.selfdesc.load import is_served_by_btf, main_module
from msatools.selfdesc.module_records import LoadedModule

_MODULE_NAME_BYTES = 56
"""MODULE_NAME_LEN of 64-bit kernels."""

_GUARD_BYTES = 4096
"""Of a page that is not mapped, behind each area of vmalloc on x86-64."""

_BOUNDS = (("_stext", "_etext"), ("_sinittext", "_einittext"))
_BORDER = re.compile(r"_s?text|_sinittext|__\w+_text_start")
"""Section symbols of the linker: the first function of a section shares its address."""


class KernelText:
    """Functions by address; modules are read when the first of their addresses is."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._kernel = _bounds(reader.prog)
        self._modules = CodeModules(reader, losses)
        self._generated = GeneratedCode(reader, losses)
        self._functions: SortedSymbols | None = None
        self._found: dict[int, drgn.Symbol | None] = {}

    def in_kernel(self, address: int) -> bool:
        """Return whether an address is in the code of the kernel proper."""
        return any(start <= address < end for start, end in self._kernel)

    def module(self, address: int) -> LoadedModule | None:
        """Find the module at an address; ``None`` if not found."""
        return self._modules.find(address)

    def module_name(self, address: int) -> str | None:
        """Return the name of the module at an address; ``None`` if in none."""
        module = None if self.in_kernel(address) else self.module(address)
        return None if module is None else module.name

    def name(self, address: int) -> str | None:
        """Return the name of the function at an address; ``None`` if not found."""
        symbol = self.symbol(address)
        if symbol is not None:
            return str(symbol.name)
        if self.in_kernel(address) or self.module(address) is not None:
            return None
        found = self._generated.find(address)
        return None if found is None else found.name

    def generated(self, address: int) -> GeneratedSymbol | None:
        """Return the piece of generated code at an address; ``None`` if none."""
        return self._generated.find(address)

    def named(self, address: int) -> str:
        """Return a function's name with its module; else its address."""
        name, module = self.name(address), self.module_name(address)
        text = name or f"{address:#x}"
        return text if module is None else f"{text} [{module}]"

    def unloaded(self, address: int) -> str | None:
        """Return which module was unloaded last, if none is where one may have been.

        ``last_unloaded_module`` begins with its name (kernel/module/main.c). Behind
        each module that is loaded lies a page that never was of any.
        """
        prog = self._reader.prog
        first, last = module_area(prog)
        if not first <= address <= last or self.name(address):
            return None
        if self.module(address) or self.module(address - _GUARD_BYTES):
            return None
        if not self._modules.is_complete:
            return None
        try:
            place = kernel_symbol(prog, "last_unloaded_module")
            return read_string(self._reader, place, _MODULE_NAME_BYTES) or None
        except LOST:
            return None

    def symbol(self, address: int) -> drgn.Symbol | None:
        """Return the symbol of the function at an address; ``None`` if not found."""
        if address not in self._found:
            self._found[address] = self._find(address)
        return self._found[address]

    def _find(self, address: int) -> drgn.Symbol | None:
        if self.in_kernel(address):
            return self._find_in_kernel(address)
        # With debug info of vmlinux only, drgn has no symbols of modules; without debug
        # info it would search every module.
        module = self.module(address)
        if module is None:
            return None
        symbols = self._modules.symbols(module)
        found = symbols(self._reader.prog, None, address, True)
        return found[0] if found else None

    def _find_in_kernel(self, address: int) -> drgn.Symbol | None:
        prog = self._reader.prog
        finder = finders_of(prog).symbols if is_served_by_btf(prog) else None
        if finder:
            found = finder(prog, None, address, True)
            if not found or not _BORDER.fullmatch(found[0].name):
                return found[0] if found else None
        if self._functions is None:
            symbols = finder(prog, None, None, False) if finder else prog.symbols()
            self._functions = SortedSymbols(symbols, self._kernel)
        # By the symbol before it, as the kernel names it.
        named, _ = self._functions.before(address)
        return max(named, key=_fitness) if named else None


def _fitness(symbol: drgn.Symbol) -> tuple[bool, bool, bool, int]:
    """Return a sort key; the best name is a global symbol of a function."""
    return (
        not _BORDER.fullmatch(symbol.name),
        symbol.kind == drgn.SymbolKind.FUNC,
        symbol.binding == drgn.SymbolBinding.GLOBAL,
        -len(symbol.name),
    )


def kernel_symbol(prog: drgn.Program, name: str) -> int:
    """
    Find the address of a symbol of the kernel proper, which may not exist.

    drgn would search for a missing one in every module.

    :raises MissingError: if the kernel does not have it
    """
    if not is_served_by_btf(prog):
        return _relocated(prog, int(find_symbol(prog, name).address))
    found = finders_of(prog).symbols(prog, name, None, True)
    if not found:
        raise MissingError(f"the kernel has no {name}")
    return int(found[0].address)


def _relocated(prog: drgn.Program, address: int) -> int:
    """
    Return the address of a symbol of debug info where the kernel runs.

    drgn leaves the symbols of the section .brk, such as _end, where they were linked if
    debug info is in the file of the kernel itself, as in a kernel of one's own build.
    """
    module = main_module(prog)
    ranges, bias = module.address_ranges or (), module.debug_file_bias or 0
    for place in (address, address + bias):
        if any(start <= place <= end for start, end in ranges):
            return place
    return address


def _bounds(prog: drgn.Program) -> list[tuple[int, int]]:
    bounds = []
    for first, last in _BOUNDS:
        try:
            bounds.append((kernel_symbol(prog, first), kernel_symbol(prog, last)))
        except MissingError:
            continue
    return bounds
