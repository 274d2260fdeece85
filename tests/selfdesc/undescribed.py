# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kernels that do not describe themselves: some of their symbols are hidden."""

import re
from typing import Any

from drgn import SymbolIndex


class Symbols:
    """The symbols of a kernel, but for some."""

    def __init__(self, symbols: SymbolIndex, hidden: str) -> None:
        self.symbols = symbols
        self.hidden = re.compile(hidden)

    def __call__(self, *words: Any) -> list[Any]:
        found = self.symbols(*words)
        return [s for s in found if not self.hidden.fullmatch(s.name)]
