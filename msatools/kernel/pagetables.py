# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The kernel's page tables: where they lie and what they map.

Only what memstat needs that drgn's own translation does not give: the pages
that tables occupy, and translation of many addresses with a read a table.
x86-64 (arch/x86/include/asm/pgtable_types.h).
"""

from collections.abc import Iterable

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.functions import has_function
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.vmemmap import vmemmap_base
from msatools.kernel.walks import list_nodes
from msatools.target.paging import ENTRIES, HUGE, PAGE_SHIFT, PRESENT, table_format

Words = npt.NDArray[np.uint64]

_HALF = ENTRIES // 2
"""Of a top-level table: those of user space, and after them the kernel's."""

_PRESENT = np.uint64(PRESENT)
_HUGE = np.uint64(HUGE)
_MAX_PFN = 1 << (52 - PAGE_SHIFT)
_TABLES = 1 << 10
"""So many are read before what they name is looked at: 4 MiB."""


class PageTables:
    """The page tables of an x86-64 kernel."""

    def __init__(self, reader: Reader, findings: LossLog) -> None:
        """
        :raises LookupError: if this kernel's page tables are not known
        """
        form = table_format(reader.prog)
        if form is None:
            raise LookupError("no known page tables")
        self._reader = reader
        self._findings = findings
        self._mask = form.frame
        self._address = np.uint64(self._mask)
        self._levels = form.levels
        self._top: Words | None = None
        self._tables: dict[int, Words] = {}

    @staticmethod
    def supported(prog: drgn.Program) -> bool:
        """Return whether this kernel's page tables are known."""
        return table_format(prog) is not None

    def kernel_tables(self) -> set[int]:
        """
        Find the pfns of all tables below the kernel's own top-level tables.

        With page table isolation a second top-level table follows the first,
        with clones of the few kernel mappings that user mode needs.
        """
        prog = self._reader.prog
        top = prog["init_mm"].pgd.value_()
        roots = (top, top + 4096) if _has_isolation(prog) else (top,)
        own = (root + 8 * _HALF for root in roots)
        entries = self._read_entries(own, _HALF, physical=False)
        found: set[int] = set()
        self._descend(entries, self._levels - 1, found)
        return found

    def user_top_tables(self) -> set[int]:
        """
        Find the pfns of the tables of processes that NR_PAGETABLE leaves out.

        These are each address space's top-level table (two pages with page
        table isolation) and the tables under it, down to those whose entries
        name tables of page middle directories.
        """
        found: set[int] = set()
        tops = self._top_level_pfns()
        in_pairs = self._isolated(tops)
        for start in range(0, len(tops), _TABLES):
            some = tops[start : start + _TABLES]
            found.update(some)
            if in_pairs:
                found.update([pfn + 1 for pfn in some])
            entries = self._read_entries([pfn << PAGE_SHIFT for pfn in some], _HALF)
            self._descend(entries, self._levels - 1, found, lowest=3)
        return found

    def _top_level_pfns(self) -> list[int]:
        """Read the list of all address spaces' top-level tables."""
        prog = self._reader.prog
        page = prog.type("struct page")
        nodes = list_nodes(
            self._reader,
            prog["pgd_list"].address_,
            self._findings,
            "the list of top-level page tables",
        )
        lru, memmap = page.member("lru").offset, vmemmap_base(prog)
        pfns = (nodes - np.uint64(memmap) - np.uint64(lru)) // np.uint64(
            drgn.sizeof(page)
        )
        tops: list[int] = pfns[pfns < np.uint64(_MAX_PFN)].tolist()
        return tops

    def _isolated(self, tops: list[int]) -> bool:
        """
        Tell whether top-level tables are pairs of pages.

        They are with page table isolation, whether in use or, up to v6.14,
        just compiled in. The second page of a pair has no references.
        """
        if not _has_isolation(self._reader.prog):
            return False
        page = self._reader.prog.type("struct page")
        refcount, size = page.member("_refcount").offset, drgn.sizeof(page)
        memmap = vmemmap_base(self._reader.prog)
        for pfn in tops[:8]:
            try:
                second = memmap + (pfn + 1) * size + refcount
                if pfn & 1 or any(self._reader.read_near(second, 4)):
                    return False
            except drgn.FaultError:
                continue
        return True

    def pfn(self, address: int) -> int | None:
        """Translate an address of the kernel; ``None`` if no page is mapped there."""
        try:
            entry = int(self._kernel_top()[self._index(address, self._levels)])
            for level in range(self._levels - 1, 0, -1):
                if not entry & PRESENT:
                    return None
                if level < 3 and entry & HUGE:
                    # Maps 2 MiB or 1 GiB at once; bit 12 is a flag then.
                    within = (1 << 9 * level) - 1
                    first = (entry & self._mask) >> PAGE_SHIFT & ~within
                    return first | address >> PAGE_SHIFT & within
                entries = self._table(entry & self._mask)
                entry = int(entries[self._index(address, level)])
        except drgn.FaultError:
            self._unreadable()
            return None
        return (entry & self._mask) >> PAGE_SHIFT if entry & PRESENT else None

    def _kernel_top(self) -> Words:
        if self._top is None:
            top = self._reader.prog["init_mm"].pgd.value_()
            self._top = self._reader.words(top, ENTRIES)
        return self._top

    @staticmethod
    def _index(address: int, level: int) -> int:
        return address >> (PAGE_SHIFT + 9 * (level - 1)) & (ENTRIES - 1)

    def _table(self, physical: int) -> Words:
        table = self._tables.get(physical)
        if table is None:
            table = self._reader.words(physical, ENTRIES, physical=True)
            self._tables[physical] = table
        return table

    def _read_entries(
        self, tables: Iterable[int], count: int, *, physical: bool = True
    ) -> Words:
        """Read so many entries of each table, but of those that cannot be read."""
        found = []
        for table in tables:
            try:
                found.append(self._reader.read(table, 8 * count, physical=physical))
            except drgn.FaultError:
                self._unreadable()
        return np.frombuffer(b"".join(found), np.uint64)

    def _descend(
        self, entries: Words, level: int, found: set[int], lowest: int = 1
    ) -> None:
        """
        Collect the tables that *entries* name, of *level* and below.

        Level 1 is a table of page table entries, whose own are not read.
        """
        tables = entries[(entries & _PRESENT) != 0]
        if level < 3:  # named by a table whose entries can map 2 MiB or 1 GiB
            tables = tables[(tables & _HUGE) == 0]
        pfns = set((distinct(tables & self._address) >> PAGE_SHIFT).tolist())
        new = sorted(pfns - found)
        found |= pfns
        if level > lowest:
            for start in range(0, len(new), _TABLES):
                tables = (pfn << PAGE_SHIFT for pfn in new[start : start + _TABLES])
                below = self._read_entries(tables, ENTRIES)
                self._descend(below, level - 1, found, lowest)

    def _unreadable(self) -> None:
        self._findings.lose(Loss.PAGE_TABLES)


def _has_isolation(prog: drgn.Program) -> bool:
    """Tell whether page table isolation is compiled in (arch/x86/mm/pti.c)."""
    return has_function(prog, "pti_init")


def pmd_order(prog: drgn.Program) -> int:
    """Find the order of the huge pages that one entry above a table maps."""
    # A table fills a page and has entries of 8 bytes.
    return int(prog["PAGE_SHIFT"].value_()) - 3
