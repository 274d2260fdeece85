# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks of pages that owners name by an address in the direct map and an order."""

from collections.abc import Sequence

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Addresses
from msatools.selfdesc.find import find_variable
from msatools.target.addresses import code_start
from msatools.target.linear import page_address

MAX_ORDER = 20
"""Above every MAX_PAGE_ORDER."""

Pfns = npt.NDArray[np.uint64]
NO_PFNS: Pfns = np.empty(0, np.uint64)


def direct_pfns(prog: drgn.Program, addresses: Addresses | Sequence[int]) -> Pfns:
    """Return the pfns of addresses in the direct map; others are left out."""
    words = np.asarray(addresses, np.uint64)
    start, end = np.uint64(page_address(prog, 0)), np.uint64(code_start(prog))
    direct = words[(words >= start) & (words < end)]
    shift = np.uint64(find_variable(prog, "PAGE_SHIFT").value_())
    pfns: Pfns = direct - start >> shift
    return pfns


def pages_of_blocks(pfns: Pfns, orders: Sequence[int] | npt.NDArray[np.int64]) -> Pfns:
    """Return all pages of blocks of ``1 << order`` pages; absurd orders are damage."""
    parts = [NO_PFNS]
    for pfn, order in zip(pfns.tolist(), list(orders), strict=True):
        if 0 <= order <= MAX_ORDER:
            parts.append(np.arange(pfn, pfn + (1 << int(order)), dtype=np.uint64))
    return np.concatenate(parts)
