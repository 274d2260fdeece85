# SPDX-License-Identifier: LGPL-2.1-or-later

"""Results of a scan of the memmap: only sums, so that memory use is bounded.

Also determines which swap cache pages without a mapping are shared memory.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.swap import for_each_swap_info
from msgspec import Struct, field

from msatools.errors import LOST
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.structs import SWAP_TYPE_SHIFT
from msatools.kernel.walks import list_nodes, xarray_values
from msatools.memory.classes import CLASSES, NCLASSES, PageClass
from msatools.memory.classify import (
    NOT_MAPPED,
    NOWHERE,
    POINTER_BYTES,
    Block,
    Indices,
    are_links,
    free_rooms,
    node_zone_keys,
    where,
)
from msatools.memory.compiled import BlockSums, Compiled
from msatools.memory.model import ScanChanges
from msatools.memory.owners import OwnedPages
from msatools.selfdesc.find import (
    ask_each,
    drgn_lookups,
    find_type,
    find_variable,
    offset_of,
)

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
        """Add the pages of a later part of memory."""
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
        """Return columns mapping, key and pages: a row for each pair of the first two,
        ascending."""
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
    Unreferenced pages without a class: free pages on per-CPU lists, and others.

    Struct pages do not mark the pages on per-CPU lists. With these columns, the lists
    can be followed without further reads.
    """

    nodes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Address of each page's list node (``page->lru``)."""

    nexts: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    prevs: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    codes: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    """Class that each page was counted under."""

    keys: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """Node and zone key of each page."""

    rooms: list[npt.NDArray[np.intp]] = field(default_factory=list)
    """Maximum pages of a free block that begins at each page (``free_rooms()``)."""

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
        """Add losses by mapping; a loss of the same mapping in several parts counts
        once."""
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


# --- Determines whether swap cache pages without a mapping are anonymous or shmem.


_SWAP_HAS_CACHE = 0x40
_SWAP_MAP_SHMEM = 0xBF
"""The use count of an entry that shmem owns (linux/swap.h)."""


def settle_swapcache(reader: Reader, result: ScanResult, losses: LossLog) -> None:
    """
    Move shared memory pages that are only in the swap cache to the class shmem.

    A page that was read from swap has no mapping until it is mapped or put back into
    its file. Until then, only the swap entry distinguishes shmem from anon.
    """
    if not result.swap_entries:
        return
    entries = np.concatenate(result.swap_entries)
    keys = np.concatenate(result.swap_keys)
    swapped = swapped_shmem(reader, losses)
    if swapped is None:
        losses.note(
            "no-swap-list",
            f"{len(entries):,} pages in the swap cache may be shmem, counted as anon",
        )
        return
    for key in keys[swapped.have(entries)].tolist():
        result.move(key, PageClass.ANON, PageClass.SHMEM, 1)
        result.anon_unmapped -= 1
        result.anon_swapcache -= 1
        result.shmem_swapcache += 1


class SwapMarks(Struct, frozen=True):
    """The swap maps: a byte for each swap entry, which marks shared memory."""

    reader: Reader
    maps: Mapping[int, int]
    """Address of the swap map of each device, by the device's number."""

    def have(self, entries: Addresses) -> npt.NDArray[np.bool_]:
        """Return which entries belong to shared memory."""
        shift = np.uint64(SWAP_TYPE_SHIFT)
        devices, index = np.unique(entries >> shift, return_inverse=True)
        maps = [self.maps.get(device, 0) for device in devices.tolist()]
        bases = np.array(maps, np.uint64)[index]
        offsets = entries & ((np.uint64(1) << shift) - np.uint64(1))
        marks, readable = self.reader.read_records(bases + offsets, 1)
        of_shmem = marks[:, 0] & ~np.uint8(_SWAP_HAS_CACHE) == _SWAP_MAP_SHMEM
        shmem: npt.NDArray[np.bool_] = readable & (bases != 0) & of_shmem
        return shmem


