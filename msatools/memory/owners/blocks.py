# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks of pages that owners name by an address in the direct map and an order."""

from collections.abc import Sequence

import drgn
import numpy as np
import numpy.typing as npt

from msatools.errors import MissingError
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.vmemmap import vmemmap_base
from msatools.memory.pages.layout import PageLayout
from msatools.selfdesc.find import find_type, find_variable
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


def heads_of(reader: Reader, layout: PageLayout, pfns: Pfns) -> Pfns:
    """Return the heads of the compound pages that some pages are tails of."""
    base, size = np.uint64(vmemmap_base(reader.prog)), np.uint64(layout.size)
    pages = base + pfns * size
    words, _ = reader.words_near(pages + np.uint64(layout.compound_head))
    tails = words & np.uint64(1) != 0
    info = words[tails]
    heads = pages[tails] & info if layout.compound_mask else info - np.uint64(1)
    found: Pfns = (heads[heads >= base] - base) // size
    return found


def driver_type(prog: drgn.Program, name: str, module: str) -> drgn.Type:
    """Return a structure of a driver, which is built in or a module.

    :raises MissingError: if the kernel has no such driver
    """
    try:
        return find_type(prog, f"struct {name}")
    except MissingError:
        return find_type(prog, f"struct {name}", module)
