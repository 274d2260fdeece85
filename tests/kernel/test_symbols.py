# SPDX-License-Identifier: LGPL-2.1-or-later

"""The nearest symbols before an address, and the address of the next one."""

import numpy as np
import pytest
from drgn import Symbol, SymbolBinding, SymbolKind

from msatools.kernel.code import SortedSymbols
from msatools.selfdesc.tables import NONE, SymbolTable

LAST = (1 << 64) - 1


def symbol(name: str, address: int) -> Symbol:
    return Symbol(name, address, 0, SymbolBinding.GLOBAL, SymbolKind.OBJECT)


SYMBOLS = [
    symbol("b", 0x200),
    symbol("outside", 0x300),
    symbol("a", 0x100),
    symbol("b_too", 0x200),
    symbol("last", LAST),
]


@pytest.mark.parametrize(
    ("address", "names", "following"),
    [
        (0, [], 0x100),
        (0xFF, [], 0x100),
        (0x100, ["a"], 0x200),
        (0x1FF, ["a"], 0x200),
        (0x200, ["b", "b_too"], LAST - 1),
        (0x300, ["b", "b_too"], LAST - 1),
        (LAST - 1, ["next to last"], None),
        (LAST, ["next to last"], None),
    ],
)
def test_nearest(address: int, names: list[str], following: int | None) -> None:
    bounds = [(0x100, 0x300), (LAST - 1, LAST)]
    found = SortedSymbols([*SYMBOLS, symbol("next to last", LAST - 1)], bounds)
    symbols, after = found.before(address)
    assert ([one.name for one in symbols], after) == (names, following)


@pytest.mark.parametrize(
    ("address", "names", "following"),
    [(0x100, ["a"], 0x200), (0x200, ["c"], 0x300), (0x300, [], None)],
)
def test_nearest_where_names_are_lost(
    address: int, names: list[str], following: int | None
) -> None:
    starts = np.array([0, NONE, 3, NONE], np.uint32)
    addresses = np.array([0x100, 0x200, 0x200, 0x300], np.uint64)
    table = SymbolTable(b"Ta\0Dc\0", starts, lambda name: [], addresses)
    symbols, after = table.before(address)
    assert ([one.name for one in symbols], after) == (names, following)


def test_no_symbols() -> None:
    assert SortedSymbols([], [(0, LAST)]).before(5) == ([], None)