class SwappedShmem(Struct, frozen=True):
    """Swap entries of shared memory: ranges in ascending order, *last* inclusive."""

    first: Addresses
    last: Addresses

    def have(self, entries: Addresses) -> npt.NDArray[np.bool_]:
        """Return which entries belong to shared memory."""
        if not len(self.first):
            return np.zeros(len(entries), np.bool_)
        at = np.searchsorted(self.first, entries, side="right") - 1
        return (at >= 0) & (entries <= self.last[at])


def swapped_shmem(reader: Reader, losses: LossLog) -> SwapMarks | SwappedShmem | None:
    """
    Return a lookup of the swap entries of shared memory; ``None`` if they are unknown.

    "mm, swap: use the swap table for the swap cache" (in v6.18) began to replace the
    swap map, whose mark for shmem is gone in 7.x.
    """
    try:
        with drgn_lookups:
            if find_type(reader.prog, "struct swap_cluster_info").has_member("table"):
                return swapped_files(reader, losses)
            maps = {
                info.type.value_(): info.swap_map.value_()
                for info in ask_each(for_each_swap_info, reader.prog)
            }
            return SwapMarks(reader, maps)
    except LOST:
        return None


def swapped_files(reader: Reader, losses: LossLog) -> SwappedShmem:
    """
    Read the swap entries in the trees of all files of shared memory.

    mm/shmem.c keeps a list of the files that have swapped pages. In a file's tree, a
    swap entry takes the place of each swapped page.

    :raises MissingError: if this kernel has no such list
    """
    prog = reader.prog
    head = find_variable(prog, "shmem_swaplist").address_of_().value_()
    info = find_type(prog, "struct shmem_inode_info")
    node = offset_of(info, "swaplist")
    pages = offset_of(info, "vfs_inode.i_data.i_pages")
    ranges = [
        (entry, entry + last - first)
        for file in list_nodes(reader, head, losses, "the list of swapped shmem")
        for first, last, entry in xarray_values(
            reader, int(file) - node + pages, losses, "the pages of swapped shmem"
        )
    ]
    table = np.array(sorted(ranges), np.uint64).reshape(-1, 2)
    return SwappedShmem(table[:, 0], table[:, 1])


def nameless_swap(block: Block) -> tuple[Indices, npt.NDArray[np.uint64]]:
    """Return the indices of anon pages that are in the swap cache without a mapping,
    and their swap entries."""
    pages = where(block.codes == PageClass.ANON)
    heads = block.heads_of(pages)
    bits = np.uint64(block.layout.swapcache_bits)
    nameless = (block.mapping[heads] == 0) & (block.flags[heads] & bits == bits)
    entries = block.column(block.layout.private)[heads[nameless]]
    return pages[nameless], entries


# --- Adds the pages of a classified block to the result of a scan.


_MAX_RUNS = 64
"""Maximum runs of the same node and zone in a block for the C code: with more, numpy is
faster."""

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


class Finals(Protocol):
    """Resolves final classes during the scan rather than after it."""

    @property
    def reads(self) -> int:
        """Number of reads so far."""

    def settle(self, block: Block, orphans: Indices) -> None:
        """
        Set the final classes of a block's pages.

        :param orphans: Unreferenced pages that had no class before owners were applied.
        """

    def take_losses(self) -> dict[int, LossLog]:
        """Return and clear the losses by mapping."""


def add_block(
    result: ScanResult,
    block: Block,
    owned: OwnedPages,
    finals: Finals | None,
    compiled: Compiled | None,
) -> None:
    """Apply owners and final classes to a block, and count it: :func:`.scan.scan`."""
    key = compiled.key(block) if compiled else None
    keys = node_zone_keys(block) if key is None else key
    _mark_device(block, keys)
    orphans = where(block.codes == PageClass.UNATTRIBUTED)
    orphans = orphans[block.references(orphans) == 0]
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
    """Return the runs of pages with the same key: first index, end (exclusive), key."""
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
    """Do the work of _add_cache(), _add_counts() and _add_anon() in one pass."""
    nameless = 0
    for first, end, key in runs:
        sums = compiled.sums(first, end)
        add_sums(result, sums, key, cached)
        nameless += sums.nameless
    if nameless:
        _add_nameless(result, block, keys)


