# SPDX-License-Identifier: LGPL-2.1-or-later

"""Looks up the slab caches of many pages at once."""

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Addresses, Reader, column
from msatools.kernel.slab import read_cache, slab_cache_offset
from msatools.kernel.vmemmap import vmemmap_base
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.layout import PageLayout


class SlabNames:
    """Looks up slab caches by page; each cache is read once."""

    def __init__(self, reader: Reader, layout: PageLayout) -> None:
        """
        :raises LookupError: if the types lack the offset of a slab's cache pointer
        """
        prog = reader.prog
        self._reader = reader
        self._layout = layout
        self._cache = slab_cache_offset(prog)
        self._memmap = np.uint64(vmemmap_base(prog))
        self._names: dict[int, str | None] = {0: None}

    def of(self, pfns: npt.NDArray[np.uint64]) -> list[str | None]:
        """Return each page's cache name; ``None`` if not a slab or unreadable."""
        layout = self._layout
        addresses = self._memmap + pfns * np.uint64(layout.size)
        records, readable = self._reader.read_records(addresses, layout.size)
        info = column(records, layout.compound_head)
        is_tail = info & np.uint64(1) != 0
        encoded = addresses & info if layout.compound_mask else info - np.uint64(1)
        heads, index = np.unique(
            np.where(is_tail, encoded, addresses), return_inverse=True
        )
        records, also_readable = self._reader.read_records(heads, layout.size)
        caches = column(records, self._cache)
        caches[~(self._are_slabs(records) & also_readable)] = 0
        names = [self._name_of(cache) for cache in caches.tolist()]
        return [
            names[row] if known else None
            for row, known in zip(index.tolist(), readable.tolist(), strict=True)
        ]

    def _are_slabs(self, records: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        layout, types = self._layout, self._layout.types
        if layout.slab_bit:
            flags = column(records, layout.flags)
            marked: npt.NDArray[np.bool_] = flags & np.uint64(layout.slab_bit) != 0
            return marked
        words = column(records, layout.mapcount, 4).astype(np.uint32)
        typed = (words + np.uint32(1)) > np.uint32(types.lowest)
        keys = words >> np.uint32(types.shift) & np.uint32(types.mask)
        slabs: npt.NDArray[np.bool_] = typed & (types.classes[keys] == PageClass.SLAB)
        return slabs

    def _name_of(self, cache: int) -> str | None:
        if cache not in self._names:
            try:
                name = read_cache(self._reader, cache).name
            except drgn.FaultError:
                name = None
            self._names[cache] = name or None
        return self._names[cache]


def page_numbers(
    addresses: Addresses, start: int, page_size: int, end_pfn: int
) -> Addresses:
    """Convert addresses of the direct map to pfns, others to *end_pfn*.

    :param start: Address of pfn 0 in the direct map.
    """
    pfns: Addresses = (addresses - np.uint64(start)) // np.uint64(page_size)
    return np.minimum(pfns, np.uint64(end_pfn))
