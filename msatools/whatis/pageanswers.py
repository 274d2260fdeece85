# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a page of memory is, and what it belongs to."""

from msgspec.structs import replace

from msatools.memory.pages.classes import PageClass
from msatools.whatis.kernelmap import KernelMap
from msatools.whatis.lookup import Lookup
from msatools.whatis.mappers import Mappers
from msatools.whatis.model import Page, PageFile, TableOwner
from msatools.whatis.pages import PageFound, Pages
from msatools.whatis.slabs import SlabObjects
from msatools.whatis.tableowners import TableOwners
from msatools.whatis.words import owner_text

_ANON = (PageClass.ANON, PageClass.KSM)
_MAPPED = (
    *_ANON,
    PageClass.FILE,
    PageClass.EXEC,
    PageClass.SHMEM,
    PageClass.USER_HUGETLB,
)
_TABLES = (PageClass.PAGE_TABLES, PageClass.PAGE_TABLES_OWN)
_MAX_PFN = 1 << 52


class PageAnswers:
    """Describes single pages."""

    def __init__(
        self, lookup: Lookup, pages: Pages, slabs: SlabObjects, kernel: KernelMap
    ) -> None:
        self._lookup = lookup
        self._pages = pages
        self._slabs = slabs
        self._map = kernel
        self._mappers = Mappers(lookup)
        self._tables = TableOwners(lookup)

    def of(self, pfn: int) -> Page | None:
        """Return the page of a number; ``None`` if it has no struct page."""
        if not 0 <= pfn < _MAX_PFN:
            return None
        found = self._pages.find(pfn)
        return None if found is None else self._page(found)

    def _page(self, found: PageFound) -> Page:
        file = self._pages.file(found)
        cached = None
        if file is not None:
            huge = found.code == PageClass.USER_HUGETLB
            cached = PageFile(
                name=file.name,
                inode=file.inode,
                offset=None if huge else found.index * self._lookup.page_size,
                fstype=file.fstype,
                device=file.device,
            )
        mappers = self._mappers.of(found) if found.code in _MAPPED else None
        page = Page(
            pfn=found.pfn,
            page_class=found.class_name,
            is_guess=found.is_guess,
            owner=None,
            flags=found.flags,
            order=found.order,
            node=found.node,
            references=found.references,
            cgroup=self._pages.cgroup(found),
            file=cached,
            mappers=mappers,
            cache=self._cache_of(found),
            table_owners=self._table_owners(found),
        )
        owner = owner_text(page)
        if owner is None and found.code == PageClass.RESERVED:
            image = self._map.in_image(found.pfn * self._lookup.page_size)
            owner = None if image is None else "of the kernel's image"
        return replace(page, owner=owner)

    def _table_owners(self, found: PageFound) -> tuple[TableOwner, ...] | None:
        """Return the processes that a page table is of; ``None`` if of none."""
        return (self._tables.of(found.pfn) or None) if found.code in _TABLES else None

    def _cache_of(self, found: PageFound) -> str | None:
        """Return the slab cache that a page is of."""
        if found.code != PageClass.SLAB:
            return None
        address = self._map.direct(found.pfn * self._lookup.page_size)
        return None if address is None else self._slabs.cache_at(address)
