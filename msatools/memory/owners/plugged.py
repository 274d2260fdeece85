# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the memmap of plugged memory that lies on the memory itself.

That is so with memory_hotplug.memmap_on_memory (mm/memory_hotplug.c): the first pages
of a block were never given to the page allocator.
"""

import drgn
import numpy as np

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.xarray import xarray_entries
from msatools.memory.owners.blocks import NO_PFNS, Pfns
from msatools.memory.pages.memmap import pages_per_section
from msatools.selfdesc.find import drgn_lookups, find_type, find_variable

_MOST_BLOCKS = 1 << 20
_MOST_PAGES = 1 << 20
"""Upper bound of the pages of a block's memmap: that of 256 GiB."""


def self_hosted_pages(reader: Reader, losses: LossLog) -> Pfns:
    """Return the pfns of all pages that hold the memmap of their own block."""
    prog = reader.prog
    try:
        with drgn_lookups:
            root = find_variable(prog, "memory_blocks").address_
            type_ = find_type(prog, "struct memory_block")
    except MissingError:
        return NO_PFNS  # CONFIG_MEMORY_HOTPLUG=n
    # A count until 1a8c64e11043 ("mm/memory_hotplug: embed vmem_altmap details in
    # memory block") (in v6.6); none before v5.14.
    has_altmap = type_.has_member("altmap")
    if not has_altmap and not type_.has_member("nr_vmemmap_pages"):
        return NO_PFNS
    entries = xarray_entries(reader, root, losses, "the blocks of memory")
    each = pages_per_section(prog)
    parts = [NO_PFNS]
    for address in sorted({entry for _, _, entry in entries})[:_MOST_BLOCKS]:
        block = drgn.Object(prog, type_, address=address)
        try:
            if has_altmap:
                count = int(block.altmap.free) if block.altmap else 0
            else:
                count = int(block.nr_vmemmap_pages)
            first = int(block.start_section_nr) * each
        except UNREADABLE as error:
            losses.lose(Loss.OWNERS, f"cannot read a block of memory: {error}")
            continue
        if 0 < count <= _MOST_PAGES:
            parts.append(np.arange(first, first + count, dtype=np.uint64))
    return np.concatenate(parts)
