# SPDX-License-Identifier: LGPL-2.1-or-later

"""Fragmentation: the pages that keep blocks of memory from being free (``--frag``)."""

from collections.abc import Mapping, Sequence

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.mm import Zone, pmd_order
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import Loss, LossLog
from msatools.memory.classes import CLASSES, NCLASSES, PageClass
from msatools.memory.classify import (
    ORDERS,
    Block,
    Counts,
    class_counts,
    free_blocks,
    node_and_zone,
    node_zone_keys,
)
from msatools.memory.memmap import pages_per_section, section_usages
from msatools.memory.model import Blocker, BlockSize, Frag, FreeList, Needed, PageBlocks
from msatools.memory.owners import ScanContext
from msatools.model import names
from msatools.selfdesc.find import find_constant, find_type, member_of

# --- Reads the migrate types of page blocks.
#
# The kernel groups movable and unmovable pages in separate blocks of 2^pageblock_order
# pages. Each block has a type (include/linux/pageblock-flags.h). With SPARSEMEM a
# bitmap of each memory section holds the types (struct mem_section_usage).


UNKNOWN_TYPE = 8
"""Stands for a type that could not be read; real types are 0 to 7."""


class MigrateTypes(Struct, frozen=True):
    """The type of each page block of each section."""

    order: int
    """``pageblock_order``."""

    names: Mapping[int, str]
    """Name of each type, such as ``movable``."""

    sections: npt.NDArray[np.int64]
    """Section numbers, ascending."""

    types: npt.NDArray[np.uint8]
    """Types, shape ``(sections, page blocks of a section)``."""

    def __deepcopy__(self, memo: object) -> "MigrateTypes":
        """Return itself: copies of an observer share these constants."""
        return self

    def __reduce__(self) -> tuple[type["MigrateTypes"], tuple[object, ...]]:
        """Pickle without data: the process that receives the copy has them already."""
        return MigrateTypes, (self.order, {}, self.sections[:0], self.types[:0])

    def of(self, pfn: int, count: int) -> npt.NDArray[np.uint8]:
        """Return the types of *count* page blocks of one section, from *pfn* on."""
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
    # lower the order; a dump does not record that.
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
    """Return the number of bits of a page block, and the number of the bit that marks
    isolation; ``None`` if isolation is a type."""
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


# --- Sums up blocks of memory by state: free, movable, blocked and so on.


FREE = (PageClass.FREE_BUDDY, PageClass.FREE_PCP)

MOVABLE = (
    PageClass.ANON,
    PageClass.KSM,
    PageClass.FILE,
    PageClass.EXEC,
    PageClass.SHMEM,
    PageClass.BLOCKDEV,
    PageClass.ZSMALLOC,
    PageClass.MOVABLE,
)
"""
Classes that compaction moves (isolate_migratepages_block() in mm/compaction.c).

Pages with a long-term pin, such as for DMA, cannot be moved either, but struct page
does not show it reliably. Hugetlb pages are moved only for alloc_contig_range().
"""

_MISSING = (PageClass.EXCLUDED, PageClass.UNREADABLE)

STATES = 5
IS_WHOLE, IS_FREE, IS_MOVABLE, IS_BLOCKED, IS_PARTIAL = range(STATES)


def _unmovable() -> npt.NDArray[np.bool_]:
    mask = np.zeros(NCLASSES, np.bool_)
    mask[list(CLASSES)] = True
    mask[[*FREE, *MOVABLE, *_MISSING]] = False
    return mask


UNMOVABLE = _unmovable()


class BlockRows(Struct):
    """Page blocks, or their scanned parts, as rows in pfn order."""

    numbers: npt.NDArray[np.int64]
    """First pfn divided by the pages of a block."""

    counts: Counts
    """Pages by class."""

    heads: npt.NDArray[np.int64]
    """Number of pages that are not tails of compound pages."""

    types: npt.NDArray[np.uint8]
    keys: npt.NDArray[np.int64]
    """Node and zone key of the first page."""

    begins: npt.NDArray[np.bool_]
    """Whether the row includes the first page of the block."""


def joined(parts: Sequence[BlockRows]) -> BlockRows:
    return BlockRows(
        *(
            np.concatenate([getattr(part, column) for part in parts])
            for column in names(BlockRows)
        )
    )


