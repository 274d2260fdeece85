# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels that do not describe themselves: symbols are hidden, or memory is another."""

import re
from typing import Any

from drgn import Program, SymbolIndex


class Symbols:
    """The symbols of a kernel, but for some."""

    def __init__(self, symbols: SymbolIndex, hidden: str) -> None:
        self.symbols = symbols
        self.hidden = re.compile(hidden)

    def __call__(self, *words: Any) -> list[Any]:
        found = self.symbols(*words)
        return [s for s in found if not self.hidden.fullmatch(s.name)]


def overlay(prog: Program, address: int, data: bytes) -> None:
    """Have a program read something else in a place."""

    def read(at: int, count: int, offset: int, physical: bool) -> bytes:
        return data[offset : offset + count]

    prog.add_memory_segment(address, len(data), read)
