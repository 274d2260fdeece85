# SPDX-License-Identifier: LGPL-2.1-or-later

"""Fragmentation: free memory by order, page blocks, and what blocks them."""

from collections.abc import Mapping

from msgspec import Struct


class FreeList(Struct, frozen=True):
    """Free blocks of one zone by order, as in /proc/buddyinfo."""

    node: int
    zone: str
    pages: int

    blocks: tuple[int, ...]
    """Free blocks that the scan found, by order."""

    kernel_blocks: tuple[int, ...] | None
    """The zone's own ``nr_free``, by order; ``None`` if unreadable."""

    unusable_permille: int | None
    """
    Share of the free pages that is in blocks below a huge page's order.

    The kernel's unusable_free_index() (mm/vmstat.c); ``None`` without free pages.
    """

    fragmentation_permille: int | None
    """
    Reason why allocation of a huge page would fail: near 0 lack of memory, near 1000
    fragmentation.

    The kernel's __fragmentation_index() (mm/vmstat.c); ``None`` if the allocation would
    succeed, where the kernel shows -1.000.
    """


class PageBlocks(Struct, frozen=True):
    """The page blocks of one zone that have one migrate type."""

    node: int
    zone: str
    type: str
    """As in ``enum migratetype``: ``unmovable``, ``movable``, ...; ``-`` if unknown."""

    blocks: int
    free_pages: int
    """Pages in the buddy allocator and on per-CPU lists."""

    movable_pages: int
    """Pages in use that compaction can move."""

    unmovable_pages: int
    """Other pages in use."""

    mixed_blocks: int
    """Blocks with both movable and unmovable pages in use."""

    polluted_blocks: int
    """Blocks with any unmovable page; a movable block should have none."""


class Blocker(Struct, frozen=True):
    """A class of pages that keeps blocks from being free."""

    name: str
    blocks: int
    """Blocks that have pages of the class; a block counts for each of its classes."""

    alone_blocks: int
    """Blocks that no other class keeps from being free."""

    pages: int


class Needed(Struct, frozen=True):
    """Number of blocked blocks by their number of unmovable pages."""

    pages: int
    """Upper bound of their unmovable pages; the lower bound is half, exclusive."""

    blocks: int


class BlockSize(Struct, frozen=True):
    """All aligned blocks of one size. Each is in one of five states."""

    order: int
    bytes: int
    blocks: int
    free_blocks: int
    """Entirely free blocks."""

    whole_blocks: int
    """Blocks that are one compound page, or part of a larger one."""

    movable_blocks: int
    """Blocks without unmovable pages: compaction could free them."""

    movable_pages: int
    """Pages in use in the movable blocks."""

    blocked_blocks: int
    """Blocks with unmovable pages."""

    partial_blocks: int
    """Blocks with missing or unreadable struct pages."""

    blockers: tuple[Blocker, ...]
    """Classes in the blocked blocks, the class in most blocks first."""

    needed: tuple[Needed, ...]
    """Blocked blocks by unmovable pages, the fewest first."""


class Frag(Struct, frozen=True):
    """Fragmentation of memory."""

    huge_order: int
    """Order of a transparent huge page, for which the indices are computed."""

    pageblock_order: int
    free: tuple[FreeList, ...]
    pageblocks: tuple[PageBlocks, ...]
    sizes: tuple[BlockSize, ...]

    movable: tuple[str, ...]
    """The classes of pages that compaction moves."""

    @property
    def blocks_by_type(self) -> Mapping[str, int]:
        """Page blocks by migrate type, over all zones."""
        blocks: dict[str, int] = {}
        for row in self.pageblocks:
            blocks[row.type] = blocks.get(row.type, 0) + row.blocks
        return blocks
