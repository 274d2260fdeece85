# SPDX-License-Identifier: LGPL-2.1-or-later

"""Classifies the pages of a block by their struct pages, with numpy.

Also counts a block's pages for observers of the scan: by class, order, node and zone.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.kernel.reader import Gap, Reader, distinct
from msatools.memory.classes import CLASSES, NCLASSES, PageClass, PageLayout
from msatools.memory.memmap import MemmapRange
from msatools.selfdesc.find import find_type

# --- Classifies the pages of a block by their struct pages, with numpy.
#
# The order of the tests is that of the kernel's stable_page_flags() (fs/proc/page.c):
# the page type and the flags are tested before the mapping word, because slabs, page
# tables and free pages keep other data in that word.


Words = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]

NOT_MAPPED = np.uint32(0xFFFFFFFF)
"""``_mapcount`` of a page without mappings and without a page type: -1."""

_MAX_ORDER = 20
"""Above every MAX_PAGE_ORDER; a higher order in a free page is damage."""


class FarHead(Struct, frozen=True):
    """Class and mapping of a compound page's head that is outside the block."""

    code: int
    mapping: int


FarHeads = Callable[[int], FarHead]
"""Function that looks up a head page outside the block by its address."""


def no_far_head(address: int) -> FarHead:
    """Return a head outside the block as unattributed."""
    return FarHead(PageClass.UNATTRIBUTED, 0)


class Block(Struct):
    """Consecutive struct pages, their classes, and columns of their members."""

    pfn: int
    address: int
    """Address of the first struct page."""

    data: bytes | bytearray
    layout: PageLayout
    flags: Words
    mapping: Words
    """``page->mapping`` of each page; for tails in the page cache, that of the head."""

    counts: Words
    """``_mapcount`` or page type in the low 32 bits, ``_refcount`` in the high."""

    codes: Codes
    tails: Indices
    """Indices of the tails of compound pages, including fake heads."""

    tail_heads: Indices
    """Index of each tail's head, negative or too large if outside the block."""

    words: npt.NDArray[np.uint32]
    """``_mapcount`` or page type."""

    fakes: Indices
    """Indices of fake heads: tails that have a copy of their head's flags."""

    notable: Indices
    """Indices of pages with one of the rare flags: head, reserved, hwpoison, slab."""

    def __len__(self) -> int:
        return len(self.codes)

    def column(
        self, offset: int, dtype: str = "<u8", skip: int = 0
    ) -> npt.NDArray[Any]:
        """View one member of each struct page, from index *skip* on."""
        return column(self.data, self.layout.size, offset, dtype, skip)

    def references(self, pages: Indices) -> Words:
        """Return the reference counts of pages."""
        counts: Words = self.counts[pages] >> np.uint64(32)
        return counts

    def nodes(self, pages: Indices) -> Words:
        """Return the addresses of pages' list nodes (``page->lru``)."""
        first = np.uint64(self.address + self.layout.lru)
        nodes: Words = first + pages.astype(np.uint64) * np.uint64(self.layout.size)
        return nodes

    def flagged(self, mask: int) -> Indices:
        """Return the pages with any flag of *mask*, which may only have rare flags."""
        if not len(self.notable):
            return self.notable
        pages: Indices = self.notable[self.flags[self.notable] & np.uint64(mask) != 0]
        return pages

    def heads_of(self, pages: Indices) -> Indices:
        """Return the head of each page's compound page, or the page itself.

        A head outside the block is replaced by the block's first or last page.
        """
        if not len(self.tails) or not len(pages):
            return pages
        heads = np.arange(len(self))
        heads[self.tails] = np.clip(self.tail_heads, 0, len(self) - 1)
        return heads[pages]


def where(mask: npt.NDArray[Any]) -> Indices:
    """Return the indices where a mask is true: a faster np.flatnonzero()."""
    return mask.nonzero()[0]


def column(
    data: bytes | bytearray, size: int, offset: int, dtype: str, skip: int = 0
) -> npt.NDArray[Any]:
    """View one member of each of many records of *size* bytes."""
    count = len(data) // size - skip
    if not count:
        # numpy does not allow an empty view past the end.
        return np.empty(0, dtype)
    offset += skip * size
    return np.ndarray((count,), dtype, data, offset=offset, strides=(size,))


