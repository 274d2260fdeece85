# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The kernel's page tables: where they lie and what they map.

Only what memstat needs that drgn's own translation does not give: the pages
that tables occupy, and translation of many addresses with a read a table.
How they are made is in msatools.target.paging.
"""

from collections.abc import Iterable
from functools import cached_property

import drgn
import numpy as np

from msatools.kernel.functions import has_function
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.vmemmap import vmemmap_base
from msatools.kernel.walks import list_nodes
from msatools.selfdesc.variables import find_variable
from msatools.target.paging import (
    ENTRIES,
    PAGE_SHIFT,
    TABLE_BYTES,
    TableWalk,
    Words,
    table_format,
)

_MAX_PFN = 1 << (52 - PAGE_SHIFT)
_TABLES = 1 << 10
"""So many are read before what they name is looked at: 4 MiB."""


class PageTables:
    """The page tables of an x86-64 kernel."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        """
        :raises LookupError: if this kernel's page tables are not known
        """
        form = table_format(reader.prog)
        if form is None:
            raise LookupError("no known page tables")
        self._reader = reader
        self._losses = losses
        self._form = form

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
        top = find_variable(prog, "init_mm").pgd.value_()
        roots = (top, top + TABLE_BYTES) if _has_isolation(prog) else (top,)
        users = self._form.user_entries
        own = (root + 8 * users for root in roots)
        entries = self._read_entries(own, ENTRIES - users, physical=False)
        found: set[int] = set()
        self._descend(entries, self._form.shifts, found)
        return found

    def user_top_tables(self) -> set[int]:
        """
        Find the pfns of the tables of processes that NR_PAGETABLE leaves out.

        These are each address space's top-level table (two pages with page
        table isolation) and the tables under it, down to those whose entries
        name tables of page middle directories.
        """
        # Below are those whose entries name tables of page middle directories.
        shifts = self._form.shifts[:-2]
        found: set[int] = set()
        tops = self._top_level_pfns()
        in_pairs = self._isolated(tops)
        for start in range(0, len(tops), _TABLES):
            some = tops[start : start + _TABLES]
            found.update(some)
            if in_pairs:
                found.update([pfn + 1 for pfn in some])
            tables = [pfn << PAGE_SHIFT for pfn in some]
            entries = self._read_entries(tables, self._form.user_entries)
            self._descend(entries, shifts, found)
        return found

    def _top_level_pfns(self) -> list[int]:
        """Read the list of all address spaces' top-level tables."""
        prog = self._reader.prog
        page = prog.type("struct page")
        nodes = list_nodes(
            self._reader,
            find_variable(prog, "pgd_list").address_,
            self._losses,
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
            found = self._kernel_walk.find(address)
        except drgn.FaultError:
            self._unreadable()
            return None
        return None if found is None else found[0] >> PAGE_SHIFT

    @cached_property
    def _kernel_walk(self) -> TableWalk:
        top = find_variable(self._reader.prog, "init_mm").pgd.value_()

        def read(table: int) -> bytes:
            # The first has no physical address that is known.
            is_below = table != top
            return self._reader.read(table, TABLE_BYTES, physical=is_below)

        return TableWalk(self._form, top, read)

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
        self, entries: Words, shifts: tuple[int, ...], found: set[int]
    ) -> None:
        """
        Collect the tables that *entries* name, and those below.

        :param shifts: Of the entries, and of the tables to collect, whose last are not
            read.
        """
        shift, *below = shifts
        tables = self._form.tables(entries, shift)
        pfns = set((distinct(tables) >> np.uint64(PAGE_SHIFT)).tolist())
        new = sorted(pfns - found)
        found |= pfns
        if len(below) > 1:
            for start in range(0, len(new), _TABLES):
                places = (pfn << PAGE_SHIFT for pfn in new[start : start + _TABLES])
                named = self._read_entries(places, ENTRIES)
                self._descend(named, tuple(below), found)

    def _unreadable(self) -> None:
        self._losses.lose(Loss.PAGE_TABLES)


def _has_isolation(prog: drgn.Program) -> bool:
    """Tell whether page table isolation is compiled in (arch/x86/mm/pti.c)."""
    return has_function(prog, "pti_init")


def pmd_order(prog: drgn.Program) -> int:
    """Find the order of the huge pages that one entry above a table maps."""
    # A table fills a page and has entries of 8 bytes.
    return int(prog["PAGE_SHIFT"].value_()) - 3
