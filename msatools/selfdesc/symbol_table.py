# SPDX-License-Identifier: LGPL-2.1-or-later

"""Symbols of the kernel proper, by name and by address.

It does what drgn's own loader of kallsyms does, in a tenth of the time: that one reads
each name by itself and sorts all of them, which takes longer than most reports.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from drgn import Program, Symbol, SymbolBinding, SymbolKind

from msatools.selfdesc.tables import NONE, Words

_MAX_SIZE = 0x10000
"""Distance to the next symbol from which a symbol's size is unknown; as in drgn."""

# Letters as in nm(1); lower-case ones are usually local, but not always.
_KINDS = {
    **dict.fromkeys("bcdgrv", SymbolKind.OBJECT),
    "t": SymbolKind.FUNC,
}
_WEAK = "vVwW"

Symbols = Callable[[Program, str | None, int | None, bool], list[Symbol]]
"""``symbols(prog, name, address, one)`` as of drgn's symbol finders."""


class SymbolTable:
    """The symbols of a table, which is called as drgn's ``SymbolIndex`` is.

    :param text: Each symbol's letter and name, with a NUL at the end; ASCII.
    :param starts: Where these begin.
    :param rows_of: Returns the rows of a name.
    :param addresses: The symbols' addresses, ascending.
    :param lost: Number of symbols whose name or address is lost. Their rows begin at
        :data:`NONE`.
    """

    def __init__(
        self,
        text: bytes,
        starts: Words,
        rows_of: Callable[[str], list[int]],
        addresses: npt.NDArray[np.uint64],
        lost: int = 0,
    ) -> None:
        self._text = text
        self._starts = starts
        self._rows_of = rows_of
        self._addresses = addresses
        self.lost = lost

    def __call__(
        self, prog: Program, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        """Return the symbols of a name, or those that contain an address, or both."""
        found = []
        for row in self._rows(name, address):
            if self._starts[row] == NONE:
                continue
            symbol = self._symbol(row)
            if address is None or _contains(symbol, address):
                found.append(symbol)
                if one:
                    break
        return found

    def before(self, address: int) -> tuple[list[Symbol], int | None]:
        """Find the symbols with the highest start address up to *address*.

        Other lookups by address find no symbol that is large, or shares its address.

        :return: All symbols that start there, which may be none, and the start of the
            next symbol, ``None`` if there is no next.
        """
        addresses = self._addresses
        past = int(np.searchsorted(addresses, np.uint64(address), "right"))
        following = int(addresses[past]) if past < len(addresses) else None
        if not past:
            return [], following
        first = int(np.searchsorted(addresses, addresses[past - 1], "left"))
        return [self._symbol(row) for row in range(first, past)], following

    def _rows(self, name: str | None, address: int | None) -> Iterable[int]:
        if name is not None:
            return self._rows_of(name)
        if address is None:
            return range(len(self._addresses))
        # Of several symbols at one address only the last has a size.
        after = int(np.searchsorted(self._addresses, np.uint64(address), "right"))
        return range(after - 1, after) if after else ()

    def _symbol(self, row: int) -> Symbol:
        start = int(self._starts[row])
        end = self._text.index(b"\0", start)
        letter, name = chr(self._text[start]), self._text[start + 1 : end]
        address = int(self._addresses[row])
        size = 0
        if row + 1 < len(self._addresses):
            distance = int(self._addresses[row + 1]) - address
            size = distance if distance < _MAX_SIZE else 0
        return Symbol(
            name.decode("ascii"),
            address,
            size,
            _binding(letter),
            _KINDS.get(letter.lower(), SymbolKind.UNKNOWN),
        )


def lost_symbols(symbols: Symbols) -> int:
    """Return the number of symbols that were lost with pages of their table."""
    return symbols.lost if isinstance(symbols, SymbolTable) else 0


def _contains(symbol: Symbol, address: int) -> bool:
    return bool(symbol.address <= address < symbol.address + symbol.size)


def _binding(letter: str) -> SymbolBinding:
    if letter == "u":
        return SymbolBinding.UNIQUE
    if letter in _WEAK:
        return SymbolBinding.WEAK
    return SymbolBinding.GLOBAL if letter.isupper() else SymbolBinding.UNKNOWN