def classify(
    data: bytes | bytearray,
    pfn: int,
    address: int,
    layout: PageLayout,
    far_heads: FarHeads,
    gaps: list[Gap] | None = None,
) -> Block:
    """
    Classify each page of a block by its struct page alone.

    Other structures refine the classes later: per-CPU free pages and pages owned by
    vmalloc, percpu and so on are still ``UNATTRIBUTED``; all regular files and block
    devices are ``FILE``.

    :param data: Whole struct pages; *pfn* is aligned to every buddy and compound order
        up to the length of the block.
    :param gaps: Parts of *data* that could not be read.
    """
    flags = column(data, layout.size, layout.flags, "<u8").copy()
    mapping = column(data, layout.size, layout.mapping, "<u8").copy()
    counts = np.ascontiguousarray(counts_column(data, layout))
    block = Block(
        pfn=pfn,
        address=address,
        data=data,
        layout=layout,
        flags=flags,
        mapping=mapping,
        counts=counts,
        codes=_by_mapping(flags, mapping, layout),
        tails=np.empty(0, np.intp),
        tail_heads=np.empty(0, np.intp),
        words=counts.astype(np.uint32),
        fakes=np.empty(0, np.intp),
        notable=where((flags & np.uint64(_notable(layout))) != 0),
    )
    _reserved(block)
    _by_type(block)
    _compound_heads(block)
    _compound_tails(block, far_heads)
    _free_blocks(block)
    _poisoned(block)
    _missing(block)
    mark_gaps(block, gaps or [])
    return block


def _notable(layout: PageLayout) -> int:
    bits = layout.bits
    return bits["head"] | bits["reserved"] | bits.get("hwpoison", 0) | layout.slab_bit


def counts_column(data: bytes | bytearray, layout: PageLayout) -> Words:
    """Return ``_mapcount`` and ``_refcount`` as one u64; a view if adjacent."""
    if layout.refcount == layout.mapcount + 4 and layout.mapcount % 8 == 0:
        return column(data, layout.size, layout.mapcount, "<u8")
    mapcount = column(data, layout.size, layout.mapcount, "<u4").astype(np.uint64)
    refcount = column(data, layout.size, layout.refcount, "<u4").astype(np.uint64)
    return mapcount | refcount << np.uint64(32)


_SWAPBACKED_ONLY = 8


def _mapping_classes() -> Codes:
    """
    Return the table of classes by mapping word and PG_swapbacked.

    The index is bits 0-1 of ``mapping``, plus 4 if it is not zero, plus 8 for
    PG_swapbacked. Bit 1 alone marks movable pages of the kernel, up to v6.16.
    """
    table = np.full(16, PageClass.UNATTRIBUTED, np.uint8)
    for swapbacked, cached in ((0, PageClass.FILE), (8, PageClass.SHMEM)):
        table[swapbacked | 4] = cached
        table[swapbacked | 5] = PageClass.ANON
        table[swapbacked | 6] = PageClass.MOVABLE
        table[swapbacked | 7] = PageClass.KSM
    return table


MAPPING_CLASSES = _mapping_classes()


def _by_mapping(flags: Words, mapping: Words, layout: PageLayout) -> Codes:
    swapbacked = np.uint64(layout.bits["swapbacked"])
    key = mapping.astype(np.uint8) & np.uint8(3)
    key |= (mapping != 0).view(np.uint8) << np.uint8(2)
    key |= ((flags & swapbacked) != 0).view(np.uint8) << np.uint8(3)
    # take() is twice as fast as indexing.
    codes: Codes = MAPPING_CLASSES.take(key)
    # Swap cache without a mapping: read ahead and not yet mapped, or shmem on its way
    # to or from swap. The swap map resolves it later.
    nameless = where(key == _SWAPBACKED_ONLY)
    swapcache = np.uint64(layout.swapcache_bits)
    codes[nameless[flags[nameless] & swapcache == swapcache]] = PageClass.ANON
    return codes


def _by_type(block: Block) -> None:
    types, word = block.layout.types, block.words
    # One comparison finds typed pages: -1, the most common value, wraps to 0.
    typed = where((word + np.uint32(1)) > np.uint32(types.lowest))
    if len(typed):
        keys = word[typed] >> np.uint32(types.shift) & np.uint32(types.mask)
        codes = types.classes[keys]
        known = codes != PageClass.UNATTRIBUTED
        block.codes[typed[known]] = codes[known]
    if block.layout.slab_bit:
        block.codes[block.flagged(block.layout.slab_bit)] = PageClass.SLAB


