# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--frag``: what keeps blocks of memory from being free."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.pagetables import pmd_order
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

_GIB = 1 << 30

_MOST_KEPT = 64
"""Blocks of the scan, of 64 MiB each."""

_BLOCKS, _MIXED, _POLLUTED = NCLASSES, NCLASSES + 1, NCLASSES + 2
"""Columns of page blocks behind those of classes."""


@dataclass
class FragObserver:
    """Sums for ``--frag``."""

    types: MigrateTypes
    sizes: tuple[Pieces, ...]
    free: dict[int, Counts] = field(default_factory=dict)
    """By node and zone key: free blocks by order."""

    pageblocks: dict[int, Counts] = field(default_factory=dict)
    """By node and zone key: shape ``(types, NCLASSES + 3)``."""

    _kept: list[BlockRows] = field(default_factory=list)
    """Not yet summed up: numpy is quicker with many rows than with few."""

    def observe(self, block: Block) -> None:
        keys = node_zone_keys(block)
        self._add_free(block, keys)
        each = 1 << self.types.order
        first, skip = divmod(block.pfn, each)
        counts = class_counts(block.codes, each, skip)
        heads = counts.sum(axis=1)
        if len(block.tails):
            heads -= np.bincount((block.tails + skip) // each, minlength=len(heads))
        numbers = np.arange(len(counts))
        # The kernel asks the first page of each for its zone (mm/vmstat.c).
        begins = np.maximum(numbers * each - skip, 0)
        self._kept.append(
            BlockRows(
                numbers=first + numbers,
                counts=counts,
                heads=heads,
                types=self.types.of(block.pfn, len(counts)),
                keys=np.full(len(counts), keys)
                if isinstance(keys, int)
                else keys[begins],
                begins=numbers * each >= skip,
            )
        )
        if len(self._kept) >= _MOST_KEPT:
            self.sum_up()

    def _add_free(self, block: Block, keys: int | npt.NDArray[np.int64]) -> None:
        firsts, orders = free_blocks(block)
        if isinstance(keys, int):
            self._count_free(keys, orders)
            return
        places = keys[firsts]
        for key in np.unique(places).tolist():
            self._count_free(key, orders[places == key])

    def _count_free(self, key: int, orders: npt.NDArray[np.intp]) -> None:
        counts = self.free.setdefault(key, np.zeros(ORDERS + 1, np.int64))
        counts += np.bincount(orders, minlength=ORDERS + 1)

    def sum_up(self) -> None:
        """Sum up what was seen since this was last done."""
        if not self._kept:
            return
        rows, self._kept = joined(self._kept), []
        used = rows.counts[:, MOVABLE].any(axis=1)
        polluted = rows.counts[:, UNMOVABLE].any(axis=1)
        facts = np.column_stack((rows.counts, rows.begins, used & polluted, polluted))
        for key in np.unique(rows.keys).tolist():
            here = rows.keys == key
            empty = np.zeros((UNKNOWN_TYPE + 1, facts.shape[1]), np.int64)
            sums = self.pageblocks.setdefault(key, empty)
            for number in np.unique(rows.types[here]).tolist():
                sums[number] += facts[here & (rows.types == number)].sum(axis=0)
        for size in self.sizes:
            size.add(rows, 1 << self.types.order)

    def merge(self, later: "FragObserver") -> None:
        self.sum_up()
        later.sum_up()
        for size, its in zip(self.sizes, later.sizes, strict=True):
            size.merge(its)
        for mine, others in (
            (self.free, later.free),
            (self.pageblocks, later.pageblocks),
        ):
            for key, counts in others.items():
                mine[key] = mine[key] + counts if key in mine else counts


class FragView:
    """How a kernel's memory is cut up."""

    def __init__(self, context: ScanContext) -> None:
        self._context = context
        prog = context.prog
        self._huge_order = pmd_order(prog)
        # MAX_ORDER or MAX_PAGE_ORDER, which was one more up to v6.3.
        area = prog.type("struct zone").member("free_area").type
        self._orders: int = area.length
        types = migrate_types(context.reader, self._orders - 1, context.losses)
        pages = dict.fromkeys((1 << self._huge_order, _GIB // context.page_size))
        sizes = tuple(Pieces(Blocks(size)) for size in pages)
        self.observer = FragObserver(types, sizes)

    def result(self) -> Frag:
        """Return the result once the scan is done."""
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
        found = []
        for key in sorted(sums):
            place = node_and_zone(key, self._context.layout)
            zone = None if place is None else self._context.zones.get(place)
            if zone is not None:
                found.append((zone, sums[key]))
        return found


def _free_list(zone: Zone, counts: Counts, orders: int, huge: int) -> FreeList:
    blocks = tuple(counts[: max(orders, 1)].tolist())
    pages = sum(count << order for order, count in enumerate(blocks))
    return FreeList(
        node=zone.node,
        zone=zone.name,
        pages=pages,
        blocks=blocks,
        kernel_blocks=_kernel_blocks(zone),
        unusable_permille=unusable(blocks, huge),
        fragmentation_permille=fragmentation(blocks, huge),
    )


def _kernel_blocks(zone: Zone) -> tuple[int, ...] | None:
    try:
        return tuple(area.nr_free.value_() for area in zone.object.free_area)
    except drgn.FaultError:
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


def _block_size(found: Blocks, page_size: int) -> BlockSize:
    blockers = [
        Blocker(name, int(found.having[code]), int(found.alone[code]), pages)
        for code, name in CLASSES.items()
        if (pages := int(found.pages[code]))
    ]
    return BlockSize(
        order=found.size.bit_length() - 1,
        bytes=found.size * page_size,
        blocks=int(found.states.sum()),
        free_blocks=int(found.states[IS_FREE]),
        whole_blocks=int(found.states[IS_WHOLE]),
        movable_blocks=int(found.states[IS_MOVABLE]),
        movable_pages=found.moved,
        blocked_blocks=int(found.states[IS_BLOCKED]),
        partial_blocks=int(found.states[IS_PARTIAL]),
        blockers=tuple(sorted(blockers, key=lambda each: -each.blocks)),
        needed=tuple(
            Needed(1 << power, int(count))
            for power, count in enumerate(found.needed)
            if count
        ),
    )


def unusable(blocks: tuple[int, ...], order: int) -> int | None:
    """Compute the kernel's unusable free space index, in thousandths.

    :param blocks: Free blocks by order.
    """
    free = sum(count << each for each, count in enumerate(blocks))
    if not free:
        return None
    small = sum(count << each for each, count in enumerate(blocks[:order]))
    return small * 1000 // free


def fragmentation(blocks: tuple[int, ...], order: int) -> int | None:
    """Compute the kernel's external fragmentation index, in thousandths.

    :return: ``None`` if a block of the order is free.
    """
    if any(blocks[order:]):
        return None
    total = sum(blocks)
    if not total:
        return 0
    free = sum(count << each for each, count in enumerate(blocks))
    return 1000 - (1000 + (free * 1000 >> order)) // total