def add_sums(result: ScanResult, sums: BlockSums, key: int, cached: bool) -> None:
    """
    Add the sums over pages of one node and zone.

    :param cached: Whether to add the pages by mapping to ``result.cache``, too.
    """
    _add_key(result, key, sums.counts[:NCLASSES])
    if cached and len(sums.pages):
        zones = np.full(len(sums.pages), key, np.int64)
        result.cache.add(sums.mappings, zones, sums.pages)
    result.anon_unmapped += sums.anon_unmapped
    result.anon_swapcache += sums.anon_swapcache
    result.shmem_swapcache += sums.shmem_swapcache


def _mark_device(block: Block, keys: int | npt.NDArray[np.int64]) -> None:
    """Classify pages of ZONE_DEVICE, which can share a section with RAM."""
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


def _keys_of(
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
        parts = ((int(key), codes[keys == key]) for key in distinct(keys))
    for key, part in parts:
        _add_key(result, key, _count(part))


def _add_key(result: ScanResult, key: int, counts: npt.NDArray[np.int64]) -> None:
    if key in result.counts:
        result.counts[key] += counts
    else:
        result.counts[key] = counts.copy()


def _count(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """
    Count the pages of each class, four times as fast as np.bincount().

    Most blocks have few classes, and the most common ones are counted first.
    """
    counts = np.zeros(NCLASSES, np.int64)
    left = len(codes)
    for code in _BY_FREQUENCY:
        counts[code] = np.count_nonzero(codes == code)
        left -= int(counts[code])
        if not left:
            break
    return counts


def _apply_owners(block: Block, owned: OwnedPages) -> None:
    # searchsorted() would convert the whole array if the types differed.
    ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
    first, last = owned.pfns.searchsorted(ends)
    if first == last:
        return
    indices = (owned.pfns[first:last] - np.uint64(block.pfn)).astype(np.intp)
    current = block.codes[indices]
    claimable = current == PageClass.UNATTRIBUTED
    if not block.layout.types.has("large_kmalloc"):
        claimable |= current == PageClass.LARGE_KMALLOC  # a guess
    # A page of a ring that a program has mapped has the file's mapping on 6.12 and
    # before (perf_mmap_fault()), but is not in the page cache.
    rings = owned.codes[first:last] == PageClass.RINGS
    claimable |= (current == PageClass.FILE) & rings
    mine = indices[claimable]
    block.codes[mine] = owned.codes[first:last][claimable]
    heads = mine[block.flags[mine] & np.uint64(block.layout.bits["head"]) != 0]
    if len(heads):
        # The owner of a compound page's head owns its tails.
        near = (block.tail_heads >= 0) & (block.tail_heads < len(block))
        tails, tail_heads = block.tails[near], block.tail_heads[near]
        owned_tails = np.isin(tail_heads, heads)
        block.codes[tails[owned_tails]] = block.codes[tail_heads[owned_tails]]


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
    nodes = block.nodes(orphans)
    # A page that was never on a list is linked to itself.
    linked = are_links(nexts, block.layout.kernel_start) & (nexts != nodes)
    rooms = free_rooms(block, orphans)
    orphans = orphans[linked]
    candidates.nexts.append(nexts[linked])
    candidates.prevs.append(block.column(lru + POINTER_BYTES)[orphans])
    candidates.nodes.append(nodes[linked])
    candidates.codes.append(block.codes[orphans])
    candidates.keys.append(_keys_of(keys, orphans))
    candidates.rooms.append(rooms[linked])


def _add_cache(
    cache: CachePages, block: Block, keys: int | npt.NDArray[np.int64]
) -> None:
    pages = where(block.codes == PageClass.FILE)
    if not len(pages):
        return
    mappings, zones = block.mapping[pages], _keys_of(keys, pages)
    # Runs of the same file are far fewer than pages.
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
    result.swap_keys.append(_keys_of(keys, pages))


def _mapped_whole(block: Block, heads: npt.NDArray[np.intp]) -> int:
    """Count the heads of compound pages that are mapped as a whole."""
    compound = block.flags[heads] & np.uint64(block.layout.bits["head"]) != 0
    compound &= heads + 1 < len(block)
    entire = block.column(block.layout.entire_mapcount, "<i4", skip=1)
    return int(np.count_nonzero(entire[heads[compound]] >= 0))
