# SPDX-License-Identifier: LGPL-2.1-or-later

"""Symbols sorted by address."""

from collections.abc import Sequence

import drgn
import numpy as np


class SortedSymbols:
    """
    The symbols of some ranges of memory, looked up by the nearest start address.

    With debug info, drgn searches all symbols for each address, which takes
    milliseconds; with kallsyms it finds no symbol larger than 64 KiB.
    """

    def __init__(
        self, symbols: Sequence[drgn.Symbol], bounds: Sequence[tuple[int, int]]
    ) -> None:
        """
        :param bounds: Start and end of each range.
        """
        addresses = np.array([symbol.address for symbol in symbols], np.uint64)
        inside = np.zeros(len(symbols), np.bool_)
        for start, end in bounds:
            inside |= (addresses >= np.uint64(start)) & (addresses < np.uint64(end))
        rows = np.flatnonzero(inside)
        order = rows[np.argsort(addresses[rows], kind="stable")]
        self._addresses = addresses[order]
        self._symbols = [symbols[row] for row in order.tolist()]

    def before(self, address: int) -> tuple[list[drgn.Symbol], int | None]:
        """
        Find the symbols with the highest start address up to *address*.

        :return: All symbols that start there, which may be none, and the start of the
            next symbol, ``None`` if there is no next.
        """
        addresses = self._addresses
        past = int(np.searchsorted(addresses, np.uint64(address), "right"))
        following = int(addresses[past]) if past < len(addresses) else None
        if not past:
            return [], following
        first = int(np.searchsorted(addresses, addresses[past - 1], "left"))
        return self._symbols[first:past], following
