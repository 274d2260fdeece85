# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sums up blocks of memory by state: free, movable, blocked and so on."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.memory.pages.classes import CLASSES, NCLASSES, PageClass
from msatools.memory.pages.counting import Counts
from msatools.model import names

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
    """Page blocks, or the scanned parts of them, in pfn order; a row each."""

    numbers: npt.NDArray[np.int64]
    """First pfn divided by the pages of a block."""

    counts: Counts
    """Pages by class."""

    heads: npt.NDArray[np.int64]
    """Pages that are not tails of compound pages."""

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
    """Blocked blocks by class of their unmovable pages; one may count several times."""

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
        # Compound pages are aligned to their size: the block is in a single one.
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
    """Pages that are not tails of each incomplete block."""

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
