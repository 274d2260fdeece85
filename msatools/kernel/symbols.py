# SPDX-License-Identifier: LGPL-2.1-or-later

"""Symbols in the order of their addresses."""

from collections.abc import Sequence

import drgn
import numpy as np


class SortedSymbols:
    """
    The symbols of some parts of memory, by the nearest that begins before an address.

    With debug info drgn reads through all symbols for each address, which takes
    milliseconds; and with kallsyms it finds none that is larger than 64 KiB.
    """

    def __init__(
        self, symbols: Sequence[drgn.Symbol], bounds: Sequence[tuple[int, int]]
    ) -> None:
        """
        :param bounds: The parts, each from its start to its end.
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
        Find the symbols nearest to an address of those that begin there or before.

        :return: All that begin where these do, none if no symbol does, and the address
            at which the next one begins, ``None`` if none does.
        """
        addresses = self._addresses
        past = int(np.searchsorted(addresses, np.uint64(address), "right"))
        following = int(addresses[past]) if past < len(addresses) else None
        if not past:
            return [], following
        first = int(np.searchsorted(addresses, addresses[past - 1], "left"))
        return self._symbols[first:past], following
