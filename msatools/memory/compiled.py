# SPDX-License-Identifier: LGPL-2.1-or-later

"""Runs the scan's inner loops in C (``_classify.c``), if they were built.

The results are the same as those of :func:`msatools.memory.classify.classify`, in a
fraction of the time: see :mod:`msatools.native`.
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import msatools.native as native
from msatools.kernel.reader import Gap, distinct
from msatools.memory.classes import PageClass, PageLayout
from msatools.memory.classify import (
    MAPPING_CLASSES,
    Block,
    FarHeads,
    Words,
    column,
    counts_column,
    mark_gaps,
    settle_far_tails,
)

_LIBRARY = "msatools.memory._classify"
_CODES = 256

_OFFSETS = (
    "flags",
    "compound_head",
    "mapping",
    "private",
    "mapcount",
    "refcount",
    "entire_mapcount",
)
_FLAGS = ("head", "reserved", "hwpoison", "slab", "swapbacked", "swapcache")
_CLASSES = {
    "unattributed": PageClass.UNATTRIBUTED,
    "free_buddy": PageClass.FREE_BUDDY,
    "free_hugetlb": PageClass.FREE_HUGETLB,
    "anon": PageClass.ANON,
    "ksm": PageClass.KSM,
    "hugetlb": PageClass.USER_HUGETLB,
    "file": PageClass.FILE,
    "shmem": PageClass.SHMEM,
    "slab_class": PageClass.SLAB,
    "large_kmalloc": PageClass.LARGE_KMALLOC,
    "reserved_class": PageClass.RESERVED,
    "poisoned": PageClass.HWPOISON,
    "excluded": PageClass.EXCLUDED,
}

BLOCKS_HELD = 4
"""Size of the buffer for results, in blocks: enough if each page has its own result."""

_ROOM: dict[str, tuple[type[np.generic], int]] = {
    "mapping": (np.uint64, 1),
    "codes": (np.uint8, 1),
    "heads": (np.uint32, 1),
    "runs": (np.uint32, 1),
    "notable": (np.int64, 1),
    "zeros": (np.int64, 1),
    "tails": (np.int64, 2),
    "tail_heads": (np.int64, 2),
    "tail_runs": (np.int64, 6),
    "scratch_codes": (np.uint8, 1),
    "scratch": (np.uint64, 1),
    "cache_mappings": (np.uint64, BLOCKS_HELD),
    "cache_pages": (np.int64, BLOCKS_HELD),
}
"""Maps an array of ``struct scan`` to the type and number of its elements a page."""


def _words(*names: str) -> Iterable[tuple[str, type[Any]]]:
    return ((name, ctypes.c_uint64) for name in names)


def _numbers(*names: str) -> Iterable[tuple[str, type[Any]]]:
    return ((name, ctypes.c_int64) for name in names)


def _pointers(*names: str) -> Iterable[tuple[str, type[Any]]]:
    return ((name, ctypes.c_void_p) for name in names)


class _Layout(ctypes.Structure):
    """Mirrors ``struct layout`` of ``_classify.c``."""

    _fields_ = (
        *_numbers("size", *_OFFSETS),
        *_words(*_FLAGS),
        *_words("lowest", "shift", "mask"),
        *_pointers("type_classes", "mapping_classes"),
        *_numbers("mark", "mark_size"),
        *_words("mark_mask", "mark_value"),
        *_words("compound_mask", "fake_heads", "large_kmalloc_type"),
        *_words(*_CLASSES),
    )


class _Scan(ctypes.Structure):
    """Mirrors ``struct scan`` of ``_classify.c``."""

    _fields_ = (
        ("layout", _Layout),
        *_pointers("data"),
        *_numbers("pages"),
        *_words("pfn", "address", "flags_or", "flags_and"),
        *_pointers("mapping", "codes", "heads"),
        *_pointers("notable", "zeros", "tails", "tail_heads"),
        *_numbers("notables", "zeroes", "ntails", "nfakes"),
        *_pointers("tail_runs"),
        *_numbers("ntail_runs"),
        *_numbers("own_mapping", "swappable"),
        *_pointers("runs"),
        *_numbers("nruns", "next_run"),
        *_pointers("scratch_codes", "scratch"),
        *_numbers("far_low", "far_high"),
        *_words("far_code", "far_mapping"),
        *_pointers("counts"),
        *_numbers("anon_unmapped", "anon_swapcache", "shmem_swapcache", "nameless"),
        *_pointers("cache_mappings", "cache_pages"),
        *_numbers("cache_runs"),
    )


class Stream(ctypes.Structure):
    """Mirrors ``struct stream`` of ``_classify.c``."""

    _fields_ = (
        *_numbers("fd"),
        *_pointers("pfns", "addresses", "pages", "first_run"),
        *_pointers("run_offset", "run_bytes"),
        *_numbers("next"),
        *_pointers("buffer", "owned", "owned_codes"),
        *_numbers("nowned"),
        *_words("rings", "zone_shift", "zone_mask", "device_zone", "kernel_start"),
        *_words("least_order"),
        *_numbers("lru"),
        *_words("key"),
        *_numbers("done", "left", "reads", "bytes"),
        *_numbers("room", "candidates", "nentries"),
        *_pointers("nexts", "prevs", "nodes", "rooms", "candidate_codes"),
        *_pointers("entries", "orphans"),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled C file; ``None`` if it was not built or does not match."""
    sizes = [ctypes.sizeof(struct) for struct in (_Layout, _Scan, Stream)]
    version = sizes[0] << 32 | sizes[1] << 16 | sizes[2]
    loaded = native.load(_LIBRARY, "msa_size", version)
    if loaded is None:
        return None
    scan = ctypes.POINTER(_Scan)
    loaded.msa_classify.argtypes = (
        scan,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_uint64,
        ctypes.c_uint64,
    )
    loaded.msa_classify.restype = ctypes.c_int64
    loaded.msa_settle.argtypes = (scan,)
    loaded.msa_settle.restype = None
    loaded.msa_sum.argtypes = (scan, ctypes.c_int64, ctypes.c_int64)
    loaded.msa_sum.restype = None
    loaded.msa_stream.argtypes = (scan, ctypes.POINTER(Stream), ctypes.c_int64)
    loaded.msa_stream.restype = None
    return loaded


