# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of msa-memstat: classes, break-downs, fragmentation, unattributed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from msatools.kernel.report import ADDED, Report
from msatools.model import Mark, equal_but
from msatools.program.model import Address

if TYPE_CHECKING:
    from msatools.memory.map import MemoryMap, Outline

# --- The part of a report that describes the scan itself.


class ScanChanges(Struct, frozen=True):
    """Changes to pages of a running kernel while their struct pages were read."""

    allocated_pages: int | None
    """Pages that the kernel allocated during the scan, by its own count, including
    pages for msatools itself; ``None`` if the kernel does not count them."""

    freed_pages: int | None
    """Pages that the kernel freed during the scan; ``None`` if not counted."""

    reread_pages: int
    """Randomly chosen struct pages that were read again after the scan."""

    changed_pages: int
    """Reread pages whose class, owner or folio had changed."""

    changed_folios: int
    """Number of folios of the changed pages."""

    about_folios: int | None
    """Estimated number of changed folios in all memory, from the sample."""


# --- Fragmentation: free memory by order, page blocks, and what blocks them.


class FreeList(Struct, frozen=True):
    """Free blocks of one zone by order, as in /proc/buddyinfo."""

    node: int
    zone: str
    pages: int

    blocks: tuple[int, ...]
    """Free blocks that the scan found, by order."""

    kernel_blocks: tuple[int, ...] | None
    """The zone's own ``nr_free``, by order; ``None`` if unreadable."""

    unusable_permille: int | None
    """
    Share of the free pages that is in blocks below a huge page's order.

    The kernel's unusable_free_index() (mm/vmstat.c); ``None`` without free pages.
    """

    fragmentation_permille: int | None
    """
    Reason why allocation of a huge page would fail: near 0 lack of memory, near 1000
    fragmentation.

    The kernel's __fragmentation_index() (mm/vmstat.c); ``None`` if the allocation would
    succeed, where the kernel shows -1.000.
    """


class PageBlocks(Struct, frozen=True):
    """The page blocks of one zone that have one migrate type."""

    node: int
    zone: str
    type: str
    """As in ``enum migratetype``: ``unmovable``, ``movable``, ...; ``-`` if unknown."""

    blocks: int
    free_pages: int
    """Pages in the buddy allocator and on per-CPU lists."""

    movable_pages: int
    """Pages in use that compaction can move."""

    unmovable_pages: int
    """Other pages in use."""

    mixed_blocks: int
    """Blocks with both movable and unmovable pages in use."""

    polluted_blocks: int
    """Blocks with any unmovable page; a movable block should have none."""


class Blocker(Struct, frozen=True):
    """A class of pages that keeps blocks from being free."""

    name: str
    blocks: int
    """Blocks that have pages of the class; a block counts for each of its classes."""

    alone_blocks: int
    """Blocks that no other class keeps from being free."""

    pages: int


class Needed(Struct, frozen=True):
    """Number of blocked blocks by their number of unmovable pages."""

    pages: int
    """Upper bound of a block's unmovable pages; the lower bound is half of it,
    exclusive."""

    blocks: int


class BlockSize(Struct, frozen=True):
    """All aligned blocks of one size. Each is in one of five states."""

    order: int
    bytes: int
    blocks: int
    free_blocks: int
    """Entirely free blocks."""

    whole_blocks: int
    """Blocks that are one compound page, or part of a larger one."""

    movable_blocks: int
    """Blocks without unmovable pages: compaction could free them."""

    movable_pages: int
    """Pages in use in the movable blocks."""

    blocked_blocks: int
    """Blocks with unmovable pages."""

    partial_blocks: int
    """Blocks with missing or unreadable struct pages."""

    blockers: tuple[Blocker, ...]
    """Classes in the blocked blocks, the class in most blocks first."""

    needed: tuple[Needed, ...]
    """Blocked blocks by unmovable pages, the fewest first."""


class Frag(Struct, frozen=True):
    """Fragmentation of memory."""

    huge_order: int
    """Order of a transparent huge page, for which the indices are computed."""

    pageblock_order: int
    free: tuple[FreeList, ...]
    pageblocks: tuple[PageBlocks, ...]
    sizes: tuple[BlockSize, ...]

    movable: tuple[str, ...]
    """The classes of pages that compaction moves."""


# --- Groups of pages without a known owner.


