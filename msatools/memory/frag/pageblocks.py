# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Migrate types of page blocks.

The kernel keeps pages that can be moved apart from those that cannot by the block of
2^pageblock_order pages, each of which has a type (include/linux/pageblock-flags.h).
With SPARSEMEM the types are bitmaps beside each memory section.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.losses import Loss
from msatools.kernel.pagetables import pmd_order
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.pages.memmap import pages_per_section, section_usages

UNKNOWN_TYPE = 8
"""A type has three bits."""


@dataclass(frozen=True)
class MigrateTypes:
    """The type of each page block of each section."""

    order: int
    """pageblock_order"""

    names: Mapping[int, str]
    sections: npt.NDArray[np.int64]
    """Section numbers, ascending."""

    types: npt.NDArray[np.uint8]
    """Shape ``(sections, page blocks a section)``."""

    def __deepcopy__(self, memo: object) -> "MigrateTypes":
        """Let copies of an observer share them: they do not change."""
        return self

    def __reduce__(self) -> tuple[type["MigrateTypes"], tuple[object, ...]]:
        """Leave them out of what a worker sends back: its parent has them."""
        return MigrateTypes, (self.order, {}, self.sections[:0], self.types[:0])

    def of(self, pfn: int, count: int) -> npt.NDArray[np.uint8]:
        """Return the types of *count* page blocks of one section."""
        section, first = divmod(pfn >> self.order, self.types.shape[1])
        row = int(np.searchsorted(self.sections, section))
        if row == len(self.sections) or self.sections[row] != section:
            return np.full(count, UNKNOWN_TYPE, np.uint8)
        found: npt.NDArray[np.uint8] = self.types[row, first : first + count]
        return found


def migrate_types(reader: Reader, max_order: int, losses: LossLog) -> MigrateTypes:
    """
    Read the migrate types of all page blocks.

    :param max_order: The largest order of the buddy allocator.
    :raises LookupError: if the types lack ``enum migratetype``
    """
    prog = reader.prog
    # include/linux/pageblock-flags.h. An option of newer kernels makes them smaller
    # still (CONFIG_PAGE_BLOCK_MAX_ORDER), of which a dump does not tell.
    order = min(pmd_order(prog), max_order)
    blocks = max(pages_per_section(prog) >> order, 1)
    bits, isolate = _bits(prog)
    bitmaps = _bitmaps(reader, losses)
    sections = np.array(sorted(bitmaps), np.int64)
    addresses = np.array([bitmaps[nr] for nr in sections.tolist()], np.uint64)
    records, readable = reader.read_records(addresses, -(-blocks * bits // 8))
    words = _unpack(records, bits)[:, :blocks]
    types = words & np.uint8(7)
    if isolate is not None:
        isolated = words >> np.uint8(isolate) & np.uint8(1) != 0
        types[isolated] = prog.constant("MIGRATE_ISOLATE").value_()
    types[~readable] = UNKNOWN_TYPE
    lost = int(np.count_nonzero(~readable))
    losses.lose(Loss.PAGE_BLOCKS, count=blocks * lost)
    return MigrateTypes(order, _names(prog), sections, types)


def _bitmaps(reader: Reader, losses: LossLog) -> dict[int, int]:
    """Find the address of each section's bitmap of page blocks."""
    try:
        usages = section_usages(reader, losses)
        member = reader.prog.type("struct mem_section_usage").member("pageblock_flags")
    except (LookupError, drgn.FaultError) as error:
        losses.lose(Loss.PAGE_BLOCKS, f"migrate types of page blocks are lost: {error}")
        return {}
    # Where damage leads beyond the last address, nothing can be read either.
    return {nr: (usage + member.offset) % (1 << 64) for nr, usage in usages.items()}


def _names(prog: drgn.Program) -> dict[int, str]:
    names = {}
    for each in prog.type("enum migratetype").enumerators or ():
        # Some mark the end of others, and share their number with a true one.
        if each.name not in ("MIGRATE_PCPTYPES", "MIGRATE_TYPES", "__MIGRATE_TYPE_END"):
            names[each.value] = each.name.removeprefix("MIGRATE_").lower()
    return names


def _bits(prog: drgn.Program) -> tuple[int, int | None]:
    """Find the bits a page block, and which of them says that it is isolated."""
    try:
        enumerators = prog.type("enum pageblock_bits").enumerators or ()
    except LookupError:
        return 4, None
    values = {each.name: each.value for each in enumerators}
    # "mm/page_isolation: make page isolation a standalone bit" (in v6.17): the type is
    # kept meanwhile, and the bits are rounded up so that they align on a word.
    count = values.get("__NR_PAGEBLOCK_BITS", values.get("NR_PAGEBLOCK_BITS", 4))
    return 1 << (count - 1).bit_length(), values.get("PB_migrate_isolate")


def _unpack(records: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Split bytes into words of 4 or 8 bits, the lowest first."""
    if bits == 8:
        return records
    words = np.empty((records.shape[0], 2 * records.shape[1]), np.uint8)
    words[:, 0::2] = records & np.uint8(15)
    words[:, 1::2] = records >> np.uint8(4)
    return words
