# SPDX-License-Identifier: LGPL-2.1-or-later

"""How a kernel's page tables are made, and the walk of one address down them.

Levels, sizes and the bits of entries are in :class:`TableFormat` alone: those who go
through many tables at once ask it too.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from drgn import Architecture, FaultError, Program

from msatools.selfdesc.vmcoreinfo import vmcoreinfo_number

PAGE_SHIFT = 12
ENTRIES = 512
"""Of a table, which is a page and has entries of 8 bytes."""

TABLE_BYTES = 8 * ENTRIES

Words = npt.NDArray[np.uint64]
Booleans = npt.NDArray[np.bool_]

_FRAME = 0x000F_FFFF_FFFF_F000
_SHIFTS = (39, 30, 21, PAGE_SHIFT)
_ENTRY = struct.Struct("<Q")


@dataclass(frozen=True)
class TableFormat:
    """
    The page tables of one kernel; by default with four levels.

    x86-64 (arch/x86/include/asm/pgtable_types.h and pgtable_64.h).
    """

    shifts: tuple[int, ...] = _SHIFTS
    """Of the tables of each level, the top one first: how many bits of an address one
    entry leaves to what it maps or names."""

    frame: int = _FRAME
    """The bits of an entry that are the physical address of a page."""

    largest: int = 30
    """The largest shift of an entry that can map memory itself."""

    present: int = 1 << 0
    huge: int = 1 << 7
    """In a table above the lowest: maps memory itself, and names no table."""

    protnone: int = 1 << 8
    """Without ``present``: mapped all the same, but not to be touched."""

    special: int = 1 << 9
    """vm_normal_page() finds no page there: the zero page, or memory of a device."""

    hardware: int = 1 << 5 | 1 << 6
    """Accessed and dirty, which some CPUs set in an entry that is none (erratum)."""

    swap_type_shift: int = 59
    """Of an entry that is not present: above are the numbers of swap devices."""

    user_entries: int = ENTRIES // 2
    """Of a top-level table: those of user space, and after them the kernel's."""

    @property
    def levels(self) -> int:
        """Return how many tables lead to a page."""
        return len(self.shifts)

    def maps_memory(self, entry: int, shift: int) -> bool:
        """Return whether an entry that is present maps memory, and names no table."""
        return entry & self.leaf_bits(shift) != 0

    def leaf_bits(self, shift: int) -> int:
        """Return of which bits an entry that maps memory, and is present, has any."""
        if shift == PAGE_SHIFT:
            return self.present
        return self.huge if shift <= self.largest else 0

    def huge_of(self, entries: Words, shift: int) -> Booleans | None:
        """Return which entries above the lowest level map memory, present or not.

        ``None`` if those of this shift never do.
        """
        if shift > self.largest:
            return None
        huge: Booleans = (entries & np.uint64(self.huge)) != 0
        return huge

    def present_of(self, entries: Words) -> Booleans:
        """Return which entries are present."""
        present: Booleans = (entries & np.uint64(self.present)) != 0
        return present

    def tables(self, entries: Words, shift: int) -> Words:
        """Return the physical addresses of the tables that entries name."""
        named = self.present_of(entries)
        huge = self.huge_of(entries, shift)
        if huge is not None:
            named &= ~huge
        tables: Words = entries[named] & np.uint64(self.frame)
        return tables

    def user_pfns(self, entries: Words) -> Words:
        """Return the pfn that each entry of user space maps.

        Linux kernel commit 6b28baca9b1f ("x86/speculation/l1tf: Protect PROT_NONE PTEs
        against speculation") (in v4.19): what is not present is inverted.
        """
        straight = np.where(self.present_of(entries), entries, ~entries)
        pfns: Words = (straight & np.uint64(self.frame)) >> np.uint64(PAGE_SHIFT)
        return pfns


def pages_of(shift: int) -> int:
    """Return how many pages an entry of this shift maps."""
    return 1 << shift - PAGE_SHIFT


def table_format(prog: Program) -> TableFormat | None:
    """Return how a kernel's page tables are made; ``None`` if that is not known."""
    platform = prog.platform
    if platform is None or platform.arch != Architecture.X86_64:
        return None
    # With 57 bits of virtual addresses (CONFIG_X86_5LEVEL, in v4.14).
    top = (48,) if vmcoreinfo_number(prog, "pgtable_l5_enabled") else ()
    # With encrypted memory a bit of the address says so.
    encrypted = vmcoreinfo_number(prog, "sme_mask") or 0
    return TableFormat((*top, *_SHIFTS), _FRAME & ~encrypted)


class TableWalk:
    """Page tables below one top-level table, each read when it is needed first."""

    def __init__(
        self, form: TableFormat, root: int, read: Callable[[int], bytes]
    ) -> None:
        """
        :param root: Physical address of the top-level table.
        :param read: Reads the table at a physical address; may raise FaultError.
        """
        self.form = form
        self._root = root
        self._read_table = read
        self._tables: dict[int, bytes] = {}
        self._present, self._frame = form.present, form.frame
        self._leaf = {shift: form.leaf_bits(shift) for shift in form.shifts}

    def find(self, address: int) -> tuple[int, int] | None:
        """
        Find the physical address, and how many bytes follow in the same page.

        :return: ``None`` if nothing is mapped there.
        :raises FaultError: if a table cannot be read
        """
        entry, shift, error = self._descend(address, self.form.shifts)
        if error is not None:
            raise error
        if not entry:
            return None
        within = address & ((1 << shift) - 1)
        start = (entry & self.form.frame) >> shift << shift
        return start + within, (1 << shift) - within

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
        form = self.form
        entry, shift, error = self._descend(address, form.shifts[:-1])
        within = (address & ((1 << shift) - 1)) >> PAGE_SHIFT
        room = min(count, pages_of(shift) - within)
        if error is not None or not entry:
            return np.full(room, -1, np.int64)
        table = entry & form.frame
        if form.maps_memory(entry, shift):
            first = (table >> shift << shift - PAGE_SHIFT) + within
            return np.arange(first, first + room, dtype=np.int64)
        # There are too many of these to keep, and each is needed once or twice.
        try:
            entries = np.frombuffer(self._read_table(table), "<u8")
        except FaultError:
            return np.full(room, -1, np.int64)
        words = entries[within : within + room]
        frames = (words & np.uint64(form.frame)) >> np.uint64(PAGE_SHIFT)
        return np.where(form.present_of(words), frames.astype(np.int64), -1)

    def _descend(
        self, address: int, shifts: tuple[int, ...]
    ) -> tuple[int, int, FaultError | None]:
        """
        Go down to what maps an address, at most by tables of these shifts.

        :return: The last entry, its shift, and why its table is lost: 0 if it is not
            present, or lost.
        """
        tables, table, entry, shift = self._tables, self._root, 0, 0
        present, frame = self._present, self._frame
        for shift in shifts:
            entries = tables.get(table)
            if entries is None:
                try:
                    entries = tables[table] = self._read_table(table)
                except FaultError as error:
                    return 0, shift, error
            (entry,) = _ENTRY.unpack_from(entries, (address >> shift) % ENTRIES * 8)
            if not entry & present:
                return 0, shift, None
            # As form.maps_memory() says, whose call takes as long as all else here.
            if entry & self._leaf[shift]:
                break
            table = entry & frame
        return entry, shift, None
