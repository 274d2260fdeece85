# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds what keeps blocks of memory from being free (``--frag``)."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import UNREADABLE
from msatools.kernel.pagetables import pmd_order
from msatools.kernel.reader import distinct
from msatools.kernel.zones import Zone
from msatools.memory.frag.blockstates import (
    FREE,
    IS_BLOCKED,
    IS_FREE,
    IS_MOVABLE,
    IS_PARTIAL,
    IS_WHOLE,
    MOVABLE,
    UNMOVABLE,
    BlockRows,
    Blocks,
    Pieces,
    joined,
)
from msatools.memory.frag.model import (
    Blocker,
    BlockSize,
    Frag,
    FreeList,
    Needed,
    PageBlocks,
)
from msatools.memory.frag.pageblocks import UNKNOWN_TYPE, MigrateTypes, migrate_types
from msatools.memory.pages.classes import CLASSES, NCLASSES
from msatools.memory.pages.classify import Block
from msatools.memory.pages.counting import Counts, class_counts
from msatools.memory.pages.orders import ORDERS, free_blocks
from msatools.memory.pages.zonekeys import node_and_zone, node_zone_keys
from msatools.memory.scan.context import ScanContext
from msatools.selfdesc.find import find_type, member_of

_GIB = 1 << 30

_MOST_KEPT = 64
"""Maximum number of blocks of the scan, 64 MiB each, to keep before summing up."""

_BLOCKS, _MIXED, _POLLUTED = NCLASSES, NCLASSES + 1, NCLASSES + 2
"""Columns of page blocks after those of the classes."""


class FragObserver(Struct):
    """Sums up page blocks and larger blocks for ``--frag``."""

    types: MigrateTypes
    sizes: tuple[Pieces, ...]
    free: dict[int, Counts] = field(default_factory=dict)
    """Free blocks by order, by node and zone key."""

    pageblocks: dict[int, Counts] = field(default_factory=dict)
    """Sums of page blocks, shape ``(types, NCLASSES + 3)``, by node and zone key."""

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

    :param blocks: Free blocks by order.
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
    """Count the pages in free blocks by order."""
    return sum(count << order for order, count in enumerate(blocks))
