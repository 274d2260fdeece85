# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a dumped kernel maps page by page, read with each page table read once.

Kernel stacks and modules lie where vmalloc() puts things. drgn walks four or five
tables for each read; in a dump they do not change, so one that was read is kept. What
lies elsewhere, such as the memmap, is found by the same tables, many pages at a time.
x86-64 (Documentation/arch/x86/x86_64/mm.rst).
"""

import struct
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from drgn import FaultError, Program, ProgramFlags
from drgn.helpers.linux.mm import follow_phys

from msatools.selfdesc.vmcoreinfo import vmcoreinfo, vmcoreinfo_number
from msatools.target.addresses import START_KERNEL_MAP
from msatools.target.paging import (
    ENTRIES,
    HUGE,
    PAGE_SHIFT,
    PRESENT,
    TableFormat,
    table_format,
)

_VMALLOC_TIB = {4: 32, 5: 12800}
"""Size of the vmalloc area by levels (VMALLOC_SIZE_TB_L4 and _L5)."""
_MODULES = 0xFFFF_FFFF_A000_0000
_MODULES_END = 0xFFFF_FFFF_FF00_0000

_PAGE = 1 << PAGE_SHIFT
_INDEX = ENTRIES - 1
_ENTRY = struct.Struct("<Q")


def map_vmalloc(prog: Program) -> bool:
    """
    Have drgn read what vmalloc() mapped in a dump with each page table read once.

    What :func:`msatools.target.linear.map_linear` maps has to be mapped after it: the
    kernel's image lies between modules.

    :return: Whether this kernel's tables are known.
    """
    tables = page_tables(prog)
    if tables is None:
        return False
    ranges = [(_MODULES, _MODULES_END - _MODULES)]
    with suppress(LookupError, FaultError):
        # Without CONFIG_DYNAMIC_MEMORY_LAYOUT it is a constant, and no variable.
        size = (_VMALLOC_TIB[tables.form.levels] << 40) - 1
        ranges.append((prog["vmalloc_base"].value_(), size))
    for start, size in ranges:
        prog.add_memory_segment(start, size, tables.read)
    return True


def page_tables(prog: Program) -> "VmallocTables | None":
    """Find the kernel's page tables; ``None`` if this kernel's are not known."""
    form = table_format(prog)
    if form is None or prog.flags & ProgramFlags.IS_LIVE:
        return None
    root = vmcoreinfo(prog).get("SYMBOL(swapper_pg_dir)")
    base = vmcoreinfo_number(prog, "phys_base")
    if root is None or base is None:
        return None
    try:
        address = int(root, 16)
        tables = VmallocTables(prog, address - START_KERNEL_MAP + base, form)
        # Where the kernel says that its tables are, they may not be.
        space = prog["init_mm"].address_of_()
        right = tables.translate(address)[0] == follow_phys(space, address).value_()
    except (LookupError, FaultError, NotImplementedError, ValueError, OverflowError):
        return None
    return tables if right else None


class VmallocTables:
    """The kernel's page tables, each read when it is needed first."""

    def __init__(self, prog: Program, root: int, form: TableFormat) -> None:
        """
        :param root: Physical address of the top-level table.
        """
        self.form = form
        self._read = prog.read
        self._root = root
        self._frame = form.frame
        self._tables: dict[int, bytes] = {}

    def read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        """Read memory; neighbours in physical memory, too, with one read."""
        parts: list[bytes] = []
        end = address + count
        while address < end:
            start, room = self.translate(address)
            size = min(room, end - address)
            while address + size < end:
                following, room = self._following(address + size)
                if following != start + size:
                    break
                size = min(size + room, end - address)
            try:
                parts.append(self._read(start, size, True))
            except FaultError as error:
                raise FaultError(str(error), address) from error
            address += size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _following(self, address: int) -> tuple[int, int]:
        try:
            return self.translate(address)
        except FaultError:
            return -1, 0

    def translate(self, address: int) -> tuple[int, int]:
        """
        Find the physical address, and how many bytes follow in the same page.

        :raises FaultError: if there is none
        """
        table = self._root
        for shift in self.form.shifts:
            entries = self._tables.get(table) or self._table(table)
            (entry,) = _ENTRY.unpack_from(entries, (address >> shift & _INDEX) << 3)
            if not entry & PRESENT:
                break
            table = entry & self._frame
            if shift == PAGE_SHIFT or entry & HUGE:
                within = address & ((1 << shift) - 1)
                return (table >> shift << shift) + within, (1 << shift) - within
        raise FaultError("address is not mapped", address)

    def frames(self, address: int, count: int) -> npt.NDArray[np.int64]:
        """
        Find the page frame number of each of some pages.

        :param address: Of the first one.
        :param count: At least 1.
        :return: -1 for a page that is not mapped, or by a table that is lost.
        """
        parts: list[npt.NDArray[np.int64]] = []
        done = 0
        while done < count:
            found = self._frames(address + (done << PAGE_SHIFT), count - done)
            parts.append(found)
            done += len(found)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _frames(self, address: int, count: int) -> npt.NDArray[np.int64]:
        """Find as many frames as one entry, or one table of pages, tells."""
        table = self._root
        for shift in self.form.shifts[:-1]:
            within = (address & ((1 << shift) - 1)) >> PAGE_SHIFT
            room = min(count, (1 << shift - PAGE_SHIFT) - within)
            try:
                entries = self._tables.get(table) or self._table(table)
            except FaultError:
                return np.full(room, -1, np.int64)
            (entry,) = _ENTRY.unpack_from(entries, (address >> shift & _INDEX) << 3)
            if not entry & PRESENT:
                return np.full(room, -1, np.int64)
            table = entry & self._frame
            if entry & HUGE:
                first = (table >> shift << shift - PAGE_SHIFT) + within
                return np.arange(first, first + room, dtype=np.int64)
        # There are too many of these to keep, and each is needed once or twice.
        try:
            entries = self._read(table, _PAGE, True)
        except FaultError:
            return np.full(room, -1, np.int64)
        words = np.frombuffer(entries, "<u8")[within : within + room]
        frames = (words & np.uint64(self._frame)) >> np.uint64(PAGE_SHIFT)
        return np.where(words & np.uint64(PRESENT), frames.astype(np.int64), -1)

    def _table(self, place: int) -> bytes:
        entries: bytes = self._read(place, _PAGE, True)
        self._tables[place] = entries
        return entries
