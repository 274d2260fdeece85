# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the pages that the kernel's memory pools keep in reserve (mm/mempool.c)."""

import drgn
import numpy as np
from drgn.helpers.linux.mm import page_to_pfn

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader, fault_reason
from msatools.kernel.report import LossLog
from msatools.memory.owners.blocks import NO_PFNS, Pfns, pages_of_blocks
from msatools.selfdesc.find import ask, find_variable
from msatools.tasks.text import kernel_symbol

_POOLS = (
    # block/bio-integrity.c, since 7.0: two blocks of 2 MiB
    "integrity_buf_pool",
    "blk_crypto_bounce_page_pool",
    "fscrypt_bounce_page_pool",
)
"""Variables that are pools of pages, or pointers to them."""

_MAX_ELEMENTS = 1 << 12
"""Upper bound of the number of elements; these pools have 2 to 32."""


def mempool_pages(reader: Reader, losses: LossLog) -> Pfns:
    """Return the pfns of all pages in reserve."""
    parts = [NO_PFNS]
    for name in _POOLS:
        try:
            parts.append(_reserve(find_variable(reader.prog, name)))
        except MissingError:
            continue  # the kernel has no such pool
        except UNREADABLE as error:
            losses.lose(Loss.MEMPOOLS, f"the pages of {name} are lost: {error}")
    return np.concatenate(parts)


def _reserve(pool: drgn.Object) -> Pfns:
    prog = pool.prog_
    try:
        if pool.type_.kind == drgn.TypeKind.POINTER:
            if not pool:
                return NO_PFNS  # not set up
            pool = pool[0]
        if pool.alloc.value_() != kernel_symbol(prog, "mempool_alloc_pages"):
            return NO_PFNS
    except UNREADABLE as error:
        # Most dumps leave out pages of zeros: nothing in it is set up.
        if fault_reason(error) == "excluded":
            return NO_PFNS
        raise
    elements = min(pool.curr_nr.value_(), _MAX_ELEMENTS)
    pfns = [
        ask(page_to_pfn, drgn.cast("struct page *", pool.elements[i])).value_()
        for i in range(elements)
    ]
    order = int(drgn.cast("unsigned long", pool.pool_data))
    return pages_of_blocks(np.array(pfns, np.uint64), [order] * len(pfns))
