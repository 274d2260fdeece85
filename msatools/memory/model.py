# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of memstat."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from typing import TYPE_CHECKING, ClassVar

from msatools.kernel.report import ADDED, Report
from msatools.memory.by.groups import PageGroup, Section
from msatools.memory.frag.model import Frag
from msatools.memory.scan.model import ScanChanges
from msatools.memory.unattributed.model import UnattributedGroup

if TYPE_CHECKING:
    # It needs numpy, which takes long to import.
    from msatools.memory.map.model import MemoryMap


@dataclass(frozen=True)
class ClassCount:
    """The pages of one class."""

    name: str
    """A value of :data:`.pages.classes.CLASSES`, such as ``free.buddy``."""

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


@dataclass(frozen=True)
class VmallocCaller:
    """The vmalloc pages that one kernel function took."""

    caller: str
    areas: int
    pages: int


@dataclass(frozen=True, kw_only=True)
class MemstatReport(Report):
    """Every struct page in exactly one class, beside the kernel's counters."""

    schema: ClassVar[str] = "msatools.memstat/1"

    pages: int
    """Struct pages examined; the classes sum to it."""

    classes: tuple[ClassCount, ...]
    checks: tuple[Check, ...]

    managed_pages: int | None
    """Pages that the kernel's allocator manages: totalram_pages."""

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
    """Changes during the scan; ``None`` for a dump."""
