# SPDX-License-Identifier: LGPL-2.1-or-later

"""One pass over the memmap, kept as sums so that memory use does not grow."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Reader
from msatools.memory.classes import CLASSES, PageClass
from msatools.memory.classify import NOT_MAPPED, Block, FarHead, classify, where
from msatools.memory.layout import PageLayout
from msatools.memory.memmap import MemmapRange, read_chunks

NCLASSES = max(CLASSES) + 1
NOWHERE = -1
"""Node-and-zone key of pages whose struct page is missing."""

_COMPACT_AT = 1 << 20
_MAX_FAR_HEADS = 1 << 16
_POINTER_BYTES = 8

_COMMON = (
    PageClass.FREE_BUDDY,
    PageClass.ANON,
    PageClass.FILE,
    PageClass.USER_HUGETLB,
    PageClass.SLAB,
    PageClass.UNATTRIBUTED,
    PageClass.PAGE_TABLES,
    PageClass.SHMEM,
    PageClass.RESERVED,
)
_BY_FREQUENCY = (*_COMMON, *(code for code in CLASSES if code not in _COMMON))


@dataclass(frozen=True)
class OwnedPages:
    """Pages that other structures say they own, ascending and unique by pfn."""

    pfns: npt.NDArray[np.uint64]
    codes: npt.NDArray[np.uint8]


@dataclass
class CachePages:
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

    def sum(
        self,
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sum up to one (mapping, key, pages) triple a pair, ascending."""
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


@dataclass
class FreeCandidates:
    """
    Unreferenced pages of no class: per-CPU free pages, and tails of others.

    Struct pages of per-CPU free pages carry no mark; they are told from others
    by following the lists through these columns, with no further reads.
    """

    nodes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Address of each page's list node (``page->lru``)."""

    nexts: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    prevs: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    codes: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    """The class each was counted under."""

    keys: list[npt.NDArray[np.int64]] = field(default_factory=list)


@dataclass
class ScanResult:
    """What one pass over the memmap found."""

    counts: dict[int, npt.NDArray[np.int64]]
    """Pages by class, by node and zone key (see :func:`node_and_zone`)."""

    cache: CachePages
    candidates: FreeCandidates
    anon_unmapped: int = 0
    """Anon and KSM pages that no page table maps."""

    anon_swapcache: int = 0
    """Pages of anon class in the swap cache."""

    shmem_swapcache: int = 0
    """Pages of shmem class in the swap cache."""

    swap_entries: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Swap entries of swap cache pages that no mapping names."""

    swap_keys: list[npt.NDArray[np.int64]] = field(default_factory=list)

    heads_unreadable: int = 0
    """Heads of compound pages outside their tails' block that are lost."""

    def pages(self) -> int:
        return int(sum(counts.sum() for counts in self.counts.values()))

    def totals(self) -> npt.NDArray[np.int64]:
        """Pages by class over all nodes and zones."""
        totals = np.zeros(NCLASSES, np.int64)
        for counts in self.counts.values():
            totals += counts
        return totals

    def move(self, key: int, source: int, target: int, pages: int) -> None:
        """Count pages of a node and zone under another class."""
        self.counts[key][source] -= pages
        self.counts[key][target] += pages


def node_and_zone(key: int, layout: PageLayout) -> tuple[int, int] | None:
    """Split a key into node and zone number; ``None`` for missing pages."""
    if key == NOWHERE:
        return None
    return key >> layout.zone_bits, key & ((1 << layout.zone_bits) - 1)


def scan(
    reader: Reader,
    layout: PageLayout,
    ranges: list[MemmapRange],
    owned: OwnedPages,
    progress: Callable[[int, int], None] | None = None,
    observe: Callable[[Block], None] | None = None,
) -> ScanResult:
    """
    Classify every struct page of the ranges.

    :param owned: Pages to give an owner's class where their struct page tells
        none.
    :param progress: Called with pages done and pages in all.
    :param observe: Called with each block once it is classified; it must not
        keep the block.
    """
    total = sum(part.pages for part in ranges)
    done = 0
    far_heads = _FarHeads(reader, layout)
    result = ScanResult({}, CachePages(), FreeCandidates())
    for chunk in read_chunks(reader, layout, ranges):
        block = classify(
            chunk.data, chunk.pfn, chunk.address, layout, far_heads, chunk.gaps
        )
        _add(result, block, owned)
        if observe is not None:
            observe(block)
        done += len(block)
        if progress is not None:
            progress(done, total)
    result.heads_unreadable = far_heads.unreadable
    return result


