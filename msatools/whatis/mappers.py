# SPDX-License-Identifier: LGPL-2.1-or-later

"""The processes that map a page, by the kernel's reverse mapping (mm/rmap.c).

An anonymous page points at its ``struct anon_vma``, a page of a file at the file's
``struct address_space``, a page of KSM at its node in the stable tree (mm/ksm.c). Each
leads to the mappings that may have the page; their page tables say which do.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from msatools.errors import LOST
from msatools.kernel.losses import Loss
from msatools.kernel.walks import tree_records
from msatools.kernel.words import U64
from msatools.memory.pages.classes import PageClass
from msatools.target.addresses import KERNEL_HALF
from msatools.target.model import Address
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import PageMapper
from msatools.whatis.pages import PageFound
from msatools.whatis.usertables import UserEntries

MAX_MAPPERS = 16
"""Processes that are listed for a page."""

_MAX_TRIED = 1 << 10
"""Mappings whose page tables are read for one page: some 0.1 s."""

_FLAGS = 0b11
_ANONYMOUS, _KSM = 0b01, 0b11
_VMA = ("vm_start", "vm_end", "vm_mm")
_KSM_ITEMS = ("ksm_rmap_item", "rmap_item")
_KSM_NODES = ("ksm_stable_node", "stable_node")
"""Linux kernel commit 21fbd59136e0 ("ksm: add the ksm prefix to the names of the ksm
private structures") (in v6.1)"""

_Place = tuple[int, int]
"""Address of a ``struct mm_struct``, and an address in that memory."""


class Mappers:
    """Finds the processes that map single pages."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._structs = lookup.structs
        self._entries = UserEntries(lookup)

    def of(self, page: PageFound) -> tuple[PageMapper, ...]:
        """Return the processes that map a page, at most :data:`MAX_MAPPERS`."""
        found: list[PageMapper] = []
        try:
            for mm, address in islice(self._places(page), _MAX_TRIED):
                if self._entries.find(mm, address).pfn != page.pfn:
                    continue
                process = self._lookup.process_of(mm)
                if process is not None:
                    found.append(
                        PageMapper(
                            pid=process.pid,
                            comm=process.comm,
                            address=Address(address),
                        )
                    )
                if len(found) == MAX_MAPPERS:
                    break
        except LOST as error:
            text = f"cannot read mappings of a page: {error}"
            self._lookup.losses.lose(Loss.MAPPINGS, text)
        return tuple(found)

    def _places(self, page: PageFound) -> Iterator[_Place]:
        """Yield where a page may be mapped."""
        pointer, flags = page.mapping & ~_FLAGS, page.mapping & _FLAGS
        if pointer < KERNEL_HALF:
            return
        if page.code == PageClass.KSM or flags == _KSM:
            yield from self._of_ksm(pointer)
        elif flags == _ANONYMOUS:
            vmas = self._anonymous(pointer)
            yield from self._within(vmas, page, self._anonymous_offset)
        elif not flags:
            vmas = self._of_file(pointer)
            yield from self._within(vmas, page, self._offset_in_file)

    def _within(
        self, vmas: Iterator[int], page: PageFound, first_of: Callable[[int], int]
    ) -> Iterator[_Place]:
        """Yield where a page may be in some mappings.

        :param first_of: Returns the index of the first page of a mapping.
        """
        size = self._lookup.page_size
        for vma in vmas:
            start, end, mm = self._structs.members(vma, "vm_area_struct", *_VMA)
            for index in _indexes(page):
                address = start + (index - first_of(vma)) * size
                if start <= address < end and mm >= KERNEL_HALF:
                    yield mm, address

    def _offset_in_file(self, vma: int) -> int:
        return self._structs.member(vma, "vm_area_struct", "vm_pgoff")

    def _anonymous_offset(self, vma: int) -> int:
        # In v7.3 private pages of files have an index of their own, as if they were of
        # no file; it is in two members.
        if not self._structs.has("vm_area_struct", "__vm_anon_pgoff_lo"):
            return self._offset_in_file(vma)
        low, high = self._structs.members(
            vma, "vm_area_struct", "__vm_anon_pgoff_lo", "__vm_anon_pgoff_hi"
        )
        return high << 32 | low

    def _anonymous(self, anon_vma: int) -> Iterator[int]:
        structs = self._structs
        root = anon_vma + structs.offset("anon_vma", "rb_root.rb_root")
        node = structs.offset("anon_vma_chain", "rb")
        vma = structs.offset("anon_vma_chain", "vma")
        for _, data in tree_records(
            self._lookup.reader,
            root,
            node,
            vma + 8,
            self._lookup.losses,
            "the tree of an anonymous page's mappings",
        ):
            yield U64.unpack_from(data, vma)[0]

    def _of_file(self, mapping: int) -> Iterator[int]:
        structs = self._structs
        root = mapping + structs.offset("address_space", "i_mmap.rb_root")
        node = structs.offset("vm_area_struct", "shared.rb")
        for vma, _ in tree_records(
            self._lookup.reader,
            root,
            node,
            0,
            self._lookup.losses,
            "a file's tree of mappings",
        ):
            yield vma

    def _of_ksm(self, stable: int) -> Iterator[_Place]:
        structs = self._structs
        name = next((each for each in _KSM_NODES if structs.has(each, "hlist")), None)
        item = next((each for each in _KSM_ITEMS if structs.has(each, "hlist")), None)
        if name is None or item is None:
            return
        following = structs.member(stable, name, "hlist.first")
        for _ in range(_MAX_TRIED):
            if following < KERNEL_HALF:
                return
            rmap = following - structs.offset(item, "hlist")
            mm, address, following = structs.members(
                rmap, item, "mm", "address", "hlist.next"
            )
            yield mm, address & -self._lookup.page_size


def _indexes(page: PageFound) -> Iterator[int]:
    """Yield the indices that a page may have in a mapping, in pages."""
    yield page.index
    if page.code == PageClass.USER_HUGETLB and page.order:
        # It counted huge pages until "mm/filemap: remove hugetlb special casing in
        # filemap.c" (a08c7193e4f1, in v6.7).
        within = page.pfn - page.head
        index = (page.index - within << page.order) + within
        if index != page.index:
            yield index
