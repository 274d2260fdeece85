# SPDX-License-Identifier: LGPL-2.1-or-later

"""Finds the slab object that contains an address (mm/slub.c, mm/slab.c).

drgn's own lookup also determines whether the object is allocated, and therefore reads
the free objects of every CPU. Objects that tasks wait for are allocated.
"""

from functools import cached_property, lru_cache

import drgn
from drgn.helpers.linux.mm import PageSlab, compound_head
from msgspec import Struct

from msatools.kernel.slab import SlabCache, read_cache, slab_cache_offset, slab_type
from msatools.kernel.vmemmap import vmemmap_base
from msatools.locks.base.struct_reader import Layout
from msatools.selfdesc.find import ask, find_type, find_variable, member_of
from msatools.target.addresses import KERNEL_HALF
from msatools.target.linear import page_address


class SlabObject(Struct, frozen=True):
    """An object of a slab cache."""

    cache: str
    """Name of the cache; for merged caches, that of the first one."""

    start: int
    size: int
    """Bytes, with the metadata of the allocator."""

    @property
    def end(self) -> int:
        """Address past the end."""
        return self.start + self.size


class Slabs:
    """Finds slab objects; reads each cache once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._prog = layout.reader.prog
        self._cache = lru_cache(maxsize=None)(self._read_cache)

    def find(self, address: int) -> SlabObject | None:
        """Find the object that contains an address; ``None`` if there is none.

        :raises drgn.FaultError: if a structure that leads to it cannot be read
        :raises MissingError: if the types are unknown
        """
        if address < KERNEL_HALF:
            return None
        page = self._page(address)
        if page is None or not ask(PageSlab, page):
            return None
        slab = page.value_()
        cache = self._cache(self._layout.word(slab + self._cache_offset))
        if cache is None:
            return None
        if self._first_object is not None:
            first = self._layout.word(slab + self._first_object)
        else:
            start, _ = self._memory
            first = (
                start + (slab - self._pages) // self._page_size * self._layout.page_size
            )
        first += cache.padding
        if address < first:
            return None
        index = (address - first) // cache.size
        return SlabObject(cache.name, first + index * cache.size, cache.size)

    def _page(self, address: int) -> drgn.Object | None:
        """Return the head page of an address in the direct map.

        drgn's virt_to_page() would look up the direct map for each address.
        """
        start, end = self._memory
        if address >= end:
            # Memory may have been hot-added.
            del self._memory
            start, end = self._memory
        if not start <= address < end:
            return None
        pfn = (address - start) // self._layout.page_size
        page = self._pages + pfn * self._page_size
        return ask(compound_head, drgn.Object(self._prog, self._pointer, value=page))

    @cached_property
    def _memory(self) -> tuple[int, int]:
        """Start and end of the direct map; the start is the address of pfn 0."""
        last = find_variable(self._prog, "max_low_pfn").value_()
        start, end = (page_address(self._prog, pfn) for pfn in (0, last))
        return start, end + self._layout.page_size

    @cached_property
    def _pages(self) -> int:
        return vmemmap_base(self._prog)

    @cached_property
    def _page_size(self) -> int:
        return self._layout.size("page")

    @cached_property
    def _pointer(self) -> drgn.Type:
        return find_type(self._prog, "struct page *")

    @cached_property
    def _cache_offset(self) -> int:
        return slab_cache_offset(self._prog)

    @cached_property
    def _first_object(self) -> int | None:
        """Offset of ``s_mem``, a pointer to the first object; ``None`` except with
        CONFIG_SLAB (up to v6.7)."""
        if not self._layout.has("kmem_cache", "colour_off"):
            return None
        offset: int = member_of(slab_type(self._prog), "s_mem").offset
        return offset

    def _read_cache(self, address: int) -> SlabCache | None:
        if address < KERNEL_HALF:
            return None
        return read_cache(self._layout.reader, address)
