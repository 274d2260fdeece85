# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the pages that the kernel's memory pools keep in reserve.

These are pools of single blocks (mm/mempool.c), and those that DMA memory is taken from
where nobody may sleep (kernel/dma/pool.c).
"""

from collections.abc import Iterator

import drgn
import numpy as np
from drgn.helpers.linux.mm import page_to_pfn

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader, fault_reason, is_left_out
from msatools.kernel.report import LossLog
from msatools.kernel.walks import list_records
from msatools.kernel.words import unsigned
from msatools.memory.owners.blocks import (
    NO_PFNS,
    Pfns,
    direct_pfns,
    pages_of_blocks,
)
from msatools.selfdesc.find import (
    ask,
    find_type,
    find_variable,
    member_of,
    offset_of,
)
from msatools.tasks.text import kernel_symbol

_POOLS = (
    # block/bio-integrity.c, since 7.0: two blocks of 2 MiB
    "integrity_buf_pool",
    "blk_crypto_bounce_page_pool",
    "fscrypt_bounce_page_pool",
)
"""Variables that are pools of pages, or pointers to them."""

_DMA_POOLS = ("atomic_pool_dma", "atomic_pool_dma32", "atomic_pool_kernel")
_MAX_CHUNK_BYTES = 1 << 30
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
            losses.lose(Loss.MEMPOOLS, f"cannot read the pages of {name}: {error}")
    parts += _dma_pools(reader, losses)
    return np.concatenate(parts)


def _dma_pools(reader: Reader, losses: LossLog) -> Iterator[Pfns]:
    """Yield the pages of each chunk of the pools; where chunks are mapped anew, they
    are areas of vmalloc."""
    prog = reader.prog
    page = int(find_variable(prog, "PAGE_SIZE").value_())
    for name in _DMA_POOLS:
        try:
            pool = _pool(find_variable(prog, name))
            type_ = find_type(prog, "struct gen_pool_chunk")
            chunks = offset_of(find_type(prog, "struct gen_pool"), "chunks")
            node = member_of(type_, "next_chunk").offset
            first, last = (
                member_of(type_, member).offset for member in ("start_addr", "end_addr")
            )
            if not pool:
                continue
            records = list_records(
                reader, pool + chunks, node, last + 8, losses, name, Loss.MEMPOOLS
            )
            for _, data in records:
                start, end = (unsigned(data, at, 8) for at in (first, last))
                pages = (end + 1 - start) // page
                if 0 < end - start < _MAX_CHUNK_BYTES:
                    pfns = direct_pfns(prog, [start])
                    yield np.concatenate(
                        [NO_PFNS, *(pfn + np.arange(pages, dtype="u8") for pfn in pfns)]
                    )
        except MissingError:
            continue
        except UNREADABLE as error:
            if not is_left_out(error):
                losses.lose(Loss.MEMPOOLS, f"cannot read the pages of {name}: {error}")


def _pool(variable: drgn.Object) -> int:
    """Return the address of a ``struct gen_pool``; 0 if it is not set up."""
    # A structure with the pointer since v7.3.
    if variable.type_.kind == drgn.TypeKind.STRUCT:
        variable = variable.pool
    return int(variable.value_())


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