class PageWord(Struct, frozen=True):
    """A pointer or text in the contents of pages."""

    kind: str
    """``module``, ``symbol`` or ``slab`` for a pointer into one; or ``text``."""

    name: str
    """The symbol and the offset from it; the slab cache; the text."""

    owner: str | None
    """Name of the module, symbol or slab cache; ``None`` for text."""

    count: int
    """Number of occurrences in the examined pages."""


class Allocator(Struct, frozen=True):
    """A thread that allocated blocks of a group; it may have exited since."""

    pid: int
    comm: str | None
    """Name of the thread when it allocated; ``None`` before 5.18."""

    blocks: int
    pages: int


class UnattributedGroup(Struct, frozen=True):
    """Similar blocks of pages without a known owner."""

    class_name: str = field(name="class")
    """``kernel.unattributed``, or ``kernel.large_kmalloc`` on kernels that do not mark
    it, where a driver's own compound page looks the same."""

    order: int | None
    """Order of the allocation; a guess unless the page is compound or the kernel has
    page_owner. ``None`` if the pages are no block."""

    pages: int
    """Pages of the blocks; all groups of a class sum to the class."""

    blocks: int | None
    runs: int | None
    """Number of runs of consecutive pages that the blocks form."""

    node: int | None
    """``None`` if the blocks, which have the same stack, are on several nodes."""

    refcount: int | None
    """Reference count of the first page of each block; ``None`` if it differs."""

    content: str
    """Contents of the first page of each block (with page_owner, of most blocks):
    pointers into a ``module``, to a ``symbol`` of the kernel, into a ``slab`` cache;
    ``text``, ``data``, ``zeros``, ``not in the dump``, ``not looked into``.
    """

    owner: str | None
    """Module, symbol or slab cache that most of the pointers point to; the variable of
    a memory pool."""

    examples: tuple[int, ...]
    """Page frame numbers of some blocks."""

    words: tuple[PageWord, ...]
    """The most frequent pointers and texts in these pages."""

    stack: tuple[str, ...] | None
    """Stack trace of the allocation, innermost function first. This and the fields
    below are ``None`` without page_owner."""

    gfp_mask: int | None = None
    gfp_names: tuple[str, ...] | None = None
    """Names of the flags in ``gfp_mask``; ``None`` too if the kernel's types lack them,
    as before 6.10."""

    allocators: tuple[Allocator, ...] | None = None
    """Threads with the most pages."""


# --- Groups of pages by owner: a type for each kind of owner.


NO_OWNER = "-"
"""Key of the group of pages without an owner; the group's name is the reason."""

REST = "-rest"
"""Key of the group of all owners that are too small to be listed."""


DETAIL = Mark("detail")
"""Metadata of a group's field that only JSON has, not tables."""


class PageGroup(Struct, frozen=True):
    """
    The pages of one node, zone, file or other owner, by class.

    Subclasses have more fields, one for each column of a table. A field is null where
    the kernel does not record it.
    """

    key: str
    """Unique among groups of its kind; the same in all reports."""

    name: str
    pages: int
    classes: Mapping[str, int]
    """Pages by class name; a class without pages may be left out."""


class ProcessGroup(PageGroup, frozen=True, kw_only=True):
    """
    The pages that one address space maps; all threads and processes that share it.

    ``pages`` is its share: a page that several map is divided equally among them, and
    shares are rounded to whole pages so that all groups sum to the classes. The pages
    of its page tables are included (``kernel.page_tables``). The other
    fields are as in /proc/PID/smaps_rollup. They are ``None`` for the pages that no
    process maps, and if some of the page tables are not in the dump. Huge pages under
    NUMA balancing (PROT_NONE) are counted; smaps counts them since "smaps: use
    vm_normal_page_pmd() instead of follow_trans_huge_pmd()" (in v6.6).
    """

    pid: int | None
    """PID of the process, or of a live thread if its leader is dead."""

    rss_pages: int | None
    """``Rss``, without hugetlb."""

    pss_bytes: int | None
    """``Pss``, without hugetlb: each page is divided by the kernel's mapcount."""

    anon_pages: int | None
    """``Anonymous``."""

    private_pages: int | None
    """``Private_Clean`` plus ``Private_Dirty``: pages that no other process maps."""

    hugetlb_pages: int | None
    """``Private_Hugetlb`` plus ``Shared_Hugetlb``."""

    swap_pages: int | None
    """``VmSwap`` of /proc/PID/status, without shared memory."""

    page_table_bytes: int | None = None
    """``VmPTE`` of /proc/PID/status: page tables, without the two highest of five
    levels. The pages of all tables are in ``pages`` and ``classes``."""


