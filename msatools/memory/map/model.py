# SPDX-License-Identifier: LGPL-2.1-or-later

"""Physical memory in pfn order, in a bounded number of cells."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.reader import distinct
from msatools.memory.pages.classes import CLASSES
from msatools.memory.pages.counting import Counts
from msatools.model import equal_but, hash_but

OUTLINE_CELLS = 1 << 10
"""Maximum number of cells in JSON: some 400 KB if each has a dozen classes and differs
from the next, as in the memory of a large machine."""


class MapPlace(Struct, frozen=True):
    """A zone of a node."""

    node: int
    zone: str


class Cells(Struct, frozen=True, eq=False):
    """Cells in pfn order, without those that have no struct pages."""

    numbers: npt.NDArray[np.int64]
    """First pfn of each cell divided by the pages of a cell, ascending."""

    counts: Counts
    """Pages by class, shape ``(cells, NCLASSES)``."""

    places: npt.NDArray[np.intp]
    """Index of each cell's zone in ``all_places``, -1 if unknown."""

    cell_pages: int
    all_places: tuple[MapPlace, ...]

    def __len__(self) -> int:
        return len(self.numbers)


class PageRun(Struct, frozen=True):
    """Consecutive cells that have the same number of pages of each class."""

    pfn: int
    """First pfn; a multiple of a cell's size."""

    cells: int
    pages: int
    """Pages in the cells that have a struct page; fewer than the cells span where
    memory begins or ends."""

    node: int | None
    zone: str | None
    classes: Mapping[str, int]
    """Pages by class name over all cells, without empty classes."""


class Outline(Struct, frozen=True):
    """A map for JSON: few cells, with equal neighbours joined."""

    cell_pages: int
    """Pages that a cell spans, a power of two."""

    section_pages: int
    runs: tuple[PageRun, ...]
    """Runs in pfn order; pages between two runs have no struct pages."""


class MemoryMap(Struct, frozen=True):
    """The classes of physical memory, cell by cell."""

    cell_pages: int
    """Pages that a cell spans, a power of two."""

    section_pages: int
    cells: Cells

    def __eq__(self, other: object) -> Any:
        return equal_but(self, other, "cells")

    def __hash__(self) -> int:
        return hash_but(self, "cells")

    def outline(self) -> Outline:
        """Return the form in JSON, of no more than :data:`OUTLINE_CELLS` cells."""
        outlined = self.at_most(OUTLINE_CELLS)
        runs = tuple(_runs(outlined.cells))
        return Outline(outlined.cell_pages, self.section_pages, runs)

    def at_most(self, cells: int) -> "MemoryMap":
        """Join cells until there are at most this many."""
        factor = 1
        while len(distinct(self.cells.numbers // factor)) > cells:
            factor *= 2
        if factor == 1:
            return self
        numbers, firsts = np.unique(self.cells.numbers // factor, return_index=True)
        cell_pages = self.cell_pages * factor
        joined = Cells(
            numbers,
            np.add.reduceat(self.cells.counts, firsts, axis=0),
            self.cells.places[firsts],
            cell_pages,
            self.cells.all_places,
        )
        return MemoryMap(cell_pages, self.section_pages, joined)


def _runs(cells: Cells) -> Iterator[PageRun]:
    """Join equal neighbouring cells."""
    new = np.ones(len(cells), np.bool_)
    new[1:] = np.diff(cells.numbers) != 1
    new[1:] |= np.diff(cells.places) != 0
    new[1:] |= (np.diff(cells.counts, axis=0) != 0).any(axis=1)
    starts = np.flatnonzero(new)
    lengths = np.diff(starts, append=len(cells))
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        counts, index = cells.counts[start] * length, int(cells.places[start])
        place = None if index < 0 else cells.all_places[index]
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
