# SPDX-License-Identifier: LGPL-2.1-or-later

"""One pass over the memmap, kept as sums so that memory use does not grow."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.memory.bulk import BulkReader
from msatools.memory.classes import CLASSES, PageClass
from msatools.memory.classify import (
    NOT_MAPPED,
    Block,
    FarHead,
    Indices,
    classify,
    where,
)
from msatools.memory.compiled import Compiled, compiled_classifier
from msatools.memory.layout import PageLayout
from msatools.memory.memmap import MemmapRange, read_chunks
from msatools.memory.model import Changes
from msatools.memory.observer import Observer

NCLASSES = max(CLASSES) + 1
NOWHERE = -1
"""Node-and-zone key of pages whose struct page is missing."""

_COMPACT_AT = 1 << 20
_MAX_FAR_HEADS = 1 << 16
_MAX_RUNS = 64
"""Of pages of the same node and zone in a block: more are faster summed by numpy."""

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


_Array = TypeVar("_Array", bound=np.ndarray[Any, Any])


def _joined(arrays: list[_Array]) -> list[_Array]:
    return [cast(_Array, np.concatenate(arrays))] if len(arrays) > 1 else arrays


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

    def merge(self, later: "CachePages") -> None:
        """Add those of another part of memory."""
        for triple in zip(later.mappings, later.keys, later.pages, strict=True):
            self.add(*triple)

    def join(self) -> None:
        """Have few arrays in place of many."""
        self.mappings = _joined(self.mappings)
        self.keys = _joined(self.keys)
        self.pages = _joined(self.pages)

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

    def merge(self, later: "FreeCandidates") -> None:
        """Add those of higher pfns."""
        self.nodes += later.nodes
        self.nexts += later.nexts
        self.prevs += later.prevs
        self.codes += later.codes
        self.keys += later.keys

    def join(self) -> None:
        """Have few arrays in place of many."""
        self.nodes = _joined(self.nodes)
        self.nexts = _joined(self.nexts)
        self.prevs = _joined(self.prevs)
        self.codes = _joined(self.codes)
        self.keys = _joined(self.keys)


@dataclass
class ScanResult:
    """What one pass over the memmap, or over a part of it, found."""

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
    """Swap entries of swap cache pages that no mapping names."""

    swap_keys: list[npt.NDArray[np.int64]] = field(default_factory=list)

    heads_unreadable: int = 0
    """Heads of compound pages outside their tails' block that are lost."""

    memmap_reads: int = 0
    """Reads of struct pages."""

    losses: dict[int, Findings] = field(default_factory=dict)
    """By mapping, what was lost of an inode as its pages' class was made final."""

    scan_ns: int | None = None
    """How long the whole pass took."""

    changes: Changes | None = None
    """What changed meanwhile, of a running kernel."""

    def merge(self, later: "ScanResult") -> None:
        """Add what was found in the part of memory after this one."""
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
        # What is lost of one inode is lost for its pages anywhere.
        self.losses.update(later.losses)

    def join(self) -> None:
        """Have few arrays in place of many, which take long to travel."""
        self.cache.join()
        self.candidates.join()
        self.swap_entries = _joined(self.swap_entries)
        self.swap_keys = _joined(self.swap_keys)

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


class Finals(Protocol):
    """Gives pages their final classes, which else are settled after the scan."""

    @property
    def reads(self) -> int:
        """How many reads that took so far."""

    def settle(self, block: Block, orphans: Indices) -> None:
        """
        Settle the classes of a block's pages.

        :param orphans: Unreferenced pages that were of no class before owners'.
        """

    def take_losses(self) -> dict[int, Findings]:
        """Give what was lost since this was last asked, by mapping."""


def scan(
    reader: Reader,
    layout: PageLayout,
    ranges: Sequence[MemmapRange],
    owned: OwnedPages,
    progress: Callable[[int, int], None] | None = None,
    observers: Sequence[Observer] = (),
    finals: Finals | None = None,
) -> ScanResult:
    """
    Classify every struct page of the ranges.

    :param owned: Pages to give an owner's class where their struct page tells
        none.
    :param progress: Called with pages done and pages in all.
    :param observers: Those who look at each block once it is classified.
    :param finals: What makes the classes final before they are counted and looked
        at; the result then has no candidates and no mappings.
    """
    total = sum(part.pages for part in ranges)
    done = 0
    before = reader.reads - (finals.reads if finals is not None else 0)
    far_heads = _FarHeads(reader, layout)
    result = ScanResult()
    compiled = _compiled(reader, layout)
    for chunk in read_chunks(reader, layout, ranges):
        block = (compiled.classify if compiled else classify)(
            chunk.data, chunk.pfn, chunk.address, layout, far_heads, chunk.gaps
        )
        _add(result, block, owned, finals, compiled)
        for observer in observers:
            observer.observe(block)
        done += len(block)
        if progress is not None:
            progress(done, total)
    result.heads_unreadable = far_heads.unreadable
    result.memmap_reads = reader.reads - before
    if finals is not None:
        result.memmap_reads -= finals.reads
        result.losses = finals.take_losses()
    return result


