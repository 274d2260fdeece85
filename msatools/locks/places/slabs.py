# SPDX-License-Identifier: LGPL-2.1-or-later

"""Which object of the slab allocator an address lies in (mm/slub.c, mm/slab.c).

drgn's own look-up tells as well whether the object is in use, for which it reads the
free objects of every CPU. What tasks wait for is in use.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import drgn
from drgn.helpers.linux.mm import PageSlab, compound_head, pfn_to_virt

from msatools.kernel.slab import SlabCache, read_cache, slab_cache_offset, slab_type
from msatools.kernel.vmemmap import vmemmap_base
from msatools.locks.base.struct_reader import Layout
from msatools.selfdesc.variables import find_variable
from msatools.target.addresses import KERNEL_HALF

_PAGE = 4096


@dataclass(frozen=True)
class SlabObject:
    """A piece of memory that a cache has given out."""

    cache: str
    """Caches of like objects may be merged: then it has the first one's name."""

    start: int
    size: int
    """In bytes, with all that the allocator has put around it."""

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.start + self.size


class Slabs:
    """Looks objects up; each cache is read once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._prog = layout.reader.prog
        self._cache = lru_cache(maxsize=None)(self._read_cache)

    def find(self, address: int) -> SlabObject | None:
        """Find the object that an address lies in; ``None`` if in none.

        :raises drgn.FaultError: if a structure on the way cannot be read
        :raises LookupError: if the types are unknown
        """
        if address < KERNEL_HALF:
            return None
        page = self._page(address)
        if page is None or not PageSlab(page):
            return None
        slab = page.value_()
        cache = self._cache(self._layout.word(slab + self._cache_offset))
        if cache is None:
            return None
        if self._first_object is not None:
            first = self._layout.word(slab + self._first_object)
        else:
            start, _ = self._memory
            first = start + (slab - self._pages) // self._page_size * _PAGE
        first += cache.padding
        if address < first:
            return None
        number = (address - first) // cache.size
        return SlabObject(cache.name, first + number * cache.size, cache.size)

    def _page(self, address: int) -> drgn.Object | None:
        """Find the first ``struct page`` of the piece of memory that an address is in.

        drgn would look up anew where all memory is for each address.
        """
        start, end = self._memory
        if address >= end:
            # More may have come since.
            del self._memory
            start, end = self._memory
        if not start <= address < end:
            return None
        number = (address - start) // _PAGE
        page = self._pages + number * self._page_size
        return compound_head(drgn.Object(self._prog, self._pointer, value=page))

    @cached_property
    def _memory(self) -> tuple[int, int]:
        """Where all memory is mapped, from page number 0 on, and where that ends."""
        last = find_variable(self._prog, "max_low_pfn")
        start, end = (pfn_to_virt(self._prog, pfn).value_() for pfn in (0, last))
        return start, end + _PAGE

    @cached_property
    def _pages(self) -> int:
        return vmemmap_base(self._prog)

    @cached_property
    def _page_size(self) -> int:
        return self._layout.size("page")

    @cached_property
    def _pointer(self) -> drgn.Type:
        return self._prog.type("struct page *")

    @cached_property
    def _cache_offset(self) -> int:
        return slab_cache_offset(self._prog)

    @cached_property
    def _first_object(self) -> int | None:
        """Where in its ``struct page`` a slab of CONFIG_SLAB (up to v6.7) has its first
        object; other kernels have something else there."""
        if not self._layout.has("kmem_cache", "colour_off"):
            return None
        offset: int = slab_type(self._prog).member("s_mem").offset
        return offset

    def _read_cache(self, address: int) -> SlabCache | None:
        if address < KERNEL_HALF:
            return None
        return read_cache(self._layout.reader, address)
