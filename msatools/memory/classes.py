# SPDX-License-Identifier: LGPL-2.1-or-later

"""The classes of physical pages, and the layout of ``struct page``.

Each page is in exactly one class. How a class is printed is in
:mod:`msatools.render.memstat.report`.
"""

from collections.abc import Iterable

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import MissingError
from msatools.kernel.reader import bit
from msatools.program.linear import kernel_start
from msatools.selfdesc.find import (
    find_constant,
    find_type,
    member_of,
    number,
    vmcoreinfo,
    vmcoreinfo_number,
)

# --- The classes of physical pages: each page is in exactly one.


class PageClass:
    """
    Codes of the classes in arrays of one byte a page.

    Plain integers, not an enum: numpy looks up an enum's attributes at each use, which
    took a twentieth of a scan.
    """

    UNATTRIBUTED = 0
    FREE_BUDDY = 1
    FREE_PCP = 2
    FREE_HUGETLB = 3
    FREE_UNACCEPTED = 4
    ANON = 5
    KSM = 6
    USER_HUGETLB = 7
    FILE = 8
    EXEC = 9
    SHMEM = 10
    BLOCKDEV = 11
    SLAB = 12
    LARGE_KMALLOC = 13
    PAGE_TABLES = 14
    PAGE_TABLES_OWN = 15
    STACKS = 16
    VMALLOC = 17
    PERCPU = 18
    PIPES = 19
    SOCKETS = 20
    HUGE_ZERO = 21
    ZSMALLOC = 22
    MOVABLE = 23
    RESERVED = 24
    OFFLINE = 25
    HWPOISON = 26
    DEVICE = 27
    MEMMAP = 28
    VMAP = 29
    RINGS = 30
    REQUESTS = 31
    MEMPOOLS = 32
    TRACING = 33
    GLOBALS = 34
    DMA = 35
    DMABUF = 36
    # The classes from here on have no struct page that records node and zone.
    EXCLUDED = 37
    UNREADABLE = 38


CLASSES: dict[int, str] = {
    PageClass.FREE_BUDDY: "free.buddy",
    PageClass.FREE_PCP: "free.pcp",
    PageClass.FREE_HUGETLB: "free.hugetlb",
    PageClass.FREE_UNACCEPTED: "free.unaccepted",
    PageClass.ANON: "user.anon",
    PageClass.KSM: "user.ksm",
    PageClass.USER_HUGETLB: "user.hugetlb",
    PageClass.FILE: "cache.file",
    PageClass.EXEC: "cache.exec",
    PageClass.SHMEM: "cache.shmem",
    PageClass.BLOCKDEV: "cache.blockdev",
    PageClass.SLAB: "kernel.slab",
    PageClass.LARGE_KMALLOC: "kernel.large_kmalloc",
    PageClass.PAGE_TABLES: "kernel.page_tables",
    PageClass.PAGE_TABLES_OWN: "kernel.page_tables_own",
    PageClass.STACKS: "kernel.stacks",
    PageClass.VMALLOC: "kernel.vmalloc",
    PageClass.VMAP: "kernel.vmap",
    PageClass.PERCPU: "kernel.percpu",
    PageClass.PIPES: "kernel.pipes",
    PageClass.SOCKETS: "kernel.sockets",
    PageClass.RINGS: "kernel.rings",
    PageClass.REQUESTS: "kernel.requests",
    PageClass.DMA: "kernel.dma",
    PageClass.DMABUF: "kernel.dmabuf",
    PageClass.MEMPOOLS: "kernel.mempools",
    PageClass.TRACING: "kernel.tracing",
    PageClass.GLOBALS: "kernel.globals",
    PageClass.MEMMAP: "kernel.memmap",
    PageClass.HUGE_ZERO: "kernel.huge_zero",
    PageClass.ZSMALLOC: "kernel.zsmalloc",
    PageClass.MOVABLE: "kernel.movable",
    PageClass.UNATTRIBUTED: "kernel.unattributed",
    PageClass.RESERVED: "reserved",
    PageClass.OFFLINE: "offline",
    PageClass.HWPOISON: "hwpoison",
    PageClass.DEVICE: "device",
    PageClass.EXCLUDED: "excluded",
    PageClass.UNREADABLE: "unreadable",
}
"""Maps class codes to their names in reports, in the order of reports."""