def _compound_heads(block: Block) -> None:
    """Set the classes of hugetlb and large kmalloc heads; find tails and fake heads."""
    layout = block.layout
    info = block.column(layout.compound_head)
    # Bit 0 marks a tail: only the low byte of each page is read.
    tails = where(block.column(layout.compound_head, "<u1") & np.uint8(1))
    heads = block.flagged(layout.bits["head"])
    heads = heads[heads + 1 < len(block)]
    tail_words = info[tails]
    if not len(heads):
        block.tails = tails
        block.tail_heads = _head_indices(block, tails, tail_words)
        return
    if layout.fake_heads:
        # Linux kernel commit e7d324850bfc ("mm: hugetlb: free the 2nd vmemmap
        # page associated with each HugeTLB page") (in v5.18): the vmemmap of tails is
        # one page mapped many times, which begins with a copy of the head. The struct
        # page after a head points to the real head.
        next_info = info[heads + 1]
        own = np.uint64(block.address + 1) + heads.astype(np.uint64) * np.uint64(
            layout.size
        )
        fake = (next_info & np.uint64(1) != 0) & (next_info != own)
        block.fakes = heads[fake]
        tails = np.concatenate((tails, heads[fake]))
        tail_words = np.concatenate((tail_words, next_info[fake]))
        heads = heads[~fake]
    block.tails = tails
    block.tail_heads = _head_indices(block, tails, tail_words)
    codes = block.codes[heads]
    if layout.hugetlb is not None:
        mark = layout.hugetlb
        second = block.column(mark.offset, f"<u{mark.size}", skip=1)[heads]
        hugetlb = (second & mark.mask) == mark.value
        hugetlb &= codes != PageClass.SLAB
        codes[hugetlb] = PageClass.USER_HUGETLB
    # A free page of the hugetlb pool has no references.
    free = (block.references(heads) == 0) & (codes == PageClass.USER_HUGETLB)
    codes[free] = PageClass.FREE_HUGETLB
    if not layout.types.has("large_kmalloc"):
        # A guess: other users of compound pages mostly have several references, such as
        # one for each packet in a socket's page fragments.
        guessed = block.references(heads) == 1
        codes[(codes == PageClass.UNATTRIBUTED) & guessed] = PageClass.LARGE_KMALLOC
    block.codes[heads] = codes


def _head_indices(block: Block, tails: Indices, words: Words) -> Indices:
    size = block.layout.size
    if block.layout.compound_mask:
        addresses = np.uint64(block.address) + tails.astype(np.uint64) * np.uint64(size)
        offsets = (addresses & words) - np.uint64(block.address)
    else:
        offsets = words - np.uint64(block.address + 1)
    return offsets.view(np.int64) // size


def _reserved(block: Block) -> None:
    block.codes[block.flagged(block.layout.bits["reserved"])] = PageClass.RESERVED


def _poisoned(block: Block) -> None:
    poisoned = block.flagged(block.layout.bits.get("hwpoison", 0))
    if len(poisoned):
        poisoned = poisoned[~np.isin(poisoned, block.fakes)]
        block.codes[poisoned] = PageClass.HWPOISON


def _missing(block: Block) -> None:
    """
    Mark struct pages that were not in the dump and read as zeros.

    Some readers return zeros for excluded pages. A real struct page is never all zeros:
    it has a ``_mapcount`` of -1, a page type or a reference.
    """
    zero = where(block.counts == 0)
    if len(zero):
        zero = zero[(block.flags[zero] | block.mapping[zero]) == 0]
        zero = zero[block.column(block.layout.compound_head)[zero] == 0]
        block.codes[zero] = PageClass.EXCLUDED