class _FarHeads:
    """Reads the heads of compound pages that began in an earlier block."""

    def __init__(self, reader: Reader, layout: PageLayout) -> None:
        self._reader = reader
        self._layout = layout
        self._known: dict[int, FarHead] = {}
        self.unreadable = 0

    def __call__(self, address: int) -> FarHead:
        head = self._known.get(address)
        if head is None:
            # Each large compound page has one; garbage has one a page.
            if len(self._known) >= _MAX_FAR_HEADS:
                self.unreadable += 1
                return FarHead(PageClass.UNATTRIBUTED, 0)
            head = self._known[address] = self._read(address)
        return head

    def _read(self, address: int) -> FarHead:
        try:
            data = self._reader.read(address, 2 * self._layout.size)
        except drgn.FaultError:
            self.unreadable += 1
            return FarHead(PageClass.UNATTRIBUTED, 0)
        # Should the damage be such that this head names a head of its own, the
        # search ends here.
        block = classify(data, 0, address, self._layout, _no_further)
        return FarHead(int(block.codes[0]), int(block.mapping[0]))


def _no_further(address: int) -> FarHead:
    return FarHead(PageClass.UNATTRIBUTED, 0)


def _add(result: ScanResult, block: Block, owned: OwnedPages) -> None:
    keys = node_zone_keys(block)
    _mark_device(block, keys)
    orphans = where(block.codes == PageClass.UNATTRIBUTED)
    orphans = orphans[block.unreferenced(orphans)]
    _apply_owners(block, owned)
    _add_counts(result, block.codes, keys)
    _add_candidates(result.candidates, block, orphans, keys)
    _add_cache(result.cache, block, keys)
    _add_anon(result, block, keys)


def node_zone_keys(block: Block) -> int | npt.NDArray[np.int64]:
    """Find node and zone of each page; one number if all are in the same."""
    shift = np.uint64(block.layout.zone_shift)
    highest = np.bitwise_or.reduce(block.flags) >> shift
    lowest = np.bitwise_and.reduce(block.flags) >> shift
    missing = block.codes >= PageClass.EXCLUDED
    if highest == lowest and not missing.any():
        return int(highest)
    keys = (block.flags >> shift).view(np.int64)
    keys[missing] = NOWHERE
    return keys


def _mark_device(block: Block, keys: int | npt.NDArray[np.int64]) -> None:
    """Set the pages of ZONE_DEVICE apart, which can share a section with RAM."""
    layout = block.layout
    if layout.device_zone is None:
        return
    zones = (1 << layout.zone_bits) - 1
    if isinstance(keys, int):
        if keys & zones == layout.device_zone:
            block.codes[:] = PageClass.DEVICE
    else:
        device = (keys != NOWHERE) & (keys & zones == layout.device_zone)
        block.codes[device] = PageClass.DEVICE


def _some(
    keys: int | npt.NDArray[np.int64], indices: npt.NDArray[np.intp]
) -> npt.NDArray[np.int64]:
    if isinstance(keys, int):
        return np.full(len(indices), keys, np.int64)
    chosen: npt.NDArray[np.int64] = keys[indices]
    return chosen


def _add_counts(
    result: ScanResult,
    codes: npt.NDArray[np.uint8],
    keys: int | npt.NDArray[np.int64],
) -> None:
    parts: Iterable[tuple[int, npt.NDArray[np.uint8]]]
    if isinstance(keys, int):
        parts = ((keys, codes),)
    else:
        parts = ((int(key), codes[keys == key]) for key in np.unique(keys))
    for key, part in parts:
        counts = _count(part)
        if key in result.counts:
            result.counts[key] += counts
        else:
            result.counts[key] = counts


