# SPDX-License-Identifier: LGPL-2.1-or-later

"""One page of memory: its class as in msa-memstat, and what it belongs to.

The struct pages around it are classified as a scan of the memmap does, and more is read
only for pages whose struct page does not say enough.
"""

from functools import cached_property

import numpy as np
from msgspec import Struct

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.mm import online_nodes, populated_zones
from msatools.kernel.reader import Addresses, unsigned
from msatools.kernel.report import Loss
from msatools.kernel.structs import MAPPING_FLAGS, find_offset
from msatools.memory.by_cgroup import Memcgs
from msatools.memory.by_file import CachedFile, CachedFiles
from msatools.memory.classes import CLASSES, PageClass
from msatools.memory.classify import Block, classify, free_blocks, node_and_zone
from msatools.memory.memmap import MemmapRange, repeated
from msatools.memory.owners import OwnerSearch, pfns_of
from msatools.memory.refine import CacheClasses, ListedPages, listed_pages, pcp_lists
from msatools.memory.scan import FarHeadReader
from msatools.memory.sums import nameless_swap, swapped_shmem
from msatools.model import values
from msatools.program.linear import KERNEL_HALF
from msatools.selfdesc.find import find_type
from msatools.whatis.lookup import Lookup

_BLOCK = 1 << 10
"""Struct pages that are read at once: the largest block of the buddy allocator on
x86-64, and the largest compound page but for huge pages of 1 GiB."""

_GAP_BYTES = 4096

_CACHED = (PageClass.FILE, PageClass.EXEC, PageClass.SHMEM, PageClass.BLOCKDEV)
_IN_FILES = (*_CACHED, PageClass.USER_HUGETLB)
_FREE = (PageClass.FREE_BUDDY, PageClass.FREE_PCP, PageClass.FREE_HUGETLB)
_INDEX = ("index", "__folio_index")


class PageFound(Struct, frozen=True):
    """A page, its class, and the words of its struct page."""

    pfn: int
    head: int
    """pfn of the head of its compound page; the page itself if it is of none."""

    code: int
    """Class: :class:`msatools.memory.classes.PageClass`."""

    order: int | None
    flags: tuple[str, ...]
    references: int | None
    node: int | None
    mapping: int
    """``mapping`` of the head."""

    index: int
    """Index of the page in its file or anonymous mapping, in pages."""

    is_guess: bool = False
    """Whether the class is only likely: before v6.14, large kmalloc is not marked, and
    compound pages of a driver look the same."""

    @property
    def class_name(self) -> str:
        return CLASSES[self.code]

    @property
    def is_free(self) -> bool:
        """Whether nobody uses it."""
        return self.code in _FREE