class FileGroup(PageGroup, frozen=True):
    """The page cache of one file, block device or piece of shared memory."""

    kind: str | None = None
    """``file``, ``directory``, ``symlink``, ``block device``, ``tmpfs``, ``memfd``,
    ``sysv``, ``shared anonymous``, ``shmem`` (a driver's), ``hugetlbfs``."""

    mount: str | None = None
    """Mount point of its file system."""

    fstype: Annotated[str | None, DETAIL] = None
    device: Annotated[str | None, DETAIL] = None
    """Name of its block device."""

    path: Annotated[str | None, DETAIL] = None
    """``None`` if its dentry is gone, or if too many files are larger."""

    inode: Annotated[int | None, DETAIL] = None
    deleted: Annotated[bool | None, DETAIL] = None
    """Whether it has no name in any directory."""

    size_bytes: Annotated[int | None, DETAIL] = None
    mapping: Annotated[Address | None, DETAIL] = None
    """Address of the ``struct address_space``."""


class FileSystemGroup(PageGroup, frozen=True):
    """The page cache of all files of one file system."""

    fstype: str | None = None
    device: str | None = None
    """Name of its block device, or ``s_id`` if it has none."""

    files: int | None = None
    """Number of files that have cached pages."""

    swap_pages: int | None = None
    """Pages of files in memory (tmpfs) that are on swap, not in memory."""

    mounts: Annotated[tuple[str, ...] | None, DETAIL] = None
    """Mount points."""

    super_block: Annotated[Address | None, DETAIL] = None


class PinningFile(Struct, frozen=True):
    """A file with pages that are charged to a control group."""

    key: str
    """Key of its :class:`FileGroup`."""

    name: str
    pages: int


class CgroupGroup(PageGroup, frozen=True):
    """The pages charged to one control group itself, not to groups below it."""

    dying: bool | None = None
    """Whether it was removed but is kept while memory is charged to it."""

    swap_pages: int | None = None
    """Pages on swap that are charged to it: ``memory.swap.current`` without the groups
    below it."""

    charged_pages: Annotated[int | None, DETAIL] = None
    """Pages in its counter (``memory.current`` without the groups below it), including
    slab objects, per-CPU memory, sockets, and pages that CPUs charged in advance."""

    slab_bytes: int | None = None
    """Bytes of objects in slabs that are charged to it (``slab`` of ``memory.stat``
    without the groups below it); unknown for the root and for removed groups, whose
    objects are charged to the parent: they do not keep the group."""

    percpu_bytes: int | None = None
    """Bytes of per-CPU memory that are charged to it (``percpu`` of ``memory.stat``
    without the groups below it); unknown for the same groups as ``slab_bytes``."""

    pinned_by: Annotated[tuple[PinningFile, ...] | None, DETAIL] = None
    """Files with the most page cache charged to a dying group."""

    files: Annotated[int | None, DETAIL] = None
    """Number of files with page cache charged to a dying group."""

    mem_cgroup: Annotated[Address | None, DETAIL] = None


class SlabGroup(PageGroup, frozen=True):
    """The slabs of one cache, including full ones."""

    slabs: int | None = None
    objects: int | None = None
    """Objects allocated and free."""

    objects_in_use: int | None = None
    """Allocated objects, without objects on per-CPU free lists, which the kernel's own
    counts include."""

    bytes_each: int | None = None
    """Size of one object with the allocator's metadata and padding."""

    merged: tuple[str, ...] | None = None
    """Names of other caches that were merged with this one."""

    module: str | None = None
    """The module that at least half of the sampled objects of a large general cache
    (kmalloc) point into: usually the driver that allocated them, or leaks them."""

    module_share: Annotated[float | None, DETAIL] = None
    """Share of the sampled objects that point to the module's most frequent target."""

    words: Annotated[tuple[PageWord, ...] | None, DETAIL] = None
    """The most frequent targets of pointers in the sampled objects; ``None`` if no
    objects were sampled."""

    kmem_cache: Annotated[Address | None, DETAIL] = None


class VmallocGroup(PageGroup, frozen=True):
    """The pages of the vmalloc areas that one kernel function allocated."""

    areas: int | None = None
    module: str | None = None
    """The module of that function; ``None`` for the kernel's own."""