def _count(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """
    Count the pages of each class, as np.bincount() does in four times the time.

    Most blocks have few classes, and the commonest come first here.
    """
    counts = np.zeros(NCLASSES, np.int64)
    left = len(codes)
    for code in _BY_FREQUENCY:
        found = int(np.count_nonzero(codes == code))
        counts[code] = found
        left -= found
        if not left:
            break
    return counts


def _apply_owners(block: Block, owned: OwnedPages) -> None:
    # Keys of the array's own type, or all of it is converted at each call.
    ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
    first, last = np.searchsorted(owned.pfns, ends)
    if first == last:
        return
    indices = (owned.pfns[first:last] - np.uint64(block.pfn)).astype(np.intp)
    current = block.codes[indices]
    free_to_own = (current == PageClass.UNATTRIBUTED) | (
        current == PageClass.LARGE_KMALLOC
    )
    mine = indices[free_to_own]
    block.codes[mine] = owned.codes[first:last][free_to_own]
    heads = mine[block.flags[mine] & np.uint64(block.layout.bits["head"]) != 0]
    if len(heads):
        # Who holds a compound page holds its tails.
        near = (block.tail_heads >= 0) & (block.tail_heads < len(block))
        tails, its_heads = block.tails[near], block.tail_heads[near]
        held = np.isin(its_heads, heads)
        block.codes[tails[held]] = block.codes[its_heads[held]]


def _add_candidates(
    candidates: FreeCandidates,
    block: Block,
    orphans: npt.NDArray[np.intp],
    keys: int | npt.NDArray[np.int64],
) -> None:
    if not len(orphans):
        return
    lru = block.layout.lru
    nexts = block.column(lru)[orphans]
    # A list node points to another or to a list's head: an aligned kernel
    # address, not LIST_POISON.
    linked = (nexts & np.uint64(7) == 0) & (nexts >> np.uint64(55) == 0x1FF)
    orphans = orphans[linked]
    candidates.nexts.append(nexts[linked])
    candidates.prevs.append(block.column(lru + _POINTER_BYTES)[orphans])
    candidates.nodes.append(
        np.uint64(block.address + lru)
        + orphans.astype(np.uint64) * np.uint64(block.layout.size)
    )
    candidates.codes.append(block.codes[orphans])
    candidates.keys.append(_some(keys, orphans))


def _add_cache(
    cache: CachePages, block: Block, keys: int | npt.NDArray[np.int64]
) -> None:
    pages = where(block.codes == PageClass.FILE)
    if not len(pages):
        return
    mappings, zones = block.mapping[pages], _some(keys, pages)
    # Files lie in runs, which are far fewer than pages.
    new = np.ones(len(pages), np.bool_)
    new[1:] = (mappings[1:] != mappings[:-1]) | (zones[1:] != zones[:-1])
    starts = where(new)
    lengths = np.diff(starts, append=len(pages))
    cache.add(mappings[starts], zones[starts], lengths)


def _add_anon(
    result: ScanResult, block: Block, keys: int | npt.NDArray[np.int64]
) -> None:
    codes = block.codes
    anon = (codes == PageClass.ANON) | (codes == PageClass.KSM)
    shmem = codes == PageClass.SHMEM
    if not anon.any() and not shmem.any():
        return
    unmapped = where(anon & (block.words == NOT_MAPPED))
    heads = block.heads_of(unmapped)
    result.anon_unmapped += len(unmapped) - _mapped_whole(block, heads)
    swappable = where(anon | shmem)
    heads = block.heads_of(swappable)
    swapcache = np.uint64(block.layout.swapcache_bits)
    swapped = block.flags[heads] & swapcache == swapcache
    if not swapped.any():
        return
    swappable, heads = swappable[swapped], heads[swapped]
    result.shmem_swapcache += int(np.count_nonzero(shmem[swappable]))
    result.anon_swapcache += int(np.count_nonzero(anon[swappable]))
    nameless = anon[swappable] & (block.mapping[heads] == 0)
    entries = block.column(block.layout.private)[heads[nameless]]
    result.swap_entries.append(entries)
    result.swap_keys.append(_some(keys, swappable[nameless]))


def _mapped_whole(block: Block, heads: npt.NDArray[np.intp]) -> int:
    """Count the heads of compound pages that some page table maps as a whole."""
    compound = block.flags[heads] & np.uint64(block.layout.bits["head"]) != 0
    compound &= heads + 1 < len(block)
    entire = block.column(block.layout.entire_mapcount, "<i4", skip=1)
    return int(np.count_nonzero(entire[heads[compound]] >= 0))
