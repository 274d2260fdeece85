# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages whose struct page tells nothing: ask those who hold them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.files import OpenFiles
from msatools.kernel.pagetables import PageTables
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.kernel.vmemmap import vmemmap_base
from msatools.memory.classes import PageClass
from msatools.memory.layout import PageLayout
from msatools.memory.percpu import percpu_pfns
from msatools.memory.pipes import pipe_pages
from msatools.memory.scan import OwnedPages
from msatools.memory.sockets import socket_pages
from msatools.memory.vmalloc import (
    VmallocArea,
    cached_stacks,
    kernel_stacks,
    vmalloc_areas,
)

Pfns = npt.NDArray[np.uint64]


@dataclass
class Owners:
    """What the owners say, and what the checks need to know of them."""

    owned: list[tuple[int, Pfns]] = field(default_factory=list)
    """An earlier claim to a page goes before a later one."""

    areas: list[VmallocArea] = field(default_factory=list)
    stacks: list[VmallocArea] = field(default_factory=list)
    """Those of the areas that are kernel stacks."""

    cached_stacks: int = 0
    """Stacks of exited tasks that CPUs keep for the next fork."""

    percpu_boot_pages: int = 0

    def pages(self) -> OwnedPages:
        """Merge all claims, sorted by pfn."""
        if not self.owned:
            return OwnedPages(np.empty(0, np.uint64), np.empty(0, np.uint8))
        pfns = np.concatenate([pfns for _, pfns in self.owned])
        codes = np.concatenate(
            [np.full(len(pfns), code, np.uint8) for code, pfns in self.owned]
        )
        pfns, first = np.unique(pfns, return_index=True)
        return OwnedPages(pfns, codes[first])


def collect_owners(reader: Reader, layout: PageLayout, findings: Findings) -> Owners:
    """Ask all owners; one that cannot be asked costs a note."""
    owners = Owners()
    memmap = vmemmap_base(reader.prog)

    def pfns_of(pages: Iterable[npt.NDArray[np.uint64]]) -> Pfns:
        parts = list(pages)
        if not parts:
            return np.empty(0, np.uint64)
        return (np.concatenate(parts) - np.uint64(memmap)) // np.uint64(layout.size)

    def claim_vmalloc() -> None:
        owners.areas = vmalloc_areas(reader, findings)
        owners.stacks = kernel_stacks(reader.prog, owners.areas)
        owners.cached_stacks = cached_stacks(reader.prog)
        for code, areas in (
            (PageClass.STACKS, owners.stacks),
            (PageClass.VMALLOC, owners.areas),
        ):
            owners.owned.append((code, pfns_of(area.pages for area in areas)))

    def claim_tables_and_percpu() -> None:
        if not PageTables.supported(reader.prog):
            raise LookupError("page tables of this architecture are not read yet")
        tables = PageTables(reader, findings)
        pfns, owners.percpu_boot_pages = percpu_pfns(reader, tables, findings)
        owners.owned.append((PageClass.PERCPU, np.array(pfns, np.uint64)))
        own = tables.kernel_tables() | tables.user_top_tables()
        owners.owned.append(
            (PageClass.PAGE_TABLES_OWN, np.fromiter(own, np.uint64, len(own)))
        )

    def claim_files() -> None:
        files = OpenFiles(reader, findings)
        pages = pipe_pages(reader, files, findings)
        owners.owned.append((PageClass.PIPES, pfns_of([pages])))
        pages = socket_pages(reader, files, findings)
        owners.owned.append((PageClass.SOCKETS, pfns_of([pages])))

    def claim_huge_zero() -> None:
        first = _huge_zero_pfn(reader.prog, memmap, layout.size)
        if first is not None:
            pfns = np.arange(first, first + 512, dtype=np.uint64)
            owners.owned.append((PageClass.HUGE_ZERO, pfns))

    claims: dict[str, Callable[[], None]] = {
        "vmalloc areas": claim_vmalloc,
        "page tables and percpu memory": claim_tables_and_percpu,
        "pipes and sockets": claim_files,
        "the huge zero page": claim_huge_zero,
    }
    for what, claim in claims.items():
        try:
            claim()
        except (LookupError, AttributeError, drgn.FaultError) as error:
            findings.coverage["owners_unreadable"] += 1
            findings.note(
                f"no-{what.split()[-1]}", f"{what} could not be attributed: {error}"
            )
    return owners


def _huge_zero_pfn(prog: drgn.Program, memmap: int, size: int) -> int | None:
    # A folio since Linux kernel commit 5691753d73a2 ("mm: convert huge_zero_page
    # to huge_zero_folio") (in v6.10).
    for name in ("huge_zero_folio", "huge_zero_page"):
        try:
            page = prog[name].value_()
        except LookupError:
            continue
        return (page - memmap) // size if page else None
    return None
