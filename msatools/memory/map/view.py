# SPDX-License-Identifier: LGPL-2.1-or-later

"""Makes a map of memory with a bounded number of cells (``--map``)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import DamagedDataError
from msatools.kernel.reader import distinct
from msatools.memory.map.model import Cells, MapPlace, MemoryMap
from msatools.memory.pages.classify import Block, where
from msatools.memory.pages.counting import class_counts
from msatools.memory.pages.memmap import MemmapRange, pages_per_section
from msatools.memory.pages.zonekeys import NOWHERE, node_and_zone, node_zone_keys
from msatools.memory.scan.context import ScanContext

MAX_CELLS = 1 << 16
"""Maximum number of cells: 8 MiB, at 4 bytes for each of some 30 classes."""


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
    """Runs in pfn order; no cell is in two."""

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
    """Return the pages of a cell: the lowest power of two within :data:`MAX_CELLS`."""
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
