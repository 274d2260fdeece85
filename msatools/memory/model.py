# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of memstat."""

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from msatools.kernel.report import ADDED, Report
from msatools.memory.by.groups import PageGroup, Section
from msatools.memory.frag.model import Frag
from msatools.memory.scan.model import ScanChanges
from msatools.memory.unattributed.model import UnattributedGroup
from msatools.records import dataclass

if TYPE_CHECKING:
    # This imports numpy, which is slow to load.
    from msatools.memory.map.model import MemoryMap, Outline


@dataclass(frozen=True)
class ClassCount:
    """The pages of one class."""

    name: str
    """A value of :data:`.pages.classes.CLASSES`, such as ``free.buddy``."""

    pages: int
    bytes: int

    delta_pages: int | None = field(default=None, metadata=ADDED)
    """Change over the interval; ``None`` in a one-shot report."""


@dataclass(frozen=True)
class Check:
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


@dataclass(frozen=True)
class VmallocCaller:
    """The vmalloc pages that one kernel function allocated."""

    caller: str
    areas: int
    pages: int


def _outline(memory: "MemoryMap") -> "Outline":
    return memory.outline()


def _group_types() -> Mapping[str, type[PageGroup]]:
    # They import numpy.
    from msatools.memory.recorded import GROUPS

    return GROUPS


@dataclass(frozen=True, kw_only=True)
class MemstatReport(Report):
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

    by: Mapping[str, tuple[PageGroup, ...]] | None = field(
        default=None, metadata={**ADDED, "groups": _group_types}
    )
    unattributed: tuple[UnattributedGroup, ...] | None = field(
        default=None, metadata=ADDED
    )
    frag: Frag | None = field(default=None, metadata=ADDED)
    map: "MemoryMap | None" = field(default=None, metadata={**ADDED, "form": _outline})
    sections: tuple[Section, ...] | None = field(default=None, metadata=ADDED)
    vmalloc: tuple[VmallocCaller, ...] | None = field(default=None, metadata=ADDED)

    scan_ns: int | None = field(default=None, compare=False)
    """Time to read and classify the struct pages, on the clock of this process."""

    changes: ScanChanges | None = None
    """Changes during the scan; ``None`` for a dump."""