def compiled_classifier(layout: PageLayout) -> "Compiled | None":
    """Return the classifier for a layout; ``None`` if numpy is needed."""
    if not native.is_wanted():
        return None
    loaded = library()
    return Compiled(loaded, layout) if loaded and _within(layout) else None


def _within(layout: PageLayout) -> bool:
    """Return whether all members that the C code reads are within struct page."""
    mark, types = layout.hugetlb, layout.types
    ends = [getattr(layout, name) + 8 for name in _OFFSETS[:4]]
    ends += [getattr(layout, name) + 4 for name in _OFFSETS[4:]]
    ends.append(layout.lru + 16)  # two pointers
    if mark is not None:
        ends.append(mark.offset + mark.size)
    return (
        max(ends) <= layout.size
        and min(getattr(layout, name) for name in (*_OFFSETS, "lru")) >= 0
        and (mark is None or (mark.offset >= 0 and mark.size in (1, 8)))
        and 0 <= types.shift < 32
        and 0 <= types.mask < len(types.classes)
    )


class BlockSums(NamedTuple):
    """Sums over pages of one node and zone."""

    counts: npt.NDArray[np.int64]
    """Pages by class code, of length 256; valid until the next call."""

    mappings: Words
    """``page->mapping`` of each run of page-cache pages."""

    pages: npt.NDArray[np.int64]
    """Pages of each run."""

    anon_unmapped: int
    anon_swapcache: int
    shmem_swapcache: int
    nameless: int
    """Anon pages of the swap cache without a mapping."""


