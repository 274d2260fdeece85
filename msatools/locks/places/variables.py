# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the variable that contains an address: of the kernel, of a module, per-CPU."""

from functools import cached_property

import drgn
import numpy as np

from msatools.errors import LOST
from msatools.kernel.modules import CodeModules
from msatools.kernel.percpu import PerCpu, read_percpu
from msatools.kernel.report import LossLog
from msatools.locks.base.struct_reader import Layout
from msatools.selfdesc.finders import finders_of
from msatools.selfdesc.load import is_served_by_btf
from msatools.selfdesc.symbol_table import Symbols, SymbolTable
from msatools.target.addresses import code_start
from msatools.target.arch import arch_of

_LARGE = "rcu_state"
"""Name of a variable, and of its type, of 359 KiB."""


class Variables:
    """Finds names of variables; reads modules when first needed."""

    def __init__(self, layout: Layout, losses: LossLog) -> None:
        self._layout = layout
        self._prog = layout.reader.prog
        self._losses = losses
        self._code_start = code_start(layout.reader.prog)
        self._modules = CodeModules(layout.reader, losses)

    def name(self, address: int) -> str | None:
        """Return the name of the variable at an address; ``None`` if there is none.

        Examples: ``cgroup_mutex``, ``shrinker_idr+0x8``, ``runqueues of cpu1``.
        """
        start, end = self._image
        if start <= address < end:
            return _name(self._in_kernel(address), address) or self._large(address)
        if (per_cpu := self.of_cpu(address)) is not None:
            cpu, linked = per_cpu
            name = _name(self._static(linked), linked)
            return f"{name} of cpu{cpu}" if name else None
        # Data of modules is next to their code.
        if address < self._code_start:
            return None
        return _name(self._in_module(address), address)

    def _large(self, address: int) -> str | None:
        """Return the name of the one large variable with locks; else ``None``.

        Without sizes of symbols, one is not thought to go on for that long.
        """
        start = self._layout.symbol(_LARGE)
        if start is None or not self._layout.has(_LARGE, "barrier_mutex"):
            return None
        offset = address - start
        return f"{_LARGE}+{offset:#x}" if 0 <= offset < self._size else None

    @cached_property
    def _size(self) -> int:
        return self._layout.size(_LARGE)

    @cached_property
    def _image(self) -> tuple[int, int]:
        start, end = self._layout.symbol("_text"), self._layout.symbol("_end")
        if start is None or end is None:
            return 0, 0
        if end < start:
            # Not relocated, as debug info of arm64 has it.
            _, end = arch_of(self._prog).image_range(self._prog)
        return start, end

    def _in_kernel(self, address: int) -> list[drgn.Symbol]:
        if is_served_by_btf(self._prog):
            finder = finders_of(self._prog).symbols
            found = list(finder(self._prog, None, address, False))
            return _with_others(self._prog, finder, found)
        return list(self._prog.symbols(address))

    def _in_module(self, address: int) -> list[drgn.Symbol]:
        module = self._modules.find(address)
        if module is None:
            return []
        symbols = self._modules.symbols(module)
        return list(symbols(self._prog, None, address, False))

    @cached_property
    def _cpus(self) -> tuple[int, int, PerCpu] | None:
        """Start and end of the linked per-CPU section, and the offset of each CPU."""
        start, end = map(self._layout.symbol, ("__per_cpu_start", "__per_cpu_end"))
        if start is None or end is None:
            return None
        try:
            return start, end, read_percpu(self._layout.reader, self._losses)
        except LOST:
            return None

    def per_cpu(self, linked: int) -> drgn.Symbol | None:
        """Return the per-CPU variable at a linked address; ``None`` if not found."""
        if self._cpus is None or not self._cpus[0] <= linked < self._cpus[1]:
            return None
        return _best(self._static(linked))

    def of_cpu(self, address: int) -> tuple[int, int] | None:
        """Return the CPU and the linked address of a per-CPU variable.

        :return: ``None`` if the address is of no such variable.
        """
        if self._cpus is None:
            return None
        start, end, percpu = self._cpus
        linked = np.uint64(address) - percpu.offsets
        inside = (linked >= start) & (linked < end) & (percpu.offsets != 0)
        rows = np.flatnonzero(inside)
        if not len(rows):
            return None
        return int(percpu.cpus[rows[0]]), int(linked[rows[0]])

    def _static(self, linked: int) -> list[drgn.Symbol]:
        """Find per-CPU variables by their linked address.

        It is a small number, or, since "x86/percpu/64: Use relative percpu offsets" (in
        v6.15), an address in the kernel's data.
        """
        if is_served_by_btf(self._prog):
            finder = finders_of(self._prog).symbols
            found = list(finder(self._prog, None, linked, False))
            return _with_others(self._prog, finder, found)
        return list(self._linked(self._prog, None, linked, False))

    @cached_property
    def _linked(self) -> drgn.SymbolIndex:
        """All per-CPU variables: drgn finds no symbols at addresses outside of modules.

        This takes some 100 ms, once.
        """
        start, end, _ = self._cpus or (0, 0, None)
        return drgn.SymbolIndex(
            symbol for symbol in self._prog.symbols() if start <= symbol.address < end
        )


def _with_others(
    prog: drgn.Program, finder: Symbols, found: list[drgn.Symbol]
) -> list[drgn.Symbol]:
    """Return symbols, and the others at their address if one of them is no variable.

    kallsyms has no sizes: the last symbol at an address is taken to extend to the next
    one.
    """
    if not any(map(_is_no_variable, found)):
        return found
    if isinstance(finder, SymbolTable):
        return finder.before(found[0].address)[0]
    addresses = {symbol.address for symbol in found}
    symbols = finder(prog, None, None, False)
    return [symbol for symbol in symbols if symbol.address in addresses]


def _name(symbols: list[drgn.Symbol], address: int) -> str | None:
    """Return the name of the innermost variable; prefer global ones."""
    best = _best(symbols)
    if best is None:
        return None
    offset = address - best.address
    return f"{best.name}+{offset:#x}" if offset else str(best.name)


def _best(symbols: list[drgn.Symbol]) -> drgn.Symbol | None:
    data = [symbol for symbol in symbols if symbol.kind != drgn.SymbolKind.FUNC]
    return max(data, key=_fitness, default=None)


def _fitness(symbol: drgn.Symbol) -> tuple[int, bool, bool, int, str]:
    is_global = symbol.binding == drgn.SymbolBinding.GLOBAL
    names = -len(symbol.name), symbol.name
    return symbol.address, not _is_no_variable(symbol), is_global, *names


_LABELS = ("__key", "__per_cpu_start", "__per_cpu_load")


def _is_no_variable(symbol: drgn.Symbol) -> bool:
    """Return whether a symbol has no size, and shares its address with a variable.

    It is one of the linker's labels of the first per-CPU variable, or, without lockdep,
    a ``struct lock_class_key``.
    """
    name: str = symbol.name
    return name in _LABELS or name.startswith("__key.")
