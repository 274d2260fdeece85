# SPDX-License-Identifier: LGPL-2.1-or-later

"""Physical memory in pfn order, in a bounded number of cells."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from msatools.memory.pages.classes import CLASSES
from msatools.memory.pages.counting import Counts

OUTLINE_CELLS = 1 << 10
"""Cells that JSON has at most: some 400 KB if each has a dozen classes and none is like
the next, as in the memory of a large machine."""


@dataclass(frozen=True)
class MapPlace:
    """A zone of a node."""

    node: int
    zone: str


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells in the order of their pfns; those without struct pages are left out."""

    numbers: npt.NDArray[np.int64]
    """Each one's first pfn by the pages a cell, ascending."""

    counts: Counts
    """Pages by class, shape ``(cells, NCLASSES)``."""

    places: npt.NDArray[np.intp]
    """Index of each one's place, -1 if it is not known."""

    cell_pages: int
    all_places: tuple[MapPlace, ...]

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class PageRun:
    """Cells that follow on each other and have the same pages of the same classes."""

    pfn: int
    """Where the first begins; a multiple of a cell's size."""

    cells: int
    pages: int
    """Those of all these cells that have a struct page; less than they span where
    memory begins or ends."""

    node: int | None
    zone: str | None
    classes: Mapping[str, int]
    """Those that there are pages of; each cell has its part of them."""


@dataclass(frozen=True)
class Outline:
    """A map for programs: few cells, and those that are alike in one."""

    cell_pages: int
    """Pages that a cell spans, a power of two."""

    section_pages: int
    runs: tuple[PageRun, ...]
    """Ascending; what is between two has no struct pages."""


@dataclass(frozen=True)
class MemoryMap:
    """The classes of physical memory, cell by cell."""

    cell_pages: int
    """Pages that a cell spans, a power of two."""

    section_pages: int
    cells: Cells = field(compare=False)

    def outline(self) -> Outline:
        """Return the form in JSON, of no more than :data:`OUTLINE_CELLS` cells."""
        outlined = self.at_most(OUTLINE_CELLS)
        runs = tuple(_runs(outlined.cells))
        return Outline(outlined.cell_pages, self.section_pages, runs)

    def at_most(self, cells: int) -> "MemoryMap":
        """Join cells until there are no more than so many."""
        factor = 1
        while len(np.unique(self.cells.numbers // factor)) > cells:
            factor *= 2
        if factor == 1:
            return self
        numbers, firsts = np.unique(self.cells.numbers // factor, return_index=True)
        each = self.cell_pages * factor
        joined = Cells(
            numbers,
            np.add.reduceat(self.cells.counts, firsts, axis=0),
            self.cells.places[firsts],
            each,
            self.cells.all_places,
        )
        return MemoryMap(each, self.section_pages, joined)


def _runs(cells: Cells) -> Iterator[PageRun]:
    """Join cells that are alike."""
    new = np.ones(len(cells), np.bool_)
    new[1:] = np.diff(cells.numbers) != 1
    new[1:] |= np.diff(cells.places) != 0
    new[1:] |= (np.diff(cells.counts, axis=0) != 0).any(axis=1)
    starts = np.flatnonzero(new)
    lengths = np.diff(starts, append=len(cells))
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        counts, at = cells.counts[start] * length, int(cells.places[start])
        place = None if at < 0 else cells.all_places[at]
        yield PageRun(
            pfn=int(cells.numbers[start]) * cells.cell_pages,
            cells=length,
            pages=int(counts.sum()),
            node=None if place is None else place.node,
            zone=None if place is None else place.zone,
            classes={
                name: int(counts[code])
                for code, name in CLASSES.items()
                if counts[code]
            },
        )
