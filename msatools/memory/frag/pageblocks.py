# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Reads the migrate types of page blocks.

The kernel groups movable and unmovable pages in separate blocks of 2^pageblock_order
pages. Each block has a type (include/linux/pageblock-flags.h). With SPARSEMEM a bitmap
of each memory section holds the types (struct mem_section_usage).
"""

from collections.abc import Mapping

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import LOST, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.pagetables import pmd_order
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.pages.memmap import pages_per_section, section_usages
from msatools.selfdesc.find import find_constant, find_type, member_of

UNKNOWN_TYPE = 8
"""Not a type: a type has three bits."""


class MigrateTypes(Struct, frozen=True):
    """The type of each page block of each section."""

    order: int
    """``pageblock_order``."""

    names: Mapping[int, str]
    """Names by type."""

    sections: npt.NDArray[np.int64]
    """Section numbers, ascending."""

    types: npt.NDArray[np.uint8]
    """Types, shape ``(sections, page blocks of a section)``."""

    def __deepcopy__(self, memo: object) -> "MigrateTypes":
        """Return itself: copies of an observer share these constants."""
        return self

    def __reduce__(self) -> tuple[type["MigrateTypes"], tuple[object, ...]]:
        """Pickle without data: the parent of a worker has them already."""
        return MigrateTypes, (self.order, {}, self.sections[:0], self.types[:0])

    def of(self, pfn: int, count: int) -> npt.NDArray[np.uint8]:
        """Return the types of *count* page blocks of one section."""
        section, first = divmod(pfn >> self.order, self.types.shape[1])
        row = int(np.searchsorted(self.sections, section))
        if row == len(self.sections) or self.sections[row] != section:
            return np.full(count, UNKNOWN_TYPE, np.uint8)
        types: npt.NDArray[np.uint8] = self.types[row, first : first + count]
        return types


def migrate_types(reader: Reader, max_order: int, losses: LossLog) -> MigrateTypes:
    """
    Read the migrate types of all page blocks.

    :param max_order: The largest order of the buddy allocator.
    :raises MissingError: if the types lack ``enum migratetype``
    """
    prog = reader.prog
    # include/linux/pageblock-flags.h. CONFIG_PAGE_BLOCK_MAX_ORDER of newer kernels may
    # lower it; a dump does not record that.
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
        types[isolated] = find_constant(prog, "MIGRATE_ISOLATE").value_()
    types[~readable] = UNKNOWN_TYPE
    lost = int(np.count_nonzero(~readable))
    losses.lose(Loss.PAGE_BLOCKS, count=blocks * lost)
    return MigrateTypes(order, _names(prog), sections, types)


def _bitmaps(reader: Reader, losses: LossLog) -> dict[int, int]:
    """Return the address of each section's bitmap of page blocks."""
    try:
        usages = section_usages(reader, losses)
        member = member_of(
            find_type(reader.prog, "struct mem_section_usage"), "pageblock_flags"
        )
    except LOST as error:
        losses.lose(
            Loss.PAGE_BLOCKS, f"cannot read migrate types of page blocks: {error}"
        )
        return {}
    # A damaged address wraps round: it is unreadable either way.
    return {nr: (usage + member.offset) % (1 << 64) for nr, usage in usages.items()}


def _names(prog: drgn.Program) -> dict[int, str]:
    names = {}
    for item in find_type(prog, "enum migratetype").enumerators or ():
        # Limits such as MIGRATE_PCPTYPES share their value with a real type.
        if item.name not in ("MIGRATE_PCPTYPES", "MIGRATE_TYPES", "__MIGRATE_TYPE_END"):
            names[item.value] = item.name.removeprefix("MIGRATE_").lower()
    return names


def _bits(prog: drgn.Program) -> tuple[int, int | None]:
    """Return the number of bits of a page block, and the bit that marks isolation."""
    try:
        enumerators = find_type(prog, "enum pageblock_bits").enumerators or ()
    except MissingError:
        return 4, None
    values = {item.name: item.value for item in enumerators}
    # "mm/page_isolation: make page isolation a standalone bit" (in v6.17): an isolated
    # block keeps its type, and the number of bits is rounded up to a power of two.
    count = values.get("__NR_PAGEBLOCK_BITS", values.get("NR_PAGEBLOCK_BITS", 4))
    return 1 << (count - 1).bit_length(), values.get("PB_migrate_isolate")


def _unpack(records: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Split bytes into values of 4 or 8 bits, the lowest first."""
    if bits == 8:
        return records
    words = np.empty((records.shape[0], 2 * records.shape[1]), np.uint8)
    words[:, 0::2] = records & np.uint8(15)
    words[:, 1::2] = records >> np.uint8(4)
    return words
