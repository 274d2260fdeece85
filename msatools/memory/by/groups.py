# SPDX-License-Identifier: LGPL-2.1-or-later

"""Groups of pages by what owns them, and what more is known of each kind of owner."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from msatools.target.model import Address

NO_OWNER = "-"
"""Key of the group of pages that have no owner of the kind; its name says why."""

REST = "-rest"
"""Key of the group of owners that are too many, and too small, to be listed."""


DETAIL = MappingProxyType({"detail": True})
"""Metadata of a field of a group that tables leave out; JSON has it."""


@dataclass(frozen=True)
class PageGroup:
    """
    The pages of one node, zone, file or whatever they are told apart by, by class.

    What more is known of some kinds is in subclasses, whose fields have names with
    units: each is a column of its own, and null where the kernel does not tell.
    """

    key: str
    """Identifies the group among those of its kind; the same in all reports."""

    name: str
    pages: int
    classes: Mapping[str, int]
    """Pages by name of class; a class without pages may be left out."""


@dataclass(frozen=True, kw_only=True)
class ProcessGroup(PageGroup):
    """
    What one address space maps; its threads, and processes that share it, are one.

    ``pages`` has its share of each page: of one that several map as much as others
    have, to whole pages such that all groups sum to the classes. The rest is as in
    /proc/PID/smaps_rollup, ``None`` for the pages that no process maps, and where some
    of the page tables are not in the dump. Huge pages that NUMA balancing watches are
    here as well, which smaps has only since "smaps: use vm_normal_page_pmd() instead of
    follow_trans_huge_pmd()" (in v6.6).
    """

    pid: int | None
    """Of the process, or of a living thread if its leader is dead."""

    rss_pages: int | None
    """``Rss``: without hugetlb."""

    pss_bytes: int | None
    """``Pss``, without hugetlb: each page by the kernel's own count of mappings."""

    anon_pages: int | None
    """``Anonymous``."""

    private_pages: int | None
    """``Private_Clean`` and ``Private_Dirty``: nobody else maps them."""

    hugetlb_pages: int | None
    """``Private_Hugetlb`` and ``Shared_Hugetlb``."""

    swap_pages: int | None
    """``VmSwap`` of /proc/PID/status: without that of shared memory."""


@dataclass(frozen=True)
class FileGroup(PageGroup):
    """The page cache of one file, block device or piece of shared memory."""

    kind: str | None = None
    """``file``, ``directory``, ``symlink``, ``block device``, ``tmpfs``, ``memfd``,
    ``sysv``, ``shared anonymous``, ``shmem`` (a driver's), ``hugetlbfs``."""

    mount: str | None = None
    """Where its file system is mounted."""

    fstype: str | None = field(default=None, metadata=DETAIL)
    device: str | None = field(default=None, metadata=DETAIL)
    """Name of the block device that it is on."""

    path: str | None = field(default=None, metadata=DETAIL)
    """``None`` if the kernel has no name of it any more, or too many are larger."""

    inode: int | None = field(default=None, metadata=DETAIL)
    deleted: bool | None = field(default=None, metadata=DETAIL)
    """Whether it has no name in any directory."""

    size_bytes: int | None = field(default=None, metadata=DETAIL)
    mapping: Address | None = field(default=None, metadata=DETAIL)
    """Address of the ``struct address_space``."""


@dataclass(frozen=True)
class FileSystemGroup(PageGroup):
    """The page cache of all files of one file system."""

    fstype: str | None = None
    device: str | None = None
    """Name of the block device, or what else it is called by."""

    files: int | None = None
    """Of which pages are cached."""

    mounts: tuple[str, ...] | None = field(default=None, metadata=DETAIL)
    """Where it is mounted."""

    super_block: Address | None = field(default=None, metadata=DETAIL)


@dataclass(frozen=True)
class PinningFile:
    """A file with pages that are charged to a control group."""

    key: str
    """As that of its :class:`FileGroup`."""

    name: str
    pages: int


@dataclass(frozen=True)
class CgroupGroup(PageGroup):
    """The pages charged to one control group itself, not to those below it."""

    dying: bool | None = None
    """Whether it has been removed, but is kept as memory is charged to it."""

    pinned_by: tuple[PinningFile, ...] | None = field(default=None, metadata=DETAIL)
    """Of one that is dying: the files that most of its page cache is of."""

    files: int | None = field(default=None, metadata=DETAIL)
    """Of one that is dying: all files with pages charged to it."""

    mem_cgroup: Address | None = field(default=None, metadata=DETAIL)


@dataclass(frozen=True)
class SlabGroup(PageGroup):
    """The slabs of one cache, those that are full included."""

    slabs: int | None = None
    objects: int | None = None
    """Those that there is memory for."""

    objects_in_use: int | None = None
    """Without those that CPUs keep for themselves to give out, which the kernel's own
    counts have in it."""

    bytes_each: int | None = None
    """Memory for one, with all that the allocator puts around it."""

    merged: tuple[str, ...] | None = None
    """Names of other caches that are this one: the kernel does not tell them apart."""

    kmem_cache: Address | None = field(default=None, metadata=DETAIL)


@dataclass(frozen=True)
class VmallocGroup(PageGroup):
    """The pages of the areas that one function of the kernel asked for."""

    areas: int | None = None


@dataclass(frozen=True)
class Section:
    """One memory section: the unit in which the kernel keeps its struct pages."""

    nr: int
    state: str
    """``online``, ``offline`` or ``device``."""

    early: bool
    """Whether it was there at boot, not hot-plugged."""

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
    """Order groups as reports have them; equal ones by key."""
    return tuple(sorted(groups, key=lambda group: (-group.pages, group.key)))


def unique_keys(groups: Iterable[PageGroup]) -> list[PageGroup]:
    """Number the groups that share a key, as in a damaged dump."""
    seen: Counter[str] = Counter()
    unique = []
    for group in groups:
        seen[group.key] += 1
        again = seen[group.key]
        key = f"{group.key}#{again}" if again > 1 else group.key
        unique.append(replace(group, key=key))
    return unique
