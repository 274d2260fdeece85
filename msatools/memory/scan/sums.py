# SPDX-License-Identifier: LGPL-2.1-or-later

"""Adds the pages of a classified block to the result of a scan."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import distinct
from msatools.kernel.report import LossLog
from msatools.memory.owners.owners import OwnedPages
from msatools.memory.pages.classes import CLASSES, NCLASSES, PageClass
from msatools.memory.pages.classify import NOT_MAPPED, Block, Indices, where
from msatools.memory.pages.compiled import Compiled
from msatools.memory.pages.freelinks import POINTER_BYTES, are_links
from msatools.memory.pages.orders import free_rooms
from msatools.memory.pages.zonekeys import NOWHERE, node_zone_keys
from msatools.memory.scan.result import CachePages, FreeCandidates, ScanResult
from msatools.memory.scan.swapcache import nameless_swap

_MAX_RUNS = 64
"""Maximum runs of the same node and zone in a block: numpy is faster with more."""

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
    """Return the runs of pages with the same key: first, end and key of each."""
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
