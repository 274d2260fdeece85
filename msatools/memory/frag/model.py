# SPDX-License-Identifier: LGPL-2.1-or-later

"""Fragmentation: free memory by order, page blocks, and what keeps them in use."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FreeList:
    """Free blocks of one zone by order, as in /proc/buddyinfo."""

    node: int
    zone: str
    pages: int

    blocks: tuple[int, ...]
    """By order: the free blocks that the scan met."""

    kernel_blocks: tuple[int, ...] | None
    """By order: what the zone's own counters say; ``None`` if it could not be read."""

    unusable_permille: int | None
    """
    The part of free pages that is in blocks below a huge page's order.

    The kernel's unusable_free_index() (mm/vmstat.c); ``None`` without free pages.
    """

    fragmentation_permille: int | None
    """
    Why a huge page would be refused: towards 0 for lack of memory, towards 1000 for
    fragmentation.

    The kernel's __fragmentation_index() (mm/vmstat.c); ``None`` if one is there, where
    the kernel shows -1.000.
    """


@dataclass(frozen=True)
class PageBlocks:
    """The page blocks of one zone that have one migrate type."""

    node: int
    zone: str
    type: str
    """As in ``enum migratetype``: ``unmovable``, ``movable``, ...; ``-`` if unknown."""

    blocks: int
    free_pages: int
    """Of the buddy allocator and on per-CPU lists."""

    movable_pages: int
    """Used, but compaction can move them."""

    unmovable_pages: int
    """All others."""

    mixed_blocks: int
    """Blocks with movable pages in use as well as unmovable ones."""

    polluted_blocks: int
    """Blocks with any unmovable page: what a movable block should have none of."""


@dataclass(frozen=True)
class Blocker:
    """A class of pages that keeps blocks from being free."""

    name: str
    blocks: int
    """Blocks that have pages of it; a block counts under each class it has."""

    alone_blocks: int
    """Blocks that nothing else keeps from being free."""

    pages: int


@dataclass(frozen=True)
class Needed:
    """Blocks that are kept from being free by no more than so many pages."""

    pages: int
    """Up to this many unmovable pages, and more than half as many."""

    blocks: int


@dataclass(frozen=True)
class BlockSize:
    """All aligned blocks of one size. Each is in one of the five states."""

    order: int
    bytes: int
    blocks: int
    free_blocks: int
    """Free as they are."""

    whole_blocks: int
    """One compound page of this size or a larger one: a huge page is what it is."""

    movable_blocks: int
    """Nothing unmovable is in them: compaction could free them."""

    movable_pages: int
    """Pages in use in those, to be moved."""

    blocked_blocks: int
    partial_blocks: int
    """Not all of it has struct pages, or they were not all read."""

    blockers: tuple[Blocker, ...]
    """Of the blocked ones, the class in most blocks first."""

    needed: tuple[Needed, ...]
    """Of the blocked ones, the fewest pages first."""


@dataclass(frozen=True)
class Frag:
    """How memory is cut up."""

    huge_order: int
    """Of a transparent huge page, for which the indices are."""

    pageblock_order: int
    free: tuple[FreeList, ...]
    pageblocks: tuple[PageBlocks, ...]
    sizes: tuple[BlockSize, ...]

    movable: tuple[str, ...]
    """The classes of pages that compaction moves."""

    @property
    def blocks_by_type(self) -> Mapping[str, int]:
        """Page blocks by migrate type, over all zones."""
        found: dict[str, int] = {}
        for row in self.pageblocks:
            found[row.type] = found.get(row.type, 0) + row.blocks
        return found
