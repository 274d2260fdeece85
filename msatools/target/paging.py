# SPDX-License-Identifier: LGPL-2.1-or-later

"""Format of a kernel's page tables, and translation of single addresses.

Levels, sizes and the bits of entries are in :class:`TableFormat` only, which is also
used to process whole tables at once.
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
"""Number of entries of a table, which is a page with entries of 8 bytes."""

TABLE_BYTES = 8 * ENTRIES

Words = npt.NDArray[np.uint64]
Booleans = npt.NDArray[np.bool_]

_FRAME = 0x000F_FFFF_FFFF_F000
_SHIFTS = (39, 30, 21, PAGE_SHIFT)
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TableFormat:
    """
    Format of the page tables of one kernel; by default with four levels.

    x86-64 (arch/x86/include/asm/pgtable_types.h and pgtable_64.h).
    """

    shifts: tuple[int, ...] = _SHIFTS
    """Shift of each level, the top one first: log2 of the bytes that an entry covers
    (PGDIR_SHIFT, ..., PAGE_SHIFT)."""

    frame: int = _FRAME
    """Mask of the physical address in an entry."""

    largest: int = 30
    """Largest shift of an entry that can map a huge page."""

    present: int = 1 << 0
    huge: int = 1 << 7
    """_PAGE_PSE: an entry above the lowest level maps a huge page."""

    protnone: int = 1 << 8
    """_PAGE_PROTNONE: without ``present``, a page is mapped, but inaccessible."""

    special: int = 1 << 9
    """_PAGE_SPECIAL: the zero page or device memory, see vm_normal_page()."""

    hardware: int = 1 << 5 | 1 << 6
    """Accessed and dirty, which some CPUs set in a none entry (erratum)."""

    swap_type_shift: int = 59
    """Shift of the number of the swap device in a swap entry."""

    user_entries: int = ENTRIES // 2
    """Number of user entries in a top-level table; the kernel's follow."""

    @property
    def levels(self) -> int:
        """Number of levels."""
        return len(self.shifts)

    def maps_memory(self, entry: int, shift: int) -> bool:
        """Return whether a present entry maps memory, not a table."""
        return entry & self.leaf_bits(shift) != 0

    def leaf_bits(self, shift: int) -> int:
        """Return the bits any of which is set in a present entry that maps memory."""
        if shift == PAGE_SHIFT:
            return self.present
        return self.huge if shift <= self.largest else 0

    def huge_of(self, entries: Words, shift: int) -> Booleans | None:
        """Return which entries above the lowest level map huge pages, present or not.

        :return: ``None`` if entries of this shift cannot.
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
        """Return the physical addresses of the tables that entries point to."""
        named = self.present_of(entries)
        huge = self.huge_of(entries, shift)
        if huge is not None:
            named &= ~huge
        tables: Words = entries[named] & np.uint64(self.frame)
        return tables

    def user_pfns(self, entries: Words) -> Words:
        """Return the pfn that each user entry maps.

        Linux kernel commit 6b28baca9b1f ("x86/speculation/l1tf: Protect PROT_NONE PTEs
        against speculation") (in v4.19): if the entry is not present, it is inverted.
        """
        plain = np.where(self.present_of(entries), entries, ~entries)
        pfns: Words = (plain & np.uint64(self.frame)) >> np.uint64(PAGE_SHIFT)
        return pfns


def pages_of(shift: int) -> int:
    """Return the number of pages that an entry of this shift maps."""
    return 1 << shift - PAGE_SHIFT


def table_format(prog: Program) -> TableFormat | None:
    """Return the format of a kernel's page tables; ``None`` if unknown."""
    platform = prog.platform
    if platform is None or platform.arch != Architecture.X86_64:
        return None
    # With 57 bits of virtual addresses (CONFIG_X86_5LEVEL, in v4.14).
    top = (48,) if vmcoreinfo_number(prog, "pgtable_l5_enabled") else ()
    # With memory encryption (SME), a bit of the address marks encrypted pages.
    encrypted = vmcoreinfo_number(prog, "sme_mask") or 0
    return TableFormat((*top, *_SHIFTS), _FRAME & ~encrypted)


class TableWalk:
    """Page tables below one top-level table, each read when first needed."""

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
        Translate an address.

        :return: The physical address, and the number of bytes up to the end of the
            page; ``None`` if nothing is mapped there.
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
        # Not cached: there are many, and each is needed once or twice.
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
        Walk down to the entry that maps an address, through tables of these shifts.

        :return: The last entry, 0 if it is not present or could not be read; its shift;
            and the error if it could not be read.
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
            (entry,) = _U64.unpack_from(entries, (address >> shift) % ENTRIES * 8)
            if not entry & present:
                return 0, shift, None
            # form.maps_memory() inlined: a call would double the time.
            if entry & self._leaf[shift]:
                break
            table = entry & frame
        return entry, shift, None
