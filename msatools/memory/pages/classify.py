# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Classifies the pages of a block by their struct pages, with numpy.

The order of the tests is that of the kernel's stable_page_flags() (fs/proc/page.c): the
page type and the flags are tested before the ``mapping`` word, because slabs, page
tables and free pages keep other data in that word.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.kernel.reader import Gap, distinct
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.layout import PageLayout

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


class Block(Struct):
    """Consecutive struct pages, their classes, and columns of their members."""

    pfn: int
    address: int
    """Address of the first struct page."""

    data: bytes | bytearray
    layout: PageLayout
    flags: Words
    mapping: Words
    """``mapping``; a page-cache tail has its head's."""

    counts: Words
    """``_mapcount`` or page type in the low 32 bits, ``_refcount`` in the high."""

    codes: Codes
    tails: Indices
    """Tails of compound pages, including fake heads."""

    tail_heads: Indices
    """Index of each tail's head, negative or too large if outside the block."""

    words: npt.NDArray[np.uint32]
    """``_mapcount`` or page type."""

    fakes: Indices
    """Fake heads: tails that have a copy of their head's flags."""

    notable: Indices
    """Pages with one of the rare flags: head, reserved, hwpoison, slab."""

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
        """Return the pages with any flag of *mask*, all of them notable ones."""
        if not len(self.notable):
            return self.notable
        pages: Indices = self.notable[self.flags[self.notable] & np.uint64(mask) != 0]
        return pages

    def heads_of(self, pages: Indices) -> Indices:
        """Return the head of each page's compound page, or the page itself."""
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
    """Set the classes of heads: hugetlb or kernel pages; find tails and fake heads."""
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
        # A guess. Others share their compound pages: page fragments of sockets have a
        # reference for each packet.
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
