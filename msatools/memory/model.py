# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of memstat."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Struct

from msatools.kernel.report import ADDED, Report
from msatools.memory.by.groups import PageGroup, Section
from msatools.memory.frag.model import Frag
from msatools.memory.scan.model import ScanChanges
from msatools.memory.unattributed.model import UnattributedGroup
from msatools.model import Mark, equal_but

if TYPE_CHECKING:
    # This imports numpy, which is slow to load.
    from msatools.memory.map.model import MemoryMap, Outline


class ClassCount(Struct, frozen=True):
    """The pages of one class."""

    name: str
    """A value of :data:`.pages.classes.CLASSES`, such as ``free.buddy``."""

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
    # They import numpy.
    from msatools.memory.recorded import GROUPS

    return GROUPS


class Leak(Struct, frozen=True, kw_only=True):
    """Memory of one kind that one module has: leaked, or in use."""

    cache: Annotated[str | None, ADDED] = None
    """The slab cache of the objects; else :attr:`area` or :attr:`order` says what they
    are, or they are pages that are no block."""

    area: Annotated[str | None, ADDED] = None
    """The function that allocated the areas of vmalloc."""

    order: Annotated[int | None, ADDED] = None
    """The order of blocks of pages."""

    objects: int | None
    """Objects in use, areas or blocks; ``None`` if unknown."""

    bytes: int
    """Memory that they take, with what is free beside them."""

    holds: tuple[str, ...] = ()
    """What most of them point to, by a sample."""

    module: str
    """Name of the module. With ``? (unloaded)`` behind it, no module is any longer
    where the pointers lead, and this is the module that was unloaded last."""

    confidence: Literal["exact", "likely", "evidence"]
    """How it is known: by the area's own record; by pointers in nine of ten objects of
    a sample; by pointers in most."""


class SwapDevice(Struct, frozen=True, kw_only=True):
    """A device or file of swap, as in /proc/swaps."""

    name: str
    """Its path; empty if unreadable."""

    pages: int
    """Pages that it has for swap."""

    used: int
    """Pages of it that are in use."""


class Zswap(Struct, frozen=True, kw_only=True):
    """Pages on swap whose contents are kept in memory, compressed (mm/zswap.c)."""

    stored_pages: int
    """Pages that it has."""

    pool_bytes: int | None
    """Memory of its pools; ``None`` with an allocator that is not zsmalloc (until
    v6.17), or in the pool of a module."""

    ratio: float | None
    """Size of what is stored by that of the pools."""


class Zram(Struct, frozen=True, kw_only=True):
    """What zram devices that are used for swap have in memory, compressed.

    As in ``mm_stat`` of each device (drivers/block/zram/zram_drv.c).
    """

    stored_pages: int
    """Pages written to them, their headers as well."""

    compressed_bytes: int
    """Size of the contents, compressed."""

    pool_bytes: int | None
    """Memory of their pools; ``None`` if unknown."""

    ratio: float | None
    """Size of what is stored by that of the pools."""


class SwapUse(Struct, frozen=True, kw_only=True):
    """Swap as a whole, in pages."""

    devices: tuple[SwapDevice, ...]
    total_pages: int
    """SwapTotal of /proc/meminfo."""

    free_pages: int
    """SwapFree of /proc/meminfo."""

    cached_pages: int | None
    """Pages in the swap cache: in memory as well."""

    anon_pages: int | None
    """Pages on swap of anonymous memory: all but those of files."""

    shmem_pages: int | None
    """Pages on swap of tmpfs and shared memory."""

    zswap: Zswap | None
    """``None`` without zswap."""

    zram: Zram | None
    """``None`` if no device of swap is one of zram, or if its types are unknown."""


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
    """Of all swap devices and files; ``None`` if unknown, or without CONFIG_SWAP."""

    swap_free_pages: int | None = None
    """Those of them that are free; CPUs may have kept further ones for themselves."""

    swap: Annotated[SwapUse | None, ADDED] = None
    """Swap as a whole; ``None`` if unknown, or without CONFIG_SWAP."""

    by: Annotated[
        Mapping[str, tuple[PageGroup, ...]] | None, ADDED, Mark("groups", _group_types)
    ] = None
    unattributed: Annotated[tuple[UnattributedGroup, ...] | None, ADDED] = None
    frag: Annotated[Frag | None, ADDED] = None
    map: Annotated["MemoryMap | None", ADDED, Mark("form", _outline)] = None
    sections: Annotated[tuple[Section, ...] | None, ADDED] = None
    vmalloc: Annotated[tuple[VmallocCaller, ...] | None, ADDED] = None
    leaks: Annotated[tuple[Leak, ...] | None, ADDED] = None
    """What modules have, the most first; on request (``--leaks``)."""

    scan_ns: int | None = None
    """Time to read and classify the struct pages, on the clock of this process."""

    changes: ScanChanges | None = None
    """Changes during the scan; ``None`` for a dump."""

    def __eq__(self, other: object) -> Any:
        return equal_but(self, other, "scan_ns")
