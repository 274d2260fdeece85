# SPDX-License-Identifier: LGPL-2.1-or-later

"""Groups of pages by owner: a type for each kind of owner."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Struct
from msgspec.structs import replace

from msatools.memory.unattributed.model import PageWord
from msatools.model import Mark
from msatools.target.model import Address

NO_OWNER = "-"
"""Key of the group of pages without an owner; its name is the reason."""

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
    """``Pss``, without hugetlb: each page by the kernel's own count of mappings."""

    anon_pages: int | None
    """``Anonymous``."""

    private_pages: int | None
    """``Private_Clean`` plus ``Private_Dirty``: pages that no other process maps."""

    hugetlb_pages: int | None
    """``Private_Hugetlb`` plus ``Shared_Hugetlb``."""

    swap_pages: int | None
    """``VmSwap`` of /proc/PID/status, without shared memory."""

    page_table_bytes: int | None = None
    """``VmPTE`` of /proc/PID/status: page tables, without those of the two highest of
    five levels. The pages themselves are in ``pages`` and ``classes``."""


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
    """The pages charged to one control group itself, not to those below it."""

    dying: bool | None = None
    """Whether it was removed but is kept while memory is charged to it."""

    swap_pages: int | None = None
    """Pages on swap that are charged to it: ``memory.swap.current`` without the groups
    below it."""

    charged_pages: Annotated[int | None, DETAIL] = None
    """Pages that its counter has (``memory.current`` without the groups below it): also
    objects of slabs, per-CPU memory and sockets, and what CPUs charged ahead."""

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
    """Allocated objects, without those on per-CPU free lists, which the kernel's own
    counts include."""

    bytes_each: int | None = None
    """Size of one object with the allocator's metadata and padding."""

    merged: tuple[str, ...] | None = None
    """Names of other caches that were merged with this one."""

    module: str | None = None
    """The module that at least half of the objects point into, of a sample of a large
    general cache (kmalloc): those of a driver, also if it leaks them."""

    module_share: Annotated[float | None, DETAIL] = None
    """Share of the objects looked at that point to one place of it."""

    words: Annotated[tuple[PageWord, ...] | None, DETAIL] = None
    """The places that they point to most; ``None`` if they were not looked at."""

    kmem_cache: Annotated[Address | None, DETAIL] = None


class VmallocGroup(PageGroup, frozen=True):
    """The pages of the vmalloc areas that one kernel function allocated."""

    areas: int | None = None
    module: str | None = None
    """The module of that function; ``None`` for the kernel's own."""


class DmaBufGroup(PageGroup, frozen=True):
    """The pages of one dma-buf, whether they are its own or a file's that it pins.

    Its key is the number of its inode, as in /sys/kernel/debug/dma_buf/bufinfo. Pages
    of exporters other than the system heap and udmabuf are not known.
    """

    exporter: str | None = None
    """Who made it: ``system``, ``udmabuf``, or a driver."""

    size_bytes: int | None = None
    references: int | None = None
    """References to its file, by open files, mappings and devices."""

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
    """Number groups that share a key, as in a damaged dump."""
    seen: Counter[str] = Counter()
    unique = []
    for group in groups:
        seen[group.key] += 1
        again = seen[group.key]
        key = f"{group.key}#{again}" if again > 1 else group.key
        unique.append(replace(group, key=key))
    return unique
