# SPDX-License-Identifier: LGPL-2.1-or-later

"""List the objects of slab caches, and search their memory for words (mm/slub.c).

Full slabs of a cache are in no list, so slabs are found by reading all ``struct page``.
"""

from collections.abc import Callable, Iterator

import drgn
import numpy as np
from msgspec import Struct

from msatools.errors import DamagedDataError, MissingError
from msatools.kernel.reader import Addresses, Reader, column, distinct
from msatools.kernel.report import Loss, LossLog
from msatools.kernel.slab import MAX_OBJECT, SlabCache, slab_caches, slab_type
from msatools.kernel.structs import Numbers, lose_many
from msatools.memory.classes import page_layout
from msatools.memory.memmap import memmap_ranges, read_chunks
from msatools.program.linear import page_address
from msatools.selfdesc.find import find_variable, member_of

_AT_ONCE = 1 << 24
"""Bytes of slabs that are searched at a time."""

_MAX_SEARCHED = 1 << 32
"""Maximum number of bytes of slabs that are searched: some four seconds."""

_MAX_OBJECTS = (1 << 15) - 1


class SlabPages(Struct, frozen=True):
    """The slabs of some caches, one row a slab."""

    cache: Addresses
    """Address of the ``struct kmem_cache``."""

    start: Addresses
    """Address of the first byte of memory."""

    objects: Numbers
    """Number of objects, allocated and free."""


class SlabWord(Struct, frozen=True):
    """A wanted word that was found in a slab."""

    address: int
    value: int
    cache: SlabCache
    offset: int
    """Offset of the word in its object."""


class SlabScan:
    """The slabs of all caches of a kernel.

    :raises drgn.FaultError: if caches or ``struct page`` cannot be read
    :raises MissingError: if the kernel has no SLUB, or its types are unknown
    """

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        self._reader = reader
        self._losses = losses
        self.caches = {cache.address: cache for cache in slab_caches(reader, losses)}
        if not self.caches:
            raise DamagedDataError("cannot read the list of caches")
        self._slabs = self._find(self.caches)

    def objects(self, cache: int) -> Addresses:
        """Return the addresses of all objects of a cache, allocated and free."""
        known = self.caches[cache]
        own = self._slabs.cache == cache
        starts, counts = self._slabs.start[own], self._slabs.objects[own]
        first = np.repeat(starts + np.uint64(known.padding), counts)
        number = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        found: Addresses = first + number.astype(np.uint64) * np.uint64(known.size)
        return found

    def search(
        self, wanted: Addresses, skip: Callable[[SlabCache], bool]
    ) -> Iterator[SlabWord]:
        """Find words in slabs that equal one of the *wanted* addresses.

        At most :data:`_MAX_SEARCHED` bytes are searched; a note states if more exist.
        """
        left = _MAX_SEARCHED
        for address, cache in self.caches.items():
            if skip(cache):
                continue
            own = self._slabs.cache == address
            for objects in distinct(self._slabs.objects[own]).tolist():
                starts = self._slabs.start[own & (self._slabs.objects == objects)]
                size = cache.padding + objects * cache.size & ~7
                step = max(_AT_ONCE // size, 1)
                for first in range(0, len(starts), step):
                    part = starts[first : first + step]
                    left -= len(part) * size
                    if left < 0:
                        text = "not all of the slab memory was searched for holders"
                        self._losses.note("search-cut-short", text)
                        return
                    yield from self._search_some(part, size, wanted, cache)

    def _search_some(
        self, starts: Addresses, size: int, wanted: Addresses, cache: SlabCache
    ) -> Iterator[SlabWord]:
        records, readable = self._reader.read_records(starts, size)
        lose_many(self._losses, "struct slab", int(np.count_nonzero(~readable)))
        words = records.view("<u8")
        near = np.flatnonzero((words >= wanted.min()) & (words <= wanted.max()))
        found = near[np.isin(words.ravel()[near], wanted)]
        for index in found.tolist():
            row, column = divmod(index, size // 8)
            inside = column * 8 - cache.padding
            yield SlabWord(
                int(starts[row]) + column * 8,
                int(words[row, column]),
                cache,
                inside % cache.size,
            )

    def _find(self, caches: dict[int, SlabCache]) -> SlabPages:
        prog = self._reader.prog
        layout = page_layout(prog)
        cache_offset, objects_offset, shift = _slab_layout(prog)
        start = page_address(prog, 0)
        page_size = find_variable(prog, "PAGE_SIZE").value_()
        known = np.array(sorted(caches), np.uint64)
        rooms = np.array([caches[c].size for c in known.tolist()], np.int64)
        found: list[tuple[Addresses, Addresses, Numbers]] = []
        ranges = memmap_ranges(self._reader, layout, self._losses)
        for chunk in read_chunks(self._reader, layout, ranges):
            if chunk.gaps:
                text = "some struct page cannot be read, and slabs with them"
                self._losses.lose(Loss.SLABS, text)
            pages = np.frombuffer(chunk.data, np.uint8).reshape(-1, layout.size)
            cache = column(pages, cache_offset)
            near = np.flatnonzero((cache >= known[0]) & (cache <= known[-1]))
            near = near[np.isin(cache[near], known)]
            if layout.slab_bit:
                flags = column(pages[near], layout.flags)
                near = near[flags & np.uint64(layout.slab_bit) != 0]
            if not len(near):
                continue
            counts = column(pages[near], objects_offset, 4) >> np.uint64(shift)
            objects = (counts & np.uint64(_MAX_OBJECTS)).astype(np.int64)
            room = rooms[np.searchsorted(known, cache[near])]
            possible = (objects > 0) & (objects * room <= MAX_OBJECT)
            near, objects = near[possible], objects[possible]
            offset = (chunk.pfn + near).astype(np.uint64) * np.uint64(page_size)
            found.append(
                (cache[near].astype(np.uint64), offset + np.uint64(start), objects)
            )
        if not found:
            raise MissingError("no slabs are found")
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        return self._apart(SlabPages(*columns))

    def _apart(self, slabs: SlabPages) -> SlabPages:
        """Leave out slabs whose objects would overlap the next slab."""
        caches, of = np.unique(slabs.cache, return_inverse=True)
        sizes = [self.caches[cache].size for cache in caches.tolist()]
        bytes_ = slabs.objects.astype(np.uint64) * np.array(sizes, np.uint64)[of]
        apart = np.append(slabs.start[:-1] + bytes_[:-1] <= slabs.start[1:], True)
        text = "some slabs have an impossible number of objects"
        self._losses.lose(Loss.SLABS, text, count=int(np.count_nonzero(~apart)))
        return SlabPages(slabs.cache[apart], slabs.start[apart], slabs.objects[apart])


def _slab_layout(prog: drgn.Program) -> tuple[int, int, int]:
    """Find where a ``struct page`` keeps its slab's cache and number of objects.

    :return: Offset of the cache, offset of the word with the number, bits below it.
    :raises MissingError: if the kernel does not keep the number (SLAB, up to v6.7)
    """
    slab = slab_type(prog)
    objects = member_of(slab, "objects").bit_offset
    return member_of(slab, "slab_cache").offset, objects // 32 * 4, objects % 32
