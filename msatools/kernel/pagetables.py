# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The kernel's page tables: the pages that they occupy, and what they map.

drgn's own translation does not return the pages of tables, and reads the tables for
each address again; here a table is read once. Their format is in
msatools.target.paging.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import drgn
import numpy as np
import numpy.typing as npt

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.functions import has_function
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.vmemmap import vmemmap_base
from msatools.kernel.walks import list_nodes
from msatools.selfdesc.find import find_type, find_variable, member_of
from msatools.target.arch import table_format
from msatools.target.paging import TableWalk, Words

_MAX_ADDRESS = 1 << 52
_BATCH = 1 << 10
"""Number of tables read at a time: 4 MiB, or more with larger pages."""


class PageTables:
    """The page tables of a kernel."""

    def __init__(self, reader: Reader, losses: LossLog) -> None:
        """
        :raises MissingError: if the format of this kernel's page tables is unknown
        """
        form = table_format(reader.prog)
        if form is None:
            raise MissingError("no known page tables")
        self._reader = reader
        self._losses = losses
        self._form = form

    @staticmethod
    def supported(prog: drgn.Program) -> bool:
        """Return whether the format of this kernel's page tables is known."""
        return table_format(prog) is not None

    def kernel_tables(self) -> set[int]:
        """
        Find the pfns of all tables below the kernel's own top-level tables.

        With page table isolation a second top-level table follows the first; it has
        clones of the few kernel mappings that user mode needs.
        """
        prog, form = self._reader.prog, self._form
        top = find_variable(prog, "init_mm").pgd.value_()
        roots = (top, top + form.table_bytes) if _has_isolation(prog) else (top,)
        first = form.kernel_entry
        kernel_parts = (root + 8 * first for root in roots)
        entries = self._read_entries(
            kernel_parts, form.top_entries - first, physical=False
        )
        found: set[int] = set()
        self._descend(entries, form.shifts, found)
        return found

    def user_top_tables(self, spaces: Callable[[], Iterable[int]]) -> set[int]:
        """
        Find the pfns of the tables of processes that NR_PAGETABLE leaves out.

        These are each address space's top-level table (two pages with page table
        isolation) and the tables under it, down to the PUDs, whose entries point to
        PMD tables. A top-level table that does not fill a page is a slab object.

        :param spaces: Returns the addresses of the top-level tables of all processes;
            called if the kernel has no list of them.
        """
        form = self._form
        shifts = form.shifts[:-2]  # without PMDs and PTEs
        try:
            tops = self._top_level_pfns()
        except MissingError:
            # Only x86-64 has a list.
            found: set[int] = set()
            own = list(spaces())
            entries = self._read_entries(own, form.user_entries, physical=False)
            if form.user_bytes == form.table_bytes:
                found.update(self._pfns_behind(own))
            if len(shifts) > 1:
                self._descend(entries, shifts, found)
            return found
        found = set()
        in_pairs = self._isolated(tops)
        for start in range(0, len(tops), _BATCH):
            batch = tops[start : start + _BATCH]
            found.update(batch)
            if in_pairs:
                found.update([pfn + 1 for pfn in batch])
            tables = [pfn << form.page_shift for pfn in batch]
            entries = self._read_entries(tables, form.user_entries)
            self._descend(entries, shifts, found)
        return found

    def _pfns_behind(self, addresses: Iterable[int]) -> Iterator[int]:
        for address in addresses:
            pfn = self.pfn(address)
            if pfn is not None:
                yield pfn

    def _top_level_pfns(self) -> list[int]:
        """Read ``pgd_list``, all address spaces' top-level tables."""
        prog = self._reader.prog
        page = find_type(prog, "struct page")
        nodes = list_nodes(
            self._reader,
            find_variable(prog, "pgd_list").address_,
            self._losses,
            "the list of top-level page tables",
        )
        lru, memmap = member_of(page, "lru").offset, vmemmap_base(prog)
        pfns = (nodes - np.uint64(memmap) - np.uint64(lru)) // np.uint64(
            drgn.sizeof(page)
        )
        end = np.uint64(_MAX_ADDRESS >> self._form.page_shift)
        tops: list[int] = pfns[pfns < end].tolist()
        return tops

    def _isolated(self, tops: list[int]) -> bool:
        """
        Return whether top-level tables are pairs of pages.

        They are if page table isolation is in use or, up to v6.14, just compiled in.
        The refcount of the second page of a pair is 0.
        """
        if not _has_isolation(self._reader.prog):
            return False
        page = find_type(self._reader.prog, "struct page")
        refcount, size = member_of(page, "_refcount").offset, drgn.sizeof(page)
        memmap = vmemmap_base(self._reader.prog)
        for pfn in tops[:8]:
            try:
                second = memmap + (pfn + 1) * size + refcount
                if pfn & 1 or any(self._reader.read_near(second, 4)):
                    return False
            except UNREADABLE:
                continue
        return True

    def pfn(self, address: int) -> int | None:
        """Translate an address of the kernel; ``None`` if no page is mapped there."""
        try:
            found = self._kernel_walk.find(address)
        except UNREADABLE:
            return None  # counted where the table was read
        return None if found is None else found[0] >> self._form.page_shift

    def pfns(self, address: int, count: int) -> npt.NDArray[np.int64]:
        """Translate the addresses of consecutive pages of the kernel.

        :param address: Address of the first page.
        :param count: Number of pages, at least 1.
        :return: The pfn of each page; -1 where none is mapped.
        """
        return self._kernel_walk.frames(address, count)

    @cached_property
    def _kernel_walk(self) -> TableWalk:
        top = find_variable(self._reader.prog, "init_mm").pgd.value_()

        def read(table: int) -> bytes:
            # Of the top-level table only the virtual address is known.
            size = self._form.table_bytes
            try:
                return self._reader.read(table, size, physical=table != top)
            except UNREADABLE:
                self._unreadable()
                raise

        return TableWalk(self._form, top, read)

    def _read_entries(
        self, tables: Iterable[int], count: int, *, physical: bool = True
    ) -> Words:
        """Read the first *count* entries of each table; skip unreadable tables."""
        parts = []
        for table in tables:
            try:
                parts.append(self._reader.read(table, 8 * count, physical=physical))
            except UNREADABLE:
                self._unreadable()
        return np.frombuffer(b"".join(parts), np.uint64)

    def _descend(
        self, entries: Words, shifts: tuple[int, ...], found: set[int]
    ) -> None:
        """
        Collect the pfns of the tables that *entries* point to, and of those below.

        :param shifts: Shift of the entries, then of each level to collect; tables of
            the last level are not read.
        """
        shift, *below = shifts
        page_shift = self._form.page_shift
        tables = self._form.tables(entries, shift)
        pfns = set((distinct(tables) >> np.uint64(page_shift)).tolist())
        new = sorted(pfns - found)
        found |= pfns
        if len(below) > 1:
            for start in range(0, len(new), _BATCH):
                batch = (pfn << page_shift for pfn in new[start : start + _BATCH])
                children = self._read_entries(batch, self._form.entries)
                self._descend(children, tuple(below), found)

    def _unreadable(self) -> None:
        self._losses.lose(Loss.PAGE_TABLES)


def _has_isolation(prog: drgn.Program) -> bool:
    """Return whether page table isolation is compiled in (arch/x86/mm/pti.c)."""
    return has_function(prog, "pti_init")


def pmd_order(prog: drgn.Program) -> int:
    """Return the order of the huge page that one PMD entry maps."""
    # A table fills a page and has entries of 8 bytes.
    return int(find_variable(prog, "PAGE_SHIFT").value_()) - 3
