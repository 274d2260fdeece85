# SPDX-License-Identifier: LGPL-2.1-or-later

"""Physical memory in pfn order, in a bounded number of cells (``--map``)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import DamagedDataError
from msatools.kernel.reader import distinct
from msatools.memory.classes import CLASSES
from msatools.memory.classify import (
    NOWHERE,
    Block,
    Counts,
    class_counts,
    node_and_zone,
    node_zone_keys,
    where,
)
from msatools.memory.memmap import MemmapRange, pages_per_section
from msatools.memory.owners import ScanContext
from msatools.model import equal_but, hash_but

OUTLINE_CELLS = 1 << 10
"""Maximum number of cells in JSON: some 400 KB if each has a dozen classes and differs
from the next, as in the memory of a large machine."""


class MapPlace(Struct, frozen=True):
    """A zone of a node."""

    node: int
    zone: str


class Cells(Struct, frozen=True, eq=False):
    """Cells in pfn order; cells without struct pages are left out."""

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
        """Return the map for JSON, with at most :data:`OUTLINE_CELLS` cells."""
        outlined = self.at_most(OUTLINE_CELLS)
        runs = tuple(_runs(outlined.cells))
        return Outline(outlined.cell_pages, self.section_pages, runs)

    def at_most(self, cells: int) -> "MemoryMap":
        """Return a map whose cells are joined until at most *cells* are left."""
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


# --- Makes a map of memory with a bounded number of cells (--map).


MAX_CELLS = 1 << 16
"""Maximum number of cells: 10 MiB, at 4 bytes for each of some 40 classes."""


class _Run(Struct):
    """Consecutive cells."""

    first: int
    """Number of the first cell: its first pfn divided by the pages of a cell."""

    counts: npt.NDArray[np.uint32]
    """Pages by class, shape ``(cells, NCLASSES)``."""

    keys: npt.NDArray[np.int64]
    """Node and zone key of each cell's first struct page, or NOWHERE."""


class MapObserver(Struct):
    """Counts pages by cell and class."""

    cell_pages: int
    runs: list[_Run] = field(default_factory=list)
    """Runs in pfn order, which have no cell in common."""

    def observe(self, block: Block) -> None:
        first, skip = divmod(block.pfn, self.cell_pages)
        counts = class_counts(block.codes, self.cell_pages, skip).astype(np.uint32)
        keys = node_zone_keys(block)
        if isinstance(keys, int):
            cell_keys = np.full(len(counts), keys, np.int64)
        else:
            firsts = np.arange(len(counts)) * self.cell_pages - skip
            cell_keys = keys[np.maximum(firsts, 0)]
        self._add(_Run(first, counts, cell_keys))

    def merge(self, later: "MapObserver") -> None:
        for run in later.runs:
            self._add(run)

    def _add(self, run: _Run) -> None:
        last = self.runs[-1] if self.runs else None
        if last is not None and last.first + len(last.counts) - 1 == run.first:
            # A cell may be larger than a block of the scan, or span two blocks.
            last.counts[-1] += run.counts[0]
            if last.keys[-1] == NOWHERE:
                last.keys[-1] = run.keys[0]
            run = _Run(run.first + 1, run.counts[1:], run.keys[1:])
        if len(run.counts):
            self.runs.append(run)


def cell_size(ranges: Sequence[MemmapRange]) -> int:
    """Return the pages of a cell: the lowest power of two with which there are no more
    than :data:`MAX_CELLS` cells."""
    firsts = np.array([part.pfn for part in ranges], np.int64)
    lasts = np.array([part.pfn + part.pages - 1 for part in ranges], np.int64)
    cell_pages = 1
    while _count_cells(firsts // cell_pages, lasts // cell_pages) > MAX_CELLS:
        cell_pages *= 2
    return cell_pages


def _count_cells(firsts: npt.NDArray[np.int64], lasts: npt.NDArray[np.int64]) -> int:
    """Count the cells of sorted ranges; neighbouring ranges may share a cell."""
    shared = np.count_nonzero(firsts[1:] == lasts[:-1])
    return int((lasts - firsts + 1).sum() - shared)


class MapView:
    """A map of all memory that has struct pages."""

    def __init__(self, context: ScanContext) -> None:
        self._context = context
        self.observer = MapObserver(cell_size(context.ranges))

    def result(self) -> MemoryMap:
        """Return the map after the scan.

        :raises DamagedDataError: if no struct page is left
        """
        cell_pages, runs = self.observer.cell_pages, self.observer.runs
        if not runs:
            raise DamagedDataError("no struct page is left")
        numbers = np.concatenate(
            [run.first + np.arange(len(run.counts), dtype=np.int64) for run in runs]
        )
        counts = np.concatenate([run.counts for run in runs]).astype(np.int64)
        keys = np.concatenate([run.keys for run in runs])
        places, indices = self._places(numbers * cell_pages, keys)
        section = pages_per_section(self._context.prog)
        cells = Cells(numbers, counts, indices, cell_pages, places)
        return MemoryMap(cell_pages, section, cells)

    def _places(
        self, pfns: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]
    ) -> tuple[tuple[MapPlace, ...], npt.NDArray[np.intp]]:
        """
        Return all zones, and the index of each cell's zone.

        The struct page of a cell may be missing, or record the wrong zone if it is in a
        hole. Such a cell is assigned the zone of the cell before it.
        """
        zones: list[MapPlace] = []
        indices = np.full(len(pfns), -1, np.intp)
        for key in distinct(keys).tolist():
            pair = node_and_zone(key, self._context.layout)
            zone = None if pair is None else self._context.zones.get(pair)
            if zone is not None:
                spanned = pfns + self.observer.cell_pages > zone.start_pfn
                spanned &= pfns < zone.end_pfn
                indices[spanned & (keys == key)] = len(zones)
                zones.append(MapPlace(zone.node, zone.name))
        known = where(indices >= 0)
        if len(known):
            before = np.searchsorted(known, np.arange(len(indices)), side="right") - 1
            indices = indices[known[np.maximum(before, 0)]]
        return tuple(zones), indices