def mark_gaps(block: Block, gaps: list[Gap]) -> None:
    """Mark struct pages that could not be read."""
    size = block.layout.size
    for gap in gaps:
        missing = slice(gap.offset // size, -(-(gap.offset + gap.size) // size))
        block.codes[missing] = (
            PageClass.EXCLUDED if gap.reason == "excluded" else PageClass.UNREADABLE
        )


def _compound_tails(block: Block, far_heads: FarHeads) -> None:
    """Set the class and mapping of tails to those of their heads."""
    tails, heads = block.tails, block.tail_heads
    if not len(tails):
        return
    near = (heads >= 0) & (heads < len(block))
    if not near.all():
        settle_far_tails(block, distinct(heads[~near]), far_heads)
        tails, heads = tails[near], heads[near]
    codes = block.codes[heads]
    block.codes[tails] = codes
    cached = codes == PageClass.FILE
    if cached.any():
        block.mapping[tails[cached]] = block.mapping[heads[cached]]


def settle_far_tails(block: Block, heads: Indices, far_heads: FarHeads) -> None:
    """Set the class and mapping of tails whose heads are outside the block."""
    for head in heads:
        far = far_heads(block.address + int(head) * block.layout.size)
        its_tails = block.tails[block.tail_heads == head]
        block.codes[its_tails] = far.code
        block.mapping[its_tails] = np.uint64(far.mapping)


def _free_blocks(block: Block) -> None:
    """Copy the class of a free block's first page to its other pages."""
    firsts = where(block.codes == PageClass.FREE_BUDDY)
    if not len(firsts):
        return
    orders = block.column(block.layout.private)[firsts]
    present = np.bincount(np.minimum(orders, np.uint64(_MAX_ORDER)).view(np.int64))
    for order in where(present[1:]) + 1:
        count = 1 << int(order)
        if len(block) % count or block.pfn % count:
            break
        rows = firsts[orders == order] // count
        block.codes.reshape(-1, count)[rows] = PageClass.FREE_BUDDY


# --- Interface of observers of the memmap scan.


T = TypeVar("T")
Same = TypeVar("Same", bound="Observer")


class Observer(Protocol):
    """
    Sums up something over all struct pages of a scan.

    An observer is plain data: a worker of the scan has a copy for each part of the
    memmap, and sends the copy back. So it must be picklable, hold no program, and not
    read from the kernel.
    """

    def observe(self, block: Block) -> None:
        """
        Add a block whose pages have the classes that they are reported in.

        Blocks come in pfn order. Do not keep them or views of their arrays.
        """

    def merge(self: Same, later: Same) -> None:
        """Add the sums of another observer; all its blocks have higher pfns."""


class Shared(Generic[T]):
    """
    Constant data of an observer, such as a table made before the scan.

    Copies of the observer share it, and workers do not send it back.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    def __deepcopy__(self, memo: object) -> "Shared[T]":
        return self

    def __reduce__(self) -> tuple[type["Shared[None]"], tuple[None]]:
        return Shared, (None,)


# --- Counts pages of a block by class, for equal parts of the block.


Counts = npt.NDArray[np.int64]
"""Pages by class, shape ``(NCLASSES,)`` or ``(parts, NCLASSES)``."""


def class_counts(codes: Codes, part_pages: int, skip: int = 0) -> Counts:
    """
    Count the pages of each class in parts of *part_pages* pages.

    :param skip: Number of pages of the first part that precede the block.
    :return: Shape ``(parts, NCLASSES)``; the first and last part may be short.
    """
    parts = -(-(skip + len(codes)) // part_pages)
    lowest = int(codes.min())
    if lowest == codes.max():
        # Usually free memory; this takes a fortieth of the time.
        counts = np.zeros((parts, NCLASSES), np.int64)
        counts[:, lowest] = part_pages
        counts[0, lowest] -= skip
        counts[-1, lowest] -= parts * part_pages - skip - len(codes)
        return counts
    if parts == 1:
        return np.bincount(codes, minlength=NCLASSES)[np.newaxis]
    keys = _part_keys(len(codes), part_pages, skip) + codes
    return np.bincount(keys, minlength=parts * NCLASSES).reshape(parts, NCLASSES)


@lru_cache(maxsize=8)
def _part_keys(pages: int, part_pages: int, skip: int) -> npt.NDArray[np.intp]:
    """Return NCLASSES times the index of each page's part; cached for equal blocks."""
    return (np.arange(pages, dtype=np.intp) + skip) // part_pages * NCLASSES


def named(counts: Counts) -> dict[str, int]:
    """Return the counts by class name."""
    return {name: int(counts[code]) for code, name in CLASSES.items()}


# --- Node and zone of a page as one key: the bits of its flags.


NOWHERE = -1
"""Node-and-zone key of pages whose struct page is missing."""


def node_zone_keys(block: Block) -> int | npt.NDArray[np.int64]:
    """Return the key of each page; a single key if all are the same."""
    shift = np.uint64(block.layout.zone_shift)
    highest = np.bitwise_or.reduce(block.flags) >> shift
    lowest = np.bitwise_and.reduce(block.flags) >> shift
    missing = block.codes >= PageClass.EXCLUDED
    if highest == lowest and not missing.any():
        return int(highest)
    keys = (block.flags >> shift).view(np.int64)
    keys[missing] = NOWHERE
    return keys


def node_and_zone(key: int, layout: PageLayout) -> tuple[int, int] | None:
    """Split a key into node and zone number; ``None`` for missing pages."""
    if key == NOWHERE:
        return None
    return key >> layout.zone_bits, key & ((1 << layout.zone_bits) - 1)


# --- Counts pages by order: free blocks of the buddy allocator and compound pages.


ORDERS = 24
"""Above any order: a page of 16 GiB has order 22."""

NO_ORDER = ORDERS
"""Row of pages without an order, after the rows of all orders."""

_ORDERS = np.arange(ORDERS + 1)

_MAX_PARTS = 1 << 16


def free_blocks(block: Block) -> tuple[Indices, npt.NDArray[np.intp]]:
    """
    Return the free blocks of the buddy allocator.

    :return: Indices of their first pages, ascending, and their orders.
    """
    types = block.layout.types
    typed = where((block.words + np.uint32(1)) > np.uint32(types.lowest))
    keys = block.words[typed] >> np.uint32(types.shift) & np.uint32(types.mask)
    is_free = types.classes[keys] == PageClass.FREE_BUDDY
    firsts = typed[is_free & (block.codes[typed] == PageClass.FREE_BUDDY)]
    words = block.column(block.layout.private)[firsts]
    orders = np.minimum(words, np.uint64(ORDERS)).astype(np.intp)
    sizes = np.left_shift(1, orders)
    # In a damaged dump: such a page is classified as a single page.
    orders[(firsts + block.pfn) % sizes != 0] = 0
    orders[firsts + sizes > len(block)] = 0
    # A block that was merged into a larger one may still look like a block.
    ends = np.maximum.accumulate(firsts + np.left_shift(1, orders))
    outermost = np.ones(len(firsts), np.bool_)
    outermost[1:] = firsts[1:] >= ends[:-1]
    return firsts[outermost], orders[outermost]


def free_rooms(block: Block, orphans: Indices) -> Indices:
    """
    Return the largest possible size, in pages, of a free block that begins at each
    orphan.

    :param orphans: Indices of all unreferenced pages without a class, which include the
        pages on per-CPU lists.
    :return: Number of orphans from each one on, limited by the alignment of its pfn.
    """
    last = np.flatnonzero(np.diff(orphans, append=-1) != 1)
    rooms = np.repeat(orphans[last] + 1, np.diff(last, prepend=-1)) - orphans
    pfns = orphans + block.pfn
    return np.where(pfns == 0, rooms, np.minimum(rooms, pfns & -pfns))


def _spread(
    firsts: Indices, block_orders: npt.NDArray[np.intp], orders: npt.NDArray[np.intp]
) -> None:
    """Set *orders* of all pages of free blocks to the order of their block."""
    for order in distinct(block_orders[block_orders > 0]).tolist():
        pages = np.arange(1 << order)
        orders[firsts[block_orders == order, np.newaxis] + pages] = order


def _spread_compound(
    block: Block, orders: npt.NDArray[np.intp]
) -> list[tuple[int, Indices]]:
    """
    Set the order of all pages of compound pages.

    :return: The compound pages that may extend into other blocks, whose order is not
        set: index of the head, which may be outside the block, and indices of the pages
        in the block.
    """
    tails, heads = block.tails, block.tail_heads
    if not len(tails):
        return []
    near = (heads >= 0) & (heads < len(block))
    far = distinct(heads[~near]).tolist()
    parts = [(head, tails[heads == head]) for head in far]
    tails, heads = tails[near], heads[near]
    sizes = np.bincount(heads, minlength=len(block)) + 1
    if sizes[0] == len(block):
        # Blocks and compound pages are aligned to their size: only a compound page that
        # fills the block can extend past it.
        return [*parts, (0, np.arange(len(block)))]
    compound = where(sizes > 1)
    logarithms = np.log2(sizes[compound]).astype(np.intp)
    logarithms[np.left_shift(1, logarithms) != sizes[compound]] = NO_ORDER
    orders[compound] = logarithms
    orders[tails] = orders[heads]
    return parts


class ByOrder(Struct):
    """
    Counts pages by the order of their free block or compound page.

    A page outside of both has order 0. Reserved memory, which was never in the
    allocator, and pages that are not in the dump have no order.
    """

    pcp_pfns: npt.NDArray[np.uint64]
    """First pages of blocks on per-CPU lists, ascending."""

    pcp_orders: npt.NDArray[np.uint8]

    counts: Counts = field(
        default_factory=lambda: np.zeros((ORDERS + 1, NCLASSES), np.int64)
    )
    """Pages by order and class; the last row is for pages without an order."""

    parts: dict[int, Counts] = field(default_factory=dict)
    """Pages by class of compound pages that fill a block and may extend into others, by
    address of the head."""

    def observe(self, block: Block) -> None:
        firsts, free_orders = free_blocks(block)
        used = block.codes != PageClass.FREE_BUDDY
        blocks = np.bincount(free_orders, minlength=ORDERS + 1)
        free = blocks << _ORDERS
        is_damaged = free.sum() + np.count_nonzero(used) != len(block)
        if not is_damaged:
            self.counts[:, PageClass.FREE_BUDDY] += free
            if not used.any():
                return
        orders = np.zeros(len(block), np.intp)
        if is_damaged:
            _spread(firsts, free_orders, orders)
        _spread(*self._listed(block), orders)
        parts = _spread_compound(block, orders)
        orders[block.codes == PageClass.RESERVED] = NO_ORDER
        orders[block.codes >= PageClass.EXCLUDED] = NO_ORDER
        if not is_damaged:
            orders[~used] = -1
        for head, pages in parts:
            self._part(block.address + head * block.layout.size, block, pages, orders)
        kept = where(orders >= 0)
        codes = block.codes
        if len(kept) < len(block):
            orders, codes = orders[kept], codes[kept]
        keys = orders * NCLASSES + codes
        size = (ORDERS + 1) * NCLASSES
        self.counts += np.bincount(keys, minlength=size).reshape(-1, NCLASSES)

    def _listed(self, block: Block) -> tuple[Indices, npt.NDArray[np.intp]]:
        ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
        first, last = np.searchsorted(self.pcp_pfns, ends)
        pages = (self.pcp_pfns[first:last] - ends[0]).astype(np.intp)
        orders = self.pcp_orders[first:last].astype(np.intp)
        if not len(pages):
            return pages, orders
        # Part of a listed block may have been allocated since.
        ends = pages + np.left_shift(1, orders)
        fits = ends <= len(block)
        pages, orders, ends = pages[fits], orders[fits], ends[fits]
        before = np.cumsum(block.codes == PageClass.FREE_PCP)
        free = before[ends - 1] - before[pages] == ends - 1 - pages
        free &= block.codes[pages] == PageClass.FREE_PCP
        return pages[free], orders[free]

    def _part(
        self,
        address: int,
        block: Block,
        pages: Indices,
        orders: npt.NDArray[np.intp],
    ) -> None:
        """Count pages of a compound page that have no order yet in :attr:`parts`, and
        set their order to -1."""
        # With damage a page may be a tail of several heads, or occur twice.
        pages = distinct(pages[orders[pages] == 0])
        if not len(pages):
            return
        if address not in self.parts and len(self.parts) >= _MAX_PARTS:
            # Real heads are few; a damaged dump may have one for each page.
            orders[pages] = NO_ORDER
            return
        orders[pages] = -1
        counts = np.bincount(block.codes[pages], minlength=NCLASSES)
        self.parts[address] = self.parts.get(address, 0) + counts

    def merge(self, later: "ByOrder") -> None:
        self.counts += later.counts
        for address, counts in later.parts.items():
            self.parts[address] = self.parts.get(address, 0) + counts

    def total(self) -> Counts:
        """Return all counts, with parts joined to whole compound pages."""
        total = self.counts.copy()
        for counts in self.parts.values():
            pages = int(counts.sum())
            order = pages.bit_length() - 1
            whole = pages == 1 << order and order < ORDERS
            total[order if whole else NO_ORDER] += counts
        return total


# --- Finds pages on the per-CPU free lists of a running kernel by their links alone.
#
# A running kernel changes these lists between the read of a struct page and the read of
# the lists, and some lists can then not be followed. But list_del() poisons the links
# of a page, and a page that was never on a list is linked to itself. So a page with
# links to others was on a list when it was read. If that was not a per-CPU list, the
# page was on its way between one and the buddy allocator, or was isolated by
# compaction.


UNLISTED = -1
POINTER_BYTES = 8
"""Size of each of the two links of a list node."""

_ALIGNMENT = np.uint64(7)


def are_links(words: Words, kernel_start: int) -> npt.NDArray[np.bool_]:
    """
    Return which words may be the address of a list node.

    LIST_POISON is below the kernel's addresses. The list heads are per-CPU memory, in
    the direct map or at the lowest kernel addresses.

    :param kernel_start: Lowest kernel address (:attr:`PageLayout.kernel_start`).
    """
    links: npt.NDArray[np.bool_] = words & _ALIGNMENT == 0
    links &= words >= np.uint64(kernel_start)
    return links


class FreeLinks(Struct, frozen=True):
    """Finds pages that were on a list when read, by the links in their struct pages."""

    first: int
    """Address of the list node of pfn 0."""

    size: int
    """Size of a struct page."""

    pages: int
    """Number of pages up to the end of memory."""

    kernel_start: int
    """Lowest kernel address."""

    def lead_to_others(
        self, nodes: Words, nexts: Words, prevs: Words
    ) -> npt.NDArray[np.bool_]:
        """Return which nodes are linked to the node of at least one other page."""
        others = are_links(nexts, self.kernel_start)
        others &= are_links(prevs, self.kernel_start)
        others &= (nexts != nodes) & (prevs != nodes)
        others &= self._are_pages(nexts) | self._are_pages(prevs)
        return others

    def _are_pages(self, links: Words) -> npt.NDArray[np.bool_]:
        pfns, rests = np.divmod(links - np.uint64(self.first), np.uint64(self.size))
        # Addresses below the first node wrap round to pfns that are too high.
        pages: npt.NDArray[np.bool_] = (rests == 0) & (pfns < np.uint64(self.pages))
        return pages

    def pfns(self, nodes: Words) -> Words:
        """Return the pfns of list nodes."""
        pfns: Words = (nodes - np.uint64(self.first)) // np.uint64(self.size)
        return pfns


def free_links(
    reader: Reader, layout: PageLayout, ranges: Sequence[MemmapRange]
) -> FreeLinks | None:
    """
    Return a finder of pages on per-CPU lists by their links, if it is usable.

    ``None`` for a dump, whose lists do not change; if the memmap is not one array; and
    for a kernel that may leave stale links. Before Linux kernel commit 8b10b465d0e1
    ("mm/page_alloc: free pages in a single pass during bulk free") (in v5.18) pages
    that went from a per-CPU list into a free block kept their links. The next change
    that is visible in the types is bf75f200569d ("mm/page_alloc: add page->buddy_list
    and page->pcp_list") (in v6.0).
    """
    page = find_type(reader.prog, "struct page")
    if not reader.is_live or not page.has_member("pcp_list"):
        return None
    starts = {part.address - part.pfn * layout.size for part in ranges}
    if len(starts) != 1:
        return None
    pages = max(part.pfn + part.pages for part in ranges)
    return FreeLinks(starts.pop() + layout.lru, layout.size, pages, layout.kernel_start)


def spread_orders(orders: Indices, ways: Sequence[Sequence[int]]) -> Indices:
    """
    Set each unknown order to a known one that the node's links lead to.

    All pages on one list have the same order.

    :param orders: Order by index, ``UNLISTED`` if unknown.
    :param ways: For each direction, the index that each node's link leads to. Indices
        from the number of nodes on are ends of lists.
    """
    orders = orders.copy()
    for way in ways:
        ahead = np.concatenate((way, np.arange(len(way), len(orders))))
        # Pointer jumping: each round follows twice as many links.
        for _ in range(len(way).bit_length()):
            unknown = where(orders == UNLISTED)
            orders[unknown] = orders[ahead[unknown]]
            ahead = ahead[ahead]
    return orders


def inside_others(pfns: Words, orders: Indices) -> Indices:
    """
    Return the indices of the blocks that begin inside an earlier block, which was split
    after it was read.

    :param pfns: First page of each block, ascending.
    :param orders: Order of each block; ``UNLISTED`` for pages that are not a block.
    """
    blocks = where(orders != UNLISTED)
    starts = pfns[blocks].astype(np.intp)
    ends = np.maximum.accumulate(starts + np.left_shift(1, orders[blocks]))
    return blocks[1:][starts[1:] < ends[:-1]]