class BufferHolder(Struct, frozen=True):
    """A process that has a dma-buf open or mapped."""

    pid: int
    comm: str
    how: str
    """``mapped``, or its descriptor: ``fd 5``."""

    def __str__(self) -> str:
        return f"{self.pid} {self.comm} ({self.how})"


class DmaBufGroup(PageGroup, frozen=True):
    """The pages of one dma-buf, whether they are its own or a file's that it pins.

    Its key is the number of its inode, as in /sys/kernel/debug/dma_buf/bufinfo. Pages
    of exporters other than the system heap and udmabuf are not known.
    """

    exporter: str | None = None
    """Its exporter: ``system``, ``udmabuf``, or a driver."""

    size_bytes: int | None = None
    references: int | None = None
    """References to its file, by open files, mappings and devices."""

    holders: tuple[BufferHolder, ...] | None = None
    """Processes that have it open or mapped, at most 64; null for the pages that are in
    no dma-buf. Devices, and descriptors in flight through sockets, are not listed, but
    included in ``references``."""

    label: Annotated[str | None, DETAIL] = None
    """The name that a program gave it (DMA_BUF_SET_NAME)."""

    dma_buf: Annotated[Address | None, DETAIL] = None
    """Address of the ``struct dma_buf``."""


class Section(Struct, frozen=True):
    """One memory section: the unit in which the kernel keeps its struct pages."""

    nr: int
    state: str
    """``online``, ``offline`` or ``device``."""

    early: bool
    """Whether it was present at boot rather than hot-plugged."""

    pfn: int
    pages: int
    """Pages of the section that have a struct page."""

    memmap: Address
    """Address of the first struct page."""

    memmap_end: Address
    """Address of the last struct page."""

    node: int | None
    zones: tuple[str, ...]


def largest_first(groups: Iterable[PageGroup]) -> tuple[PageGroup, ...]:
    """Sort groups by pages, the largest first, then by key."""
    return tuple(sorted(groups, key=lambda group: (-group.pages, group.key)))


def unique_keys(groups: Iterable[PageGroup]) -> list[PageGroup]:
    """Append ``#2``, ``#3``, ... to repeated keys, which occur in damaged dumps."""
    seen: Counter[str] = Counter()
    unique = []
    for group in groups:
        seen[group.key] += 1
        again = seen[group.key]
        key = f"{group.key}#{again}" if again > 1 else group.key
        unique.append(replace(group, key=key))
    return unique


# --- The report of memstat.


class ClassCount(Struct, frozen=True):
    """The pages of one class."""

    name: str
    """A value of :data:`msatools.memory.classes.CLASSES`, such as ``free.buddy``."""

    pages: int
    bytes: int

    delta_pages: Annotated[int | None, ADDED] = None
    """Change over the interval; ``None`` in a one-shot report."""


class Check(Struct, frozen=True):
    """One sum of the scan compared with a counter that the kernel keeps."""

    name: str
    walk_pages: int

    counter: str
    """Name of the kernel's counter, such as ``NR_FREE_PAGES``."""

    kernel_pages: int | None
    """``None`` if the counter could not be read."""

    difference: int | None
    """``walk_pages - kernel_pages``."""

    explained_by: str | None
    """Reason of a difference; ``None`` if there is no difference or no known reason."""


class VmallocCaller(Struct, frozen=True):
    """The vmalloc pages that one kernel function allocated."""

    caller: str
    areas: int
    pages: int
    module: str | None = None
    """The module of that function; ``None`` for the kernel's own."""


def _outline(memory: "MemoryMap") -> "Outline":
    return memory.outline()


def _group_types() -> Mapping[str, type[PageGroup]]:
    # Imported here, as it needs numpy.
    from msatools.memory.diff import GROUPS

    return GROUPS


class Leak(Struct, frozen=True, kw_only=True):
    """Memory of one kind that one module owns: leaked, or in use."""

    cache: Annotated[str | None, ADDED] = None
    """Slab cache of the objects. Without it, :attr:`area` is set for vmalloc areas and
    :attr:`order` for blocks; with none of the three, the pages are no block."""

    area: Annotated[str | None, ADDED] = None
    """Function that allocated the vmalloc areas."""

    order: Annotated[int | None, ADDED] = None
    """Order of the blocks of pages."""

    objects: int | None
    """Objects in use, areas or blocks; ``None`` if unknown."""

    bytes: int
    """Memory of these objects, including free objects in their slabs."""

    holds: tuple[str, ...] = ()
    """Most frequent targets of pointers in the sampled objects."""

    module: str
    """Name of the module. Followed by ``? (unloaded)``, it is the module that was
    unloaded last, and the pointers lead to addresses where no module is loaded."""

    confidence: Literal["exact", "likely", "evidence"]
    """How the module was found: ``exact`` by the area's own record; ``likely`` by
    pointers in nine of ten sampled objects; ``evidence`` by pointers in most."""