def prepare(reader: Reader, layout: PageLayout) -> None:
    """Make what all parts of a scan need, before other processes have it as well."""
    BulkReader.of(reader)
    _compiled(reader, layout)


def _compiled(reader: Reader, layout: PageLayout) -> Compiled | None:
    # It takes as long to make as some blocks do, and a scan may have many parts.
    return reader.once(compiled_classifier, lambda: compiled_classifier(layout))


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


def _add(
    result: ScanResult,
    block: Block,
    owned: OwnedPages,
    finals: Finals | None,
    compiled: Compiled | None,
) -> None:
    key = compiled.key(block) if compiled else None
    keys = node_zone_keys(block) if key is None else key
    _mark_device(block, keys)
    orphans = where(block.codes == PageClass.UNATTRIBUTED)
    orphans = orphans[block.unreferenced(orphans)]
    _apply_owners(block, owned)
    if finals is None:
        _add_candidates(result.candidates, block, orphans, keys)
    else:
        finals.settle(block, orphans)
    runs = _runs(keys, len(block))
    if compiled and len(runs) <= _MAX_RUNS:
        _add_compiled(result, block, compiled, keys, runs, finals is None)
        return
    if finals is None:
        _add_cache(result.cache, block, keys)
    _add_counts(result, block.codes, keys)
    _add_anon(result, block, keys)


def _runs(keys: int | npt.NDArray[np.int64], pages: int) -> list[tuple[int, int, int]]:
    """Find the runs of pages with the same key: first, end and key of each."""
    if isinstance(keys, int):
        return [(0, pages, keys)]
    firsts = [0, *(where(keys[1:] != keys[:-1]) + 1).tolist()]
    ends = [*firsts[1:], pages]
    return list(zip(firsts, ends, keys[firsts].tolist(), strict=True))


def _add_compiled(
    result: ScanResult,
    block: Block,
    compiled: Compiled,
    keys: int | npt.NDArray[np.int64],
    runs: list[tuple[int, int, int]],
    cached: bool,
) -> None:
    """Do as the three functions do that numpy's blocks need, in one pass."""
    nameless = 0
    for first, end, key in runs:
        sums = compiled.sums(first, end)
        _add_key(result, key, sums.counts[:NCLASSES])
        if cached and len(sums.pages):
            zones = np.full(len(sums.pages), key, np.int64)
            result.cache.add(sums.mappings, zones, sums.pages)
        result.anon_unmapped += sums.anon_unmapped
        result.anon_swapcache += sums.anon_swapcache
        result.shmem_swapcache += sums.shmem_swapcache
        nameless += sums.nameless
    if nameless:
        _add_nameless(result, block, keys)


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
        _add_key(result, key, _count(part))


def _add_key(result: ScanResult, key: int, counts: npt.NDArray[np.int64]) -> None:
    if key in result.counts:
        result.counts[key] += counts
    else:
        result.counts[key] = counts.copy()


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
    first, last = owned.pfns.searchsorted(ends)
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
    swappable = swappable[swapped]
    result.shmem_swapcache += int(np.count_nonzero(shmem[swappable]))
    result.anon_swapcache += int(np.count_nonzero(anon[swappable]))
    _add_nameless(result, block, keys)


def _add_nameless(
    result: ScanResult, block: Block, keys: int | npt.NDArray[np.int64]
) -> None:
    pages, entries = nameless_swap(block)
    result.swap_entries.append(entries)
    result.swap_keys.append(_some(keys, pages))


def nameless_swap(block: Block) -> tuple[Indices, npt.NDArray[np.uint64]]:
    """Find anon pages of the swap cache that no mapping names, and their entries."""
    pages = where(block.codes == PageClass.ANON)
    heads = block.heads_of(pages)
    bits = np.uint64(block.layout.swapcache_bits)
    nameless = (block.mapping[heads] == 0) & (block.flags[heads] & bits == bits)
    entries = block.column(block.layout.private)[heads[nameless]]
    return pages[nameless], entries


def _mapped_whole(block: Block, heads: npt.NDArray[np.intp]) -> int:
    """Count the heads of compound pages that some page table maps as a whole."""
    compound = block.flags[heads] & np.uint64(block.layout.bits["head"]) != 0
    compound &= heads + 1 < len(block)
    entire = block.column(block.layout.entire_mapcount, "<i4", skip=1)
    return int(np.count_nonzero(entire[heads[compound]] >= 0))