class Blocks(Struct):
    """Blocks of one size by state, and the unmovable pages of blocked ones."""

    size: int
    """Pages of a block."""

    states: Counts = field(default_factory=lambda: np.zeros(STATES, np.int64))
    moved: int = 0
    """Pages in use in movable blocks."""

    having: Counts = field(default_factory=lambda: np.zeros(NCLASSES, np.int64))
    """Blocked blocks by class of their unmovable pages; a block counts once for each of
    its classes."""

    alone: Counts = field(default_factory=lambda: np.zeros(NCLASSES, np.int64))
    """Blocked blocks whose unmovable pages are all of one class, by that class."""

    pages: Counts = field(default_factory=lambda: np.zeros(NCLASSES, np.int64))
    """Unmovable pages in blocked blocks, by class."""

    needed: Counts = field(default_factory=lambda: np.zeros(64, np.int64))
    """Blocked blocks by log2 of their unmovable pages, rounded up."""

    def add(self, counts: Counts, heads: npt.NDArray[np.int64]) -> None:
        """
        Add blocks.

        :param counts: Pages by class, shape ``(blocks, NCLASSES)``.
        :param heads: Pages of each block that are not tails of compound pages.
        """
        present = counts.sum(axis=1) - counts[:, _MISSING].sum(axis=1)
        unmovable = counts[:, UNMOVABLE].sum(axis=1)
        state = np.full(len(counts), IS_BLOCKED)
        state[unmovable == 0] = IS_MOVABLE
        state[counts[:, PageClass.FREE_BUDDY] == self.size] = IS_FREE
        # Compound pages are aligned to their size: a block with at most one head is in
        # a single compound page.
        state[heads <= 1] = IS_WHOLE
        state[present != self.size] = IS_PARTIAL
        self.states += np.bincount(state, minlength=STATES)
        self.moved += int(counts[state == IS_MOVABLE][:, MOVABLE].sum())
        blocked, pages = counts[state == IS_BLOCKED], unmovable[state == IS_BLOCKED]
        if not len(blocked):
            return
        has = (blocked > 0) & UNMOVABLE
        self.having += has.sum(axis=0)
        self.alone += has[has.sum(axis=1) == 1].sum(axis=0)
        self.pages += (blocked * UNMOVABLE).sum(axis=0)
        logarithms = np.ceil(np.log2(pages)).astype(np.intp)
        self.needed += np.bincount(logarithms, minlength=len(self.needed))

    def merge(self, later: "Blocks") -> None:
        self.states += later.states
        self.moved += later.moved
        self.having += later.having
        self.alone += later.alone
        self.pages += later.pages
        self.needed += later.needed


class Pieces(Struct):
    """Sums up blocks of one size, which may be larger than a block of the scan."""

    done: Blocks
    """Sums of the complete blocks."""

    counts: dict[int, Counts] = field(default_factory=dict)
    """Pages by class of each incomplete block, by number of the block."""

    heads: dict[int, int] = field(default_factory=dict)
    """Number of pages of each incomplete block that are not tails."""

    def add(self, rows: "BlockRows", block_pages: int) -> None:
        """
        Add the counts of page blocks.

        :param block_pages: Pages of a page block; a row may have fewer.
        """
        numbers = rows.numbers * block_pages // self.done.size
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        counts = np.add.reduceat(rows.counts, starts, axis=0)
        heads, numbers = np.add.reduceat(rows.heads, starts), numbers[starts]
        whole = counts.sum(axis=1) == self.done.size
        self.done.add(counts[whole], heads[whole])
        for i in np.flatnonzero(~whole).tolist():
            self._add(int(numbers[i]), counts[i], int(heads[i]))

    def _add(self, number: int, counts: Counts, heads: int) -> None:
        if number in self.counts:
            self.counts[number] = self.counts[number] + counts
            self.heads[number] += heads
        else:
            self.counts[number], self.heads[number] = counts, heads

    def merge(self, later: "Pieces") -> None:
        self.done.merge(later.done)
        for number, counts in later.counts.items():
            self._add(number, counts, later.heads[number])

    def total(self) -> Blocks:
        total = Blocks(self.done.size)
        total.merge(self.done)
        if self.counts:
            heads = np.array(list(self.heads.values()), np.int64)
            total.add(np.array(list(self.counts.values())), heads)
        return total


# --- Finds the pages that keep blocks of memory from being free (--frag).


_GIB = 1 << 30