class Compiled:
    """
    Classifies blocks, and reuses the same memory for each block.

    A block and its sums are only valid until the next block is classified.
    """

    def __init__(self, loaded: ctypes.CDLL, layout: PageLayout) -> None:
        self._library = loaded
        self._layout = layout
        self._type_classes = np.ascontiguousarray(layout.types.classes)
        self._counts = np.zeros(_CODES, np.int64)
        self._scan = _Scan(
            layout=self._c_layout(), counts=self._counts.ctypes.data, pages=0
        )
        self._here = ctypes.pointer(self._scan)
        self._room = 0

    def _c_layout(self) -> _Layout:
        layout, mark = self._layout, self._layout.hugetlb
        return _Layout(
            size=layout.size,
            **{name: getattr(layout, name) for name in _OFFSETS},
            head=layout.bits["head"],
            reserved=layout.bits["reserved"],
            hwpoison=layout.bits.get("hwpoison", 0),
            slab=layout.slab_bit,
            swapbacked=layout.bits["swapbacked"],
            swapcache=layout.swapcache_bits,
            lowest=layout.types.lowest,
            shift=layout.types.shift,
            mask=layout.types.mask,
            type_classes=self._type_classes.ctypes.data,
            mapping_classes=MAPPING_CLASSES.ctypes.data,
            mark=mark.offset if mark else 0,
            mark_size=mark.size if mark else 0,
            mark_mask=mark.mask if mark else 0,
            mark_value=mark.value if mark else 0,
            compound_mask=layout.compound_mask,
            fake_heads=layout.fake_heads,
            large_kmalloc_type=layout.types.has("large_kmalloc"),
            **_CLASSES,
        )

    def _make_room(self, pages: int) -> None:
        self._room = pages
        self._arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(times * pages, dtype)
            for name, (dtype, times) in _ROOM.items()
        }
        self._arrays["heads"][:] = np.arange(pages)
        self._scan.ntail_runs = 0
        for name, array in self._arrays.items():
            setattr(self._scan, name, array.ctypes.data)

    def classify(
        self,
        data: bytes | bytearray,
        pfn: int,
        address: int,
        layout: PageLayout,
        far_heads: FarHeads,
        gaps: list[Gap] | None = None,
    ) -> Block:
        """Classify a block as :func:`msatools.memory.classify.classify` does."""
        pages = len(data) // layout.size
        if pages > self._room:
            self._make_room(pages)
        start: object = data
        if isinstance(data, bytearray):
            start = (ctypes.c_char * len(data)).from_buffer(data)
        far = self._library.msa_classify(self._here, start, pages, pfn, address)
        block = self._block(data, pfn, address)
        if far:
            self._settle_far_tails(block, far_heads)
            self._library.msa_settle(self._here)
        mark_gaps(block, gaps or [])
        return block

    def _block(self, data: bytes | bytearray, pfn: int, address: int) -> Block:
        layout, scan, arrays = self._layout, self._scan, self._arrays
        pages, tails = scan.pages, scan.ntails
        return Block(
            pfn=pfn,
            address=address,
            data=data,
            layout=layout,
            flags=column(data, layout.size, layout.flags, "<u8"),
            mapping=arrays["mapping"][:pages]
            if scan.own_mapping
            else column(data, layout.size, layout.mapping, "<u8"),
            counts=counts_column(data, layout),
            codes=arrays["codes"][:pages],
            tails=arrays["tails"][:tails],
            tail_heads=arrays["tail_heads"][:tails],
            words=column(data, layout.size, layout.mapcount, "<u4"),
            fakes=arrays["tails"][tails - scan.nfakes : tails],
            notable=arrays["notable"][: scan.notables],
        )

    def _settle_far_tails(self, block: Block, far_heads: FarHeads) -> None:
        scan = self._scan
        if scan.far_low == scan.far_high:
            # Only one head is outside: usual for a gigantic page, most of whose blocks
            # have only tails.
            far = far_heads(block.address + scan.far_low * block.layout.size)
            scan.far_code, scan.far_mapping = far.code, far.mapping
            return
        heads = block.tail_heads
        heads = distinct(heads[(heads < 0) | (heads >= len(block))])
        settle_far_tails(block, heads, far_heads)

    def key(self, block: Block) -> int | None:
        """Return the last block's node-and-zone key; ``None`` if it has several."""
        highest = self._scan.flags_or >> self._layout.zone_shift
        lowest = self._scan.flags_and >> self._layout.zone_shift
        if highest != lowest or block.codes.max() >= PageClass.EXCLUDED:
            return None
        return int(highest)

    def sums(self, first: int, end: int) -> BlockSums:
        """Sum up pages of the last block by their current classes."""
        self._library.msa_sum(self._here, first, end)
        return self._sums()

    def stream(self, stream: Stream, end: int, pages: int) -> BlockSums:
        """
        Scan blocks of a file in one call, up to block *end*, and sum them up.

        :param pages: Maximum number of pages of a block.
        """
        if pages > self._room:
            self._make_room(pages)
        self._library.msa_stream(self._here, ctypes.byref(stream), end)
        return self._sums()

    def _sums(self) -> BlockSums:
        scan, arrays = self._scan, self._arrays
        return BlockSums(
            counts=self._counts,
            mappings=arrays["cache_mappings"][: scan.cache_runs].copy(),
            pages=arrays["cache_pages"][: scan.cache_runs].copy(),
            anon_unmapped=scan.anon_unmapped,
            anon_swapcache=scan.anon_swapcache,
            shmem_swapcache=scan.shmem_swapcache,
            nameless=scan.nameless,
        )
