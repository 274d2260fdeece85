# SPDX-License-Identifier: LGPL-2.1-or-later

"""Physical memory in pfn order, in a bounded number of cells."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import numpy.typing as npt

from msatools.memory.classes import CLASSES
from msatools.memory.counting import Counts


@dataclass(frozen=True)
class Place:
    """A zone of a node."""

    node: int
    zone: str


@dataclass(frozen=True)
class Cell:
    """The pages of one cell that have a struct page."""

    pfn: int
    """Where the cell begins; a multiple of its size."""

    pages: int
    node: int | None
    zone: str | None
    classes: Mapping[str, int]
    """Those that it has pages of."""


@dataclass(frozen=True, eq=False)
class Cells(Sequence[Cell]):
    """Cells in the order of their pfns; those without struct pages are left out."""

    numbers: npt.NDArray[np.int64]
    """Each one's first pfn by the pages a cell, ascending."""

    counts: Counts
    """Pages by class, shape ``(cells, NCLASSES)``."""

    places: npt.NDArray[np.intp]
    """Index of each one's place, -1 if it is not known."""

    cell_pages: int
    all_places: tuple[Place, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Cell: ...

    @overload
    def __getitem__(self, index: slice) -> list[Cell]: ...

    def __getitem__(self, index: int | slice) -> Cell | list[Cell]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        counts, at = self.counts[index], int(self.places[index])
        place = None if at < 0 else self.all_places[at]
        return Cell(
            pfn=int(self.numbers[index]) * self.cell_pages,
            pages=int(counts.sum()),
            node=None if place is None else place.node,
            zone=None if place is None else place.zone,
            classes={
                name: int(counts[code])
                for code, name in CLASSES.items()
                if counts[code]
            },
        )

    def __iter__(self) -> Iterator[Cell]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True)
class MemoryMap:
    """What is where in physical memory."""

    cell_pages: int
    """Pages that a cell spans, a power of two."""

    section_pages: int
    cells: Cells = field(compare=False)

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
