# SPDX-License-Identifier: LGPL-2.1-or-later

"""What memstat found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from msatools.kernel.report import ADDED, Report
from msatools.memory.frag.model import Frag
from msatools.memory.unattributed.model import UnattributedGroup
from msatools.target.model import Address

if TYPE_CHECKING:
    # It needs numpy, which takes long to import.
    from msatools.memory.map.model import MemoryMap


@dataclass(frozen=True)
class ClassCount:
    """The pages of one class."""

    name: str
    """A class of :data:`msatools.memory.classes.CLASSES`, such as ``free.buddy``."""

    pages: int
    bytes: int

    delta_pages: int | None = field(default=None, metadata=ADDED)
    """Change over the interval, ``None`` for a one-shot report."""


@dataclass(frozen=True)
class Check:
    """One sum of the walk held against a counter that the kernel keeps."""

    name: str
    walk_pages: int

    counter: str
    """Where the kernel keeps the figure, such as ``NR_FREE_PAGES``."""

    kernel_pages: int | None
    """``None`` where this kernel does not keep it or it could not be read."""

    difference: int | None
    """``walk_pages - kernel_pages``."""

    explained_by: str | None
    """The named reason of a difference, ``None`` where there is none."""


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
    """Tells it from all others of its kind, and stays the same."""

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


@dataclass(frozen=True)
class VmallocCaller:
    """The vmalloc pages that one kernel function took."""

    caller: str
    areas: int
    pages: int


@dataclass(frozen=True)
class ScanChanges:
    """What became of pages of a running kernel while their struct pages were read."""

    allocated_pages: int | None
    """That the kernel handed out meanwhile, by its own count; ``None`` if it keeps
    none. Pages that msatools itself was given are among them."""

    freed_pages: int | None
    """That it took back."""

    reread_pages: int
    """Struct pages, chosen at random, that were read a second time after the scan."""

    changed_pages: int
    """Those of them that were then of another class, owner or folio."""

    changed_folios: int
    """The folios that these pages belong to."""

    about_folios: int | None
    """Folios of the memory that had changed, if all of it is like those read twice."""


@dataclass(frozen=True, kw_only=True)
class MemstatReport(Report):
    """Every struct page in exactly one class, beside the kernel's counters."""

    schema: ClassVar[str] = "msatools.memstat/1"

    pages: int
    """Struct pages examined; the classes sum to it."""

    classes: tuple[ClassCount, ...]
    checks: tuple[Check, ...]

    managed_pages: int | None
    """What the kernel's allocator was given: totalram_pages."""

    physical_pages: int | None
    """Pages of RAM that the machine has, as the kernel's zones say (present)."""

    by: Mapping[str, tuple[PageGroup, ...]] | None = field(default=None, metadata=ADDED)
    unattributed: tuple[UnattributedGroup, ...] | None = field(
        default=None, metadata=ADDED
    )
    frag: Frag | None = field(default=None, metadata=ADDED)
    map: "MemoryMap | None" = field(
        default=None, metadata={**ADDED, "form": methodcaller("outline")}
    )
    sections: tuple[Section, ...] | None = field(default=None, metadata=ADDED)
    vmalloc: tuple[VmallocCaller, ...] | None = field(default=None, metadata=ADDED)

    scan_ns: int | None = field(default=None, compare=False)
    """How long it took to read and classify the struct pages, on our own clock."""

    changes: ScanChanges | None = None
    """What changed in that time; ``None`` of a dump, where nothing does."""