NCLASSES = max(CLASSES) + 1
"""Length of an array with an element for each class."""


# --- Reads the layout of a kernel's struct page.


_LAYOUT = "msatools.page layout"
"""Key in the program's cache."""


class PageTypes(Struct, frozen=True):
    """
    Encoding of ``page->page_type``, the use of an unmapped page.

    The member is shared with ``_mapcount``; page types are large negative values.
    """

    lowest: int
    """Lowest value that is a type; -1 is not a type."""

    shift: int
    mask: int
    classes: npt.NDArray[np.uint8]
    """Class by ``(page_type >> shift) & mask``."""

    names: frozenset[str]
    """Names of the types of this kernel."""

    def has(self, name: str) -> bool:
        return name in self.names


class HugetlbMark(Struct, frozen=True):
    """
    Mark in the first tail page that distinguishes hugetlb from other compound pages.

    Kernels that have a page type for hugetlb do not need it.
    """

    offset: int
    """Offset of the byte or word in the first tail's ``struct page``."""

    size: int
    mask: int
    value: int


class PageLayout(Struct, frozen=True):
    """Offsets, bits and encodings of one kernel's ``struct page``."""

    size: int
    flags: int
    compound_head: int
    compound_mask: bool
    """Whether a tail's compound_info is a mask: head is tail address & mask (7.1)."""

    lru: int
    mapping: int
    private: int
    mapcount: int
    refcount: int
    entire_mapcount: int
    """Offset of the entire mapcount, in the first tail's ``struct page``."""

    bits: dict[str, int]
    """Masks by name of the ``enum pageflags`` enumerator without ``PG_``."""

    types: PageTypes
    hugetlb: HugetlbMark | None

    zone_shift: int
    """Shift of zone and node in ``flags``; the node is above the zone."""

    zone_bits: int
    node_bits: int
    device_zone: int | None
    """Number of ZONE_DEVICE; ``None`` without CONFIG_ZONE_DEVICE."""

    fake_heads: bool
    """Whether tails of a hugetlb page with optimised vmemmap may be fake heads."""

    kernel_start: int
    """Lowest kernel address, which a link of ``lru`` is not below."""

    @property
    def swapcache_bits(self) -> int:
        """Flags that are all set in a swap cache page; each has other uses alone."""
        return self.bits["swapbacked"] | self.bits.get("swapcache", 1 << 63)

    @property
    def slab_bit(self) -> int:
        """``PG_slab`` in the flags; 0 where slabs are a page type (since v6.10)."""
        return 0 if self.types.has("slab") else self.bits["slab"]


def page_layout(prog: drgn.Program) -> PageLayout:
    """
    Read the layout from the kernel's types, once for each program.

    :raises MissingError: if the types lack ``struct page`` or ``enum pageflags``
    """
    cache: dict[str, PageLayout] = prog.cache
    if _LAYOUT not in cache:
        cache[_LAYOUT] = _read_layout(prog)
    return cache[_LAYOUT]


def _read_layout(prog: drgn.Program) -> PageLayout:
    page = find_type(prog, "struct page")
    bits = {
        name.removeprefix("PG_"): bit(value)
        for name, value in _enumerators(prog, "enum pageflags").items()
    }
    types = _page_types(prog, page)
    zone_bits, node_bits = _zone_bits(prog), _node_bits(prog)
    compound_head, fake_heads = _compound_head(page)
    return PageLayout(
        size=drgn.sizeof(page),
        flags=_offset(page, ("flags",)),
        compound_head=compound_head,
        compound_mask=not fake_heads and _compound_info_has_mask(prog, page),
        lru=_offset(page, ("lru",)),
        mapping=_offset(page, ("mapping",)),
        private=_offset(page, ("private",)),
        mapcount=_offset(page, ("_mapcount", "page_type")),
        refcount=_offset(page, ("_refcount",)),
        entire_mapcount=_entire_mapcount(prog, page),
        bits=bits,
        types=types,
        hugetlb=None if types.has("hugetlb") else _hugetlb_mark(prog, page, bits),
        zone_shift=64 - node_bits - zone_bits,
        zone_bits=zone_bits,
        node_bits=node_bits,
        device_zone=_device_zone(prog),
        fake_heads=fake_heads,
        kernel_start=kernel_start(prog),
    )


