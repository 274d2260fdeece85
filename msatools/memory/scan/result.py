# SPDX-License-Identifier: LGPL-2.1-or-later

"""Results of a scan of the memmap: only sums, so that memory use is bounded."""

from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.kernel.report import LossLog
from msatools.memory.pages.classes import NCLASSES
from msatools.memory.pages.classify import where
from msatools.memory.scan.model import ScanChanges

_COMPACT_AT = 1 << 20


_Array = TypeVar("_Array", bound=np.ndarray[Any, Any])


def _joined(arrays: list[_Array]) -> list[_Array]:
    return [cast(_Array, np.concatenate(arrays))] if len(arrays) > 1 else arrays


class CachePages(Struct):
    """Pages of the page cache by mapping and by node and zone."""

    mappings: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    keys: list[npt.NDArray[np.int64]] = field(default_factory=list)
    pages: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _held: int = 0

    def add(
        self,
        mappings: npt.NDArray[np.uint64],
        keys: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int64],
    ) -> None:
        self.mappings.append(mappings)
        self.keys.append(keys)
        self.pages.append(pages)
        self._held += len(pages)
        if self._held > _COMPACT_AT:
            self.sum()

    def merge(self, later: "CachePages") -> None:
        """Add the pages of another part of memory."""
        for triple in zip(later.mappings, later.keys, later.pages, strict=True):
            self.add(*triple)

    def join(self) -> None:
        """Concatenate the arrays."""
        self.mappings = _joined(self.mappings)
        self.keys = _joined(self.keys)
        self.pages = _joined(self.pages)

    def sum(
        self,
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sum up to one row (mapping, key, pages) for each pair, ascending."""
        if not self.pages:
            empty = np.empty(0, np.int64)
            return empty.view(np.uint64), empty, empty
        mappings = np.concatenate(self.mappings)
        keys = np.concatenate(self.keys)
        pages = np.concatenate(self.pages)
        order = np.lexsort((keys, mappings))
        mappings, keys, pages = mappings[order], keys[order], pages[order]
        new = np.ones(len(pages), np.bool_)
        new[1:] = (mappings[1:] != mappings[:-1]) | (keys[1:] != keys[:-1])
        starts = where(new)
        triple = mappings[starts], keys[starts], np.add.reduceat(pages, starts)
        self.mappings, self.keys, self.pages = [triple[0]], [triple[1]], [triple[2]]
        self._held = len(starts)
        return triple


class FreeCandidates(Struct):
    """
    Unreferenced pages without a class: per-CPU free pages, and tails of others.

    Struct pages of per-CPU free pages are not marked. These columns are enough to
    follow the lists and find those pages without further reads.
    """

    nodes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Address of each page's list node (``page->lru``)."""

    nexts: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    prevs: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    codes: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    """Class that each page was counted under."""

    keys: list[npt.NDArray[np.int64]] = field(default_factory=list)

    rooms: list[npt.NDArray[np.intp]] = field(default_factory=list)
    """Maximum size of a free block that begins at each page (``free_rooms()``)."""

    def merge(self, later: "FreeCandidates") -> None:
        """Add the candidates of higher pfns."""
        self.nodes += later.nodes
        self.nexts += later.nexts
        self.prevs += later.prevs
        self.codes += later.codes
        self.keys += later.keys
        self.rooms += later.rooms

    def join(self) -> None:
        """Concatenate the arrays."""
        self.nodes = _joined(self.nodes)
        self.nexts = _joined(self.nexts)
        self.prevs = _joined(self.prevs)
        self.codes = _joined(self.codes)
        self.keys = _joined(self.keys)
        self.rooms = _joined(self.rooms)


class ScanResult(Struct):
    """The result of a scan of the memmap, or of a part of it."""

    counts: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    """Pages by class, by node and zone key (see :func:`node_and_zone`)."""

    cache: CachePages = field(default_factory=CachePages)
    candidates: FreeCandidates = field(default_factory=FreeCandidates)
    anon_unmapped: int = 0
    """Anon and KSM pages that no page table maps."""

    anon_swapcache: int = 0
    """Pages of anon class in the swap cache."""

    shmem_swapcache: int = 0
    """Pages of shmem class in the swap cache."""

    swap_entries: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Swap entries of swap cache pages without a mapping."""

    swap_keys: list[npt.NDArray[np.int64]] = field(default_factory=list)

    heads_unreadable: int = 0
    """Heads of compound pages, outside their tails' block, that are unreadable."""

    memmap_reads: int = 0
    """Reads of struct pages."""

    losses: dict[int, LossLog] = field(default_factory=dict)
    """Losses of inodes during the scan, by mapping."""

    scan_ns: int | None = None
    """Duration of the whole scan."""

    changes: ScanChanges | None = None
    """Changes during the scan, for a running kernel."""

    def merge(self, later: "ScanResult") -> None:
        """Add the result of the next part of memory."""
        for key, counts in later.counts.items():
            if key in self.counts:
                self.counts[key] += counts
            else:
                self.counts[key] = counts
        self.cache.merge(later.cache)
        self.candidates.merge(later.candidates)
        self.anon_unmapped += later.anon_unmapped
        self.anon_swapcache += later.anon_swapcache
        self.shmem_swapcache += later.shmem_swapcache
        self.swap_entries += later.swap_entries
        self.swap_keys += later.swap_keys
        self.heads_unreadable += later.heads_unreadable
        self.memmap_reads += later.memmap_reads
        self.add_losses(later.losses)

    def add_losses(self, losses: dict[int, LossLog]) -> None:
        """Add losses by mapping. Several parts may lose the same: it counts once."""
        for mapping, lost in losses.items():
            self.losses.setdefault(mapping, LossLog()).cover(lost)

    def join(self) -> None:
        """Concatenate the arrays: many small ones are slow to pickle."""
        self.cache.join()
        self.candidates.join()
        self.swap_entries = _joined(self.swap_entries)
        self.swap_keys = _joined(self.swap_keys)

    def pages(self) -> int:
        return int(sum(counts.sum() for counts in self.counts.values()))

    def totals(self) -> npt.NDArray[np.int64]:
        """Return the pages by class over all nodes and zones."""
        totals = np.zeros(NCLASSES, np.int64)
        for counts in self.counts.values():
            totals += counts
        return totals

    def move(self, key: int, source: int, target: int, pages: int) -> None:
        """Move pages of a node and zone from one class to another."""
        self.counts[key][source] -= pages
        self.counts[key][target] += pages