class Pages:
    """Finds pages by number; owners are collected when they are first needed."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._reader = lookup.reader
        self._losses = lookup.losses
        self._layout = lookup.page
        self._far_heads = FarHeadReader(lookup.reader, lookup.page)

    def number_of(self, address: int) -> tuple[int, int] | None:
        """Return the page that a ``struct page`` describes; ``None`` if it is none.

        :return: The pfn, and the offset of the address in the struct page.
        """
        size = self._layout.size
        for part in self._lookup.memmap:
            if part.address <= address < part.address_end(size):
                pages, offset = divmod(address - part.address, size)
                return part.pfn + pages, offset
        return None

    def struct_address(self, pfn: int) -> int | None:
        """Return the address of the struct page of a page; ``None`` if it has none."""
        part = self._range_of(pfn)
        return part and part.address + (pfn - part.pfn) * self._layout.size

    def find(self, pfn: int) -> PageFound | None:
        """Return a page; ``None`` if it has no struct page."""
        part = self._range_of(pfn)
        if part is None:
            return None
        block = self._block(part, pfn)
        index = pfn - block.pfn
        head = self._head(block, index)
        found = self._words(block, index, head)
        code = self._settled(block, index, found)
        marked = self._layout.types.has("large_kmalloc")
        is_guess = code == PageClass.LARGE_KMALLOC and not marked
        return PageFound(**{**values(found), "code": code, "is_guess": is_guess})

    def file(self, page: PageFound) -> CachedFile | None:
        """Return the file that a page caches a part of; ``None`` if of none."""
        # An anonymous page, as of hugetlb, has flags in its mapping.
        is_file = page.mapping >= KERNEL_HALF and not page.mapping & MAPPING_FLAGS
        if page.code not in _IN_FILES or not is_file:
            return None
        (file,) = self._files.files(np.array([page.mapping], np.uint64))
        return file

    def mapped_at(self, pfn: int) -> int | None:
        """Return the address at which vmalloc maps a page; ``None`` if it does not.

        Stacks of tasks are such areas, too, unless they are in the direct map.
        """
        areas = self.owners.owners.areas
        rows = np.flatnonzero(
            pfns_of(areas.pages, self._lookup.prog, self._layout) == pfn
        )
        if not len(rows):
            return None
        return int(areas.at[rows[0]])

    def cgroup(self, page: PageFound) -> str | None:
        """Return the control group that a page is charged to; ``None`` if to none."""
        address = self.struct_address(page.head)
        if address is None or page.is_free or page.code == PageClass.SLAB:
            return None  # slabs are charged object by object
        try:
            words = self._memcgs.of_pages(np.array([address], np.uint64))
            groups: Addresses = self._memcgs.resolve(words)
            if not groups.any():
                return None
            (group,) = self._memcgs.groups(groups)
        except LOST:
            return None  # CONFIG_MEMCG=n
        return group.path

    @cached_property
    def owners(self) -> OwnerSearch:
        """Owners of pages that are recorded elsewhere."""
        lookup = self._lookup
        return OwnerSearch(self._reader, self._layout, lookup.memmap, self._losses)

    @cached_property
    def _files(self) -> CachedFiles:
        return CachedFiles(self._reader, self._losses)

    @cached_property
    def _memcgs(self) -> Memcgs:
        return Memcgs(self._reader, self._losses)

    @cached_property
    def _listed(self) -> ListedPages:
        """Pages on the per-CPU lists of free pages."""
        zones = list(populated_zones(online_nodes(self._lookup.prog, self._losses)))
        lists = pcp_lists(self._reader, zones, self._losses)
        return listed_pages(self._reader, self._layout, lists)

    def _range_of(self, pfn: int) -> MemmapRange | None:
        for part in self._lookup.memmap:
            if part.pfn <= pfn < part.pfn + part.pages:
                return part
        return None

    def _block(self, part: MemmapRange, pfn: int) -> Block:
        """Classify the struct pages around a page, without other structures."""
        first = max(pfn & ~(_BLOCK - 1), part.pfn)
        end = min((pfn & ~(_BLOCK - 1)) + _BLOCK, part.pfn + part.pages)
        size = self._layout.size
        address = part.address + (first - part.pfn) * size
        data: bytes | bytearray
        if part.instead:
            data, gaps = repeated(self._reader, part.instead, size, end - first)
        else:
            data, gaps = self._reader.read_around_gaps(
                address, (end - first) * size, _GAP_BYTES
            )
        return classify(data, first, address, self._layout, self._far_heads, gaps)

    def _head(self, block: Block, index: int) -> int:
        """Return the pfn of the head of a page's compound page."""
        rows = np.flatnonzero(block.tails == index)
        if not len(rows):
            return block.pfn + index
        return block.pfn + int(block.tail_heads[rows[0]])

    def _words(self, block: Block, index: int, head: int) -> PageFound:
        layout = self._layout
        pfn = block.pfn + index
        near = head - block.pfn
        flags, references, mapping, number = 0, None, 0, 0
        code = int(block.codes[index])
        lost = code in (PageClass.EXCLUDED, PageClass.UNREADABLE)
        if not lost and 0 <= near < len(block):
            flags = int(block.flags[near])
            references = int(block.counts[near]) >> 32
            mapping = int(block.mapping[near])
            number = int(block.column(self._index_offset)[near]) + pfn - head
        elif not lost:
            flags, references, mapping, number = self._far_words(head)
            number += pfn - head
        if not lost:
            flags |= int(block.flags[index])
        key = int(block.flags[index]) >> layout.zone_shift
        place = None if lost else node_and_zone(key, layout)
        return PageFound(
            pfn=pfn,
            head=head,
            code=code,
            order=self._order(block, index, head),
            flags=self._flag_names(flags),
            references=references,
            node=None if place is None else place[0],
            mapping=mapping,
            index=number,
        )

    def _far_words(self, head: int) -> tuple[int, int | None, int, int]:
        """Read flags, references, mapping and index of a head outside the block."""
        layout = self._layout
        address = self.struct_address(head)
        try:
            data = self._reader.read(address or 0, layout.size)
        except UNREADABLE as error:
            self._losses.lose(Loss.HEADS, f"cannot read the head of a page: {error}")
            return 0, None, 0, 0

        return (
            unsigned(data, layout.flags, 8),
            unsigned(data, layout.refcount, 4),
            unsigned(data, layout.mapping, 8),
            unsigned(data, self._index_offset, 8),
        )

    @cached_property
    def _index_offset(self) -> int:
        # Linux kernel commit acc53a0b4c15 ("mm: rename page->index to
        # page->__folio_index") (in v6.16)
        offset = find_offset(find_type(self._lookup.prog, "struct page"), _INDEX)
        return self._layout.mapping + 8 if offset is None else offset

    def _order(self, block: Block, index: int, head: int) -> int | None:
        """Return the order of a page's free block or compound page."""
        if block.codes[index] == PageClass.FREE_BUDDY:
            firsts, orders = free_blocks(block)
            row = int(np.searchsorted(firsts, index, "right")) - 1
            if row >= 0 and index < int(firsts[row]) + (1 << int(orders[row])):
                return int(orders[row])
            return None
        tails = int(np.count_nonzero(block.tail_heads == head - block.pfn))
        if not tails:
            return 0
        pages = tails + 1
        # A compound page that fills the block may go on after it.
        is_whole = pages & (pages - 1) == 0 and pages < len(block)
        return pages.bit_length() - 1 if is_whole else None

    def _flag_names(self, flags: int) -> tuple[str, ...]:
        """Return the names of flags; of several names of one flag the first."""
        names: dict[int, str] = {}
        for name, bit in self._layout.bits.items():
            if name.islower() and bit < 1 << self._layout.zone_shift:
                names.setdefault(bit, name)
        return tuple(name for bit, name in sorted(names.items()) if bit & flags)

    def _settled(self, block: Block, index: int, page: PageFound) -> int:
        """Return the final class of a page, by other structures where it needs them."""
        layout, code = self._layout, page.code
        if code in (PageClass.EXCLUDED, PageClass.UNREADABLE):
            return code
        zone = int(block.flags[index]) >> layout.zone_shift
        zone &= (1 << layout.zone_bits) - 1
        if layout.device_zone is not None and zone == layout.device_zone:
            return PageClass.DEVICE
        if code in (PageClass.UNATTRIBUTED, PageClass.LARGE_KMALLOC):
            if not page.references and self._is_listed(page.pfn):
                return PageClass.FREE_PCP
            owned = self.owners.find([page.pfn, page.head])
            return code if owned is None else owned
        if code == PageClass.FILE:
            return self._class_of_cache(page.mapping)
        if code == PageClass.ANON:
            pages, entries = nameless_swap(block)
            rows = np.flatnonzero(pages == index)
            if len(rows):
                swapped = swapped_shmem(self._reader, self._losses)
                if swapped is not None and swapped.have(entries[rows])[0]:
                    return PageClass.SHMEM
        return code

    def _class_of_cache(self, mapping: int) -> int:
        classes = CacheClasses(self._reader)
        (code,) = classes.of(np.array([mapping], np.uint64)).tolist()
        for losses in classes.take_losses().values():
            self._losses.add(losses)
        return int(code)

    def _is_listed(self, pfn: int) -> bool:
        row = int(np.searchsorted(self._listed.pfns, np.uint64(pfn), "right")) - 1
        if row < 0:
            return False
        first = int(self._listed.pfns[row])
        return pfn < first + (1 << int(self._listed.orders[row]))