def _enumerators(prog: drgn.Program, name: str) -> dict[str, int]:
    enumerators = find_type(prog, name).enumerators
    return {e.name: e.value for e in enumerators or ()}


def _offset(type_: drgn.Type, names: Iterable[str]) -> int:
    """Return the byte offset of the first of *names* that the type has."""
    names = tuple(names)
    for name in names:
        if type_.has_member(name):
            offset: int = member_of(type_, name).offset
            return offset
    raise MissingError(f"{type_.type_name()} has no member {' or '.join(names)}")


def _compound_head(page: drgn.Type) -> tuple[int, bool]:
    # Linux kernel commit d50569612c29 ("mm: rename the 'compound_head' field in
    # the 'struct page' to 'compound_info'") (in v7.1); no fake heads since.
    if page.has_member("compound_info"):
        return _offset(page, ("compound_info",)), False
    return _offset(page, ("compound_head",)), True


def _compound_info_has_mask(prog: drgn.Program, page: drgn.Type) -> bool:
    # Linux kernel commit 8c846c879e22 ("mm: rework compound_head() for
    # power-of-2 sizeof(struct page)") (in v7.1); the zones' shared tail pages
    # exist only with the vmemmap optimisation that the mask is for.
    size = drgn.sizeof(page)
    zone = find_type(prog, "struct zone")
    return size & (size - 1) == 0 and bool(zone.has_member("vmemmap_tails"))


def _entire_mapcount(prog: drgn.Program, page: drgn.Type) -> int:
    # In struct folio since v6.3; before, a member of the first tail page.
    try:
        in_folio = _offset(find_type(prog, "struct folio"), ("_entire_mapcount",))
    except MissingError:
        return _offset(page, ("compound_mapcount",))
    return in_folio - int(drgn.sizeof(page))


def _hugetlb_mark(
    prog: drgn.Program, page: drgn.Type, bits: dict[str, int]
) -> HugetlbMark | None:
    # Linux kernel commit d99e3140a4d3 ("mm: turn folio_test_hugetlb into a
    # PageType") (in v6.9) made it a page type. A flag of the first tail page:
    # 9c5ccf2db04b ("mm: remove HUGETLB_PAGE_DTOR") (in v6.6).
    if "hugetlb" in bits:
        return HugetlbMark(
            _offset(page, ("flags",)), 8, bits["hugetlb"], bits["hugetlb"]
        )
    # Before, the compound page's destructor: a byte of the first tail page, a member of
    # struct page or, later, only of struct folio.
    try:
        dtor = find_constant(prog, "HUGETLB_PAGE_DTOR").value_()
    except MissingError:
        return None  # CONFIG_HUGETLB_PAGE=n
    if page.has_member("compound_dtor"):
        offset = member_of(page, "compound_dtor").offset
    else:
        offset = member_of(find_type(prog, "struct folio"), "_folio_dtor").offset
        offset -= drgn.sizeof(page)
    return HugetlbMark(offset, 1, 0xFF, dtor)


_TYPE_CLASSES = {
    "buddy": PageClass.FREE_BUDDY,
    "offline": PageClass.OFFLINE,
    "table": PageClass.PAGE_TABLES,
    "hugetlb": PageClass.USER_HUGETLB,
    "slab": PageClass.SLAB,
    "zsmalloc": PageClass.ZSMALLOC,
    "unaccepted": PageClass.FREE_UNACCEPTED,
    "large_kmalloc": PageClass.LARGE_KMALLOC,
}


