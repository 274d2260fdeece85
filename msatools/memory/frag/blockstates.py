# SPDX-License-Identifier: LGPL-2.1-or-later

"""Blocks of memory by what keeps them from being free."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from msatools.memory.pages.classes import CLASSES, NCLASSES, PageClass
from msatools.memory.pages.counting import Counts

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

Not a page that something holds a reference to for long, such as a device: that no
struct page tells for sure. Hugetlb pages are moved for alloc_contig_range() only.
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


@dataclass
class BlockRows:
    """Page blocks, or what was seen of them, in pfn order; a row each."""

    numbers: npt.NDArray[np.int64]
    """First pfn by the pages a block."""

    counts: Counts
    """Pages by class."""

    heads: npt.NDArray[np.int64]
    """Pages that are no tails of compound pages."""

    types: npt.NDArray[np.uint8]
    keys: npt.NDArray[np.int64]
    """Node and zone of the first page."""

    begins: npt.NDArray[np.bool_]
    """Whether the first page of the block is in it."""


def joined(parts: Sequence[BlockRows]) -> BlockRows:
    return BlockRows(
        *(
            np.concatenate([getattr(part, each.name) for part in parts])
            for each in fields(BlockRows)
        )
    )


@dataclass
class Blocks:
    """Blocks of one size by state, and what is in the blocked ones."""

    size: int
    """Pages"""

    states: Counts = field(default_factory=lambda: np.zeros(STATES, np.int64))
    moved: int = 0
    """Pages in use in the blocks that have only movable ones."""

    having: Counts = field(default_factory=lambda: np.zeros(NCLASSES, np.int64))
    """Blocked blocks by class that they have."""

    alone: Counts = field(default_factory=lambda: np.zeros(NCLASSES, np.int64))
    pages: Counts = field(default_factory=lambda: np.zeros(NCLASSES, np.int64))
    needed: Counts = field(default_factory=lambda: np.zeros(64, np.int64))
    """Blocked blocks by the logarithm of their unmovable pages, rounded up."""

    def add(self, counts: Counts, heads: npt.NDArray[np.int64]) -> None:
        """
        Add blocks.

        :param counts: Pages by class, shape ``(blocks, NCLASSES)``.
        :param heads: Pages of each that are no tails of compound pages.
        """
        present = counts.sum(axis=1) - counts[:, _MISSING].sum(axis=1)
        unmovable = counts[:, UNMOVABLE].sum(axis=1)
        state = np.full(len(counts), IS_BLOCKED)
        state[unmovable == 0] = IS_MOVABLE
        state[counts[:, PageClass.FREE_BUDDY] == self.size] = IS_FREE
        # Compound pages are aligned to their size: then there is but one.
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


@dataclass
class Pieces:
    """Blocks of one size, which may be larger than what is scanned at once."""

    done: Blocks
    counts: dict[int, Counts] = field(default_factory=dict)
    """By number of the block: pages of those not known to be done."""

    heads: dict[int, int] = field(default_factory=dict)

    def add(self, rows: "BlockRows", each: int) -> None:
        """
        Add what was counted in parts of these blocks.

        :param each: Pages a part; of a smaller one some are missing.
        """
        numbers = rows.numbers * each // self.done.size
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