class SwapDevice(Struct, frozen=True, kw_only=True):
    """A device or file of swap, as in /proc/swaps."""

    name: str
    """Path of the device or file; empty if unreadable."""

    pages: int
    """Size of its swap space, in pages."""

    used: int
    """Number of its pages in use."""


class Zswap(Struct, frozen=True, kw_only=True):
    """Pages on swap whose contents are kept in memory, compressed (mm/zswap.c)."""

    stored_pages: int
    """Number of pages stored in zswap."""

    pool_bytes: int | None
    """Memory of the pools of zswap; ``None`` if their allocator is not zsmalloc (until
    v6.17), or its types are unknown."""

    ratio: float | None
    """Uncompressed size of the stored pages divided by ``pool_bytes``."""


class Zram(Struct, frozen=True, kw_only=True):
    """Compressed pages of all zram devices that are used for swap.

    The numbers are sums of ``mm_stat`` of the devices (drivers/block/zram/zram_drv.c).
    """

    stored_pages: int
    """Number of pages written to the devices, including the swap headers."""

    compressed_bytes: int
    """Compressed size of these pages."""

    pool_bytes: int | None
    """Memory of the devices' pools; ``None`` if unknown."""

    ratio: float | None
    """Uncompressed size of the stored pages divided by ``pool_bytes``."""


class SwapUse(Struct, frozen=True, kw_only=True):
    """Swap as a whole, in pages."""

    devices: tuple[SwapDevice, ...]
    total_pages: int
    """SwapTotal of /proc/meminfo."""

    free_pages: int
    """SwapFree of /proc/meminfo."""

    cached_pages: int | None
    """Pages in the swap cache, which are both on swap and in memory."""

    anon_pages: int | None
    """Anonymous pages on swap: all except ``shmem_pages``."""

    shmem_pages: int | None
    """Pages on swap of tmpfs and shared memory."""

    zswap: Zswap | None
    """``None`` without zswap."""

    zram: Zram | None
    """``None`` if no swap device is a zram device, or if the types are unknown."""


class MemstatReport(Report, frozen=True, kw_only=True):
    """Every struct page in exactly one class, beside the kernel's counters."""

    schema: ClassVar[str] = "msatools.memstat/1"

    pages: int
    """Struct pages examined: the sum of the classes."""

    classes: tuple[ClassCount, ...]
    checks: tuple[Check, ...]

    managed_pages: int | None
    """Pages that the buddy allocator manages: totalram_pages."""

    physical_pages: int | None
    """Pages of RAM in the machine: the sum of the zones' present_pages."""

    swap_pages: int | None = None
    """Pages of all swap devices; ``None`` if unknown, or with CONFIG_SWAP=n."""

    swap_free_pages: int | None = None
    """Free pages of all swap devices, without pages that CPUs reserved."""

    swap: Annotated[SwapUse | None, ADDED] = None
    """Swap as a whole; ``None`` if unknown, or with CONFIG_SWAP=n."""

    by: Annotated[
        Mapping[str, tuple[PageGroup, ...]] | None, ADDED, Mark("groups", _group_types)
    ] = None
    unattributed: Annotated[tuple[UnattributedGroup, ...] | None, ADDED] = None
    frag: Annotated[Frag | None, ADDED] = None
    map: Annotated["MemoryMap | None", ADDED, Mark("form", _outline)] = None
    sections: Annotated[tuple[Section, ...] | None, ADDED] = None
    vmalloc: Annotated[tuple[VmallocCaller, ...] | None, ADDED] = None
    leaks: Annotated[tuple[Leak, ...] | None, ADDED] = None
    """Memory that modules own, the largest first; ``None`` without ``--leaks``."""

    scan_ns: int | None = None
    """Time to read and classify the struct pages, on the clock of this process."""

    changes: ScanChanges | None = None
    """Changes during the scan; ``None`` for a dump."""

    def __eq__(self, other: object) -> Any:
        return equal_but(self, other, "scan_ns")