_MOST_KEPT = 64
"""Maximum number of blocks of the scan, 64 MiB each, to keep before summing up."""

_BLOCKS, _MIXED, _POLLUTED = NCLASSES, NCLASSES + 1, NCLASSES + 2
"""Columns after the columns of the classes: all page blocks; blocks with both movable
and unmovable pages; blocks with unmovable pages."""


class FragObserver(Struct):
    """Sums up page blocks and larger blocks for ``--frag``."""

    types: MigrateTypes
    sizes: tuple[Pieces, ...]
    free: dict[int, Counts] = field(default_factory=dict)
    """Maps a node and zone key to the number of free blocks by order."""

    pageblocks: dict[int, Counts] = field(default_factory=dict)
    """Maps a node and zone key to sums of page blocks, of the shape
    ``(types, NCLASSES + 3)``."""

    _kept: list[BlockRows] = field(default_factory=list)
    """Rows not yet summed up: numpy is faster with many rows at once."""

    def observe(self, block: Block) -> None:
        keys = node_zone_keys(block)
        self._add_free(block, keys)
        size = 1 << self.types.order
        first, skip = divmod(block.pfn, size)
        counts = class_counts(block.codes, size, skip)
        heads = counts.sum(axis=1)
        if len(block.tails):
            heads -= np.bincount((block.tails + skip) // size, minlength=len(heads))
        numbers = np.arange(len(counts))
        # The kernel takes the zone of a block from its first page (mm/vmstat.c).
        begins = np.maximum(numbers * size - skip, 0)
        self._kept.append(
            BlockRows(
                numbers=first + numbers,
                counts=counts,
                heads=heads,
                types=self.types.of(block.pfn, len(counts)),
                keys=np.full(len(counts), keys)
                if isinstance(keys, int)
                else keys[begins],
                begins=numbers * size >= skip,
            )
        )
        if len(self._kept) >= _MOST_KEPT:
            self.sum_up()

    def _add_free(self, block: Block, keys: int | npt.NDArray[np.int64]) -> None:
        firsts, orders = free_blocks(block)
        if isinstance(keys, int):
            self._count_free(keys, orders)
            return
        block_keys = keys[firsts]
        for key in distinct(block_keys).tolist():
            self._count_free(key, orders[block_keys == key])

    def _count_free(self, key: int, orders: npt.NDArray[np.intp]) -> None:
        counts = self.free.setdefault(key, np.zeros(ORDERS + 1, np.int64))
        counts += np.bincount(orders, minlength=ORDERS + 1)

    def sum_up(self) -> None:
        """Sum up the rows kept since the last call."""
        if not self._kept:
            return
        rows, self._kept = joined(self._kept), []
        used = rows.counts[:, MOVABLE].any(axis=1)
        polluted = rows.counts[:, UNMOVABLE].any(axis=1)
        values = np.column_stack((rows.counts, rows.begins, used & polluted, polluted))
        for key in distinct(rows.keys).tolist():
            here = rows.keys == key
            empty = np.zeros((UNKNOWN_TYPE + 1, values.shape[1]), np.int64)
            sums = self.pageblocks.setdefault(key, empty)
            for number in distinct(rows.types[here]).tolist():
                sums[number] += values[here & (rows.types == number)].sum(axis=0)
        for size in self.sizes:
            size.add(rows, 1 << self.types.order)

    def merge(self, later: "FragObserver") -> None:
        self.sum_up()
        later.sum_up()
        for size, other in zip(self.sizes, later.sizes, strict=True):
            size.merge(other)
        for mine, others in (
            (self.free, later.free),
            (self.pageblocks, later.pageblocks),
        ):
            for key, counts in others.items():
                mine[key] = mine[key] + counts if key in mine else counts


class FragView:
    """Fragmentation of a kernel's memory."""

    def __init__(self, context: ScanContext) -> None:
        self._context = context
        prog = context.prog
        self._huge_order = pmd_order(prog)
        # NR_PAGE_ORDERS, which was called MAX_ORDER up to v6.3.
        area = member_of(find_type(prog, "struct zone"), "free_area").type
        self._orders: int = area.length
        types = migrate_types(context.reader, self._orders - 1, context.losses)
        pages = dict.fromkeys((1 << self._huge_order, _GIB // context.page_size))
        sizes = tuple(Pieces(Blocks(size)) for size in pages)
        self.observer = FragObserver(types, sizes)

    def result(self) -> Frag:
        """Return the result after the scan."""
        self.observer.sum_up()
        types = self.observer.types
        return Frag(
            huge_order=self._huge_order,
            pageblock_order=types.order,
            free=tuple(
                _free_list(zone, counts, self._orders, self._huge_order)
                for zone, counts in self._by_zone(self.observer.free)
            ),
            pageblocks=tuple(
                _pageblocks(zone, types.names.get(number, "-"), row)
                for zone, rows in self._by_zone(self.observer.pageblocks)
                for number, row in enumerate(rows)
                if row[_BLOCKS]
            ),
            sizes=tuple(
                _block_size(size.total(), self._context.page_size)
                for size in self.observer.sizes
            ),
            movable=tuple(CLASSES[code] for code in MOVABLE),
        )

    def _by_zone(self, sums: Mapping[int, Counts]) -> list[tuple[Zone, Counts]]:
        by_zone = []
        for key in sorted(sums):
            pair = node_and_zone(key, self._context.layout)
            zone = None if pair is None else self._context.zones.get(pair)
            if zone is not None:
                by_zone.append((zone, sums[key]))
        return by_zone


def _free_list(zone: Zone, counts: Counts, orders: int, huge: int) -> FreeList:
    blocks = tuple(counts[: max(orders, 1)].tolist())
    return FreeList(
        node=zone.node,
        zone=zone.name,
        pages=_pages(blocks),
        blocks=blocks,
        kernel_blocks=_kernel_blocks(zone),
        unusable_permille=unusable(blocks, huge),
        fragmentation_permille=fragmentation(blocks, huge),
    )


def _kernel_blocks(zone: Zone) -> tuple[int, ...] | None:
    try:
        return tuple(area.nr_free.value_() for area in zone.object.free_area)
    except UNREADABLE:
        return None


def _pageblocks(zone: Zone, name: str, row: Counts) -> PageBlocks:
    return PageBlocks(
        node=zone.node,
        zone=zone.name,
        type=name,
        blocks=int(row[_BLOCKS]),
        free_pages=int(row[list(FREE)].sum()),
        movable_pages=int(row[list(MOVABLE)].sum()),
        unmovable_pages=int(row[:NCLASSES][UNMOVABLE].sum()),
        mixed_blocks=int(row[_MIXED]),
        polluted_blocks=int(row[_POLLUTED]),
    )


def _block_size(blocks: Blocks, page_size: int) -> BlockSize:
    blockers = [
        Blocker(name, int(blocks.having[code]), int(blocks.alone[code]), pages)
        for code, name in CLASSES.items()
        if (pages := int(blocks.pages[code]))
    ]
    return BlockSize(
        order=blocks.size.bit_length() - 1,
        bytes=blocks.size * page_size,
        blocks=int(blocks.states.sum()),
        free_blocks=int(blocks.states[IS_FREE]),
        whole_blocks=int(blocks.states[IS_WHOLE]),
        movable_blocks=int(blocks.states[IS_MOVABLE]),
        movable_pages=blocks.moved,
        blocked_blocks=int(blocks.states[IS_BLOCKED]),
        partial_blocks=int(blocks.states[IS_PARTIAL]),
        blockers=tuple(sorted(blockers, key=lambda blocker: -blocker.blocks)),
        needed=tuple(
            Needed(1 << power, int(count))
            for power, count in enumerate(blocks.needed)
            if count
        ),
    )


def unusable(blocks: tuple[int, ...], order: int) -> int | None:
    """Return the kernel's unusable free space index, in thousandths.

    :param blocks: Number of free blocks by order.
    :return: ``None`` without free pages.
    """
    free = _pages(blocks)
    if not free:
        return None
    small = _pages(blocks[:order])
    return small * 1000 // free


def fragmentation(blocks: tuple[int, ...], order: int) -> int | None:
    """Return the kernel's external fragmentation index, in thousandths.

    :return: ``None`` if a block of the order is free.
    """
    if any(blocks[order:]):
        return None
    total = sum(blocks)
    if not total:
        return 0
    return 1000 - (1000 + (_pages(blocks) * 1000 >> order)) // total


def _pages(blocks: tuple[int, ...]) -> int:
    """Return the number of pages in free blocks, given their numbers by order."""
    return sum(count << order for order, count in enumerate(blocks))