def _page_types(prog: drgn.Program, page: drgn.Type) -> PageTypes:
    """Read the encoding of page types; the newest is tried first."""
    try:
        enumerators = _enumerators(prog, "enum pagetype")
    except MissingError:
        enumerators = {}
    values = {
        name.partition("_")[2]: value
        for name, value in enumerators.items()
        if name.startswith(("PGTY_", "PG_"))
    }
    if "PGTY_buddy" in enumerators:
        # A number in the top byte: Linux kernel commit 4ffca5a96678 ("mm:
        # support only one page_type per page") (in v6.12).
        classes = np.zeros(256, np.uint8)
        for name, value in values.items():
            classes[value & 0xFF] = _TYPE_CLASSES.get(name, PageClass.UNATTRIBUTED)
        return PageTypes(0xF0000000, 24, 0xFF, classes, frozenset(values))
    if values.get("buddy", 0) >= 1 << 24:
        # Cleared bits in the top byte: Linux kernel commit 8db00ad56461
        # ("mm: allow reuse of the lower 16 bit of the page type with an actual
        # type") (in v6.11).
        return _cleared_bits(0x80000000, 24, 0xFF, values)
    if "buddy" in values:
        # Cleared low bits, in an enum: Linux kernel commit
        # ff202303c398 ("mm: convert page type macros to enum") (in v6.10).
        return _cleared_bits(0xF0000000, 0, 0x1FFF, values)
    # The same bits as macros, which debug info does not have: Linux kernel
    # commit 6e292b9be7f4 ("mm: split page_type out from _mapcount") (in v4.18).
    # VMCOREINFO has the newer ones as ~bit.
    values = {"buddy": 0x80, "offline": 0x100, "table": 0x200}
    if page.has_member("mem_cgroup"):
        # One more bit, combined with the others, until Linux kernel commit
        # 18b2db3b0385 ("mm: Convert page kmemcg type to a page memcg flag") (in
        # v5.11): whether the page is charged to a memory cgroup.
        values = {"buddy": 0x80, "offline": 0x100, "kmemcg": 0x200, "table": 0x400}
    for name in ("hugetlb", "slab"):
        mapcount_value = vmcoreinfo_number(prog, f"PAGE_{name.upper()}_MAPCOUNT_VALUE")
        if mapcount_value is not None:
            values[name] = ~mapcount_value & 0xFFFFFFFF
    return _cleared_bits(0xF0000000, 0, 0x1FFF, values)


def _cleared_bits(
    lowest: int, shift: int, mask: int, values: dict[str, int]
) -> PageTypes:
    """Return the page types for an encoding by cleared bits."""
    classes = np.zeros(mask + 1, np.uint8)
    keys = np.arange(mask + 1)
    charged = values.get("kmemcg", 0) >> shift & mask
    for name, cleared in values.items():
        # Other pairs of cleared bits are not types but small negative mapcounts.
        is_it = keys | charged == mask & ~(cleared >> shift)
        classes[is_it] = _TYPE_CLASSES.get(name, PageClass.UNATTRIBUTED)
    return PageTypes(lowest, shift, mask, classes, frozenset(values))


def _node_bits(prog: drgn.Program) -> int:
    # NODES_SHIFT is log2 of MAX_NUMNODES, the length of node_data. Not every
    # architecture exports that to VMCOREINFO, and BTF does not have it.
    length = vmcoreinfo(prog).get("LENGTH(node_data)")
    if length is None:
        # include/linux/mmzone.h: all zones of all nodes, and an end.
        references = member_of(
            find_type(prog, "struct zonelist"), "_zonerefs"
        ).type.length
        zones = find_constant(prog, "__MAX_NR_ZONES").value_()
        return int((references - 1) // zones - 1).bit_length()
    return (number(length) - 1).bit_length()


def _device_zone(prog: drgn.Program) -> int | None:
    try:
        number: int = find_constant(prog, "ZONE_DEVICE").value_()
    except MissingError:
        return None
    return number


def _zone_bits(prog: drgn.Program) -> int:
    # ZONES_SHIFT of include/linux/page-flags-layout.h.
    zones = find_constant(prog, "__MAX_NR_ZONES").value_()
    return int(zones - 1).bit_length()
