# SPDX-License-Identifier: LGPL-2.1-or-later

"""Format of a kernel's page tables, and translation of single addresses.

Levels, sizes and the bits of entries are in :class:`TableFormat` only, which is also
used to process whole tables at once. msatools.target.arch has that of a kernel.
"""

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from drgn import FaultError
from msgspec import Struct

from msatools.errors import UNREADABLE

Words = npt.NDArray[np.uint64]
Booleans = npt.NDArray[np.bool_]

_U64 = struct.Struct("<Q")


class TableFormat(Struct, frozen=True):
    """
    Format of the page tables of one kernel; entries have 8 bytes.

    A table fills a page, except that at the top level it may be smaller.
    """

    shifts: tuple[int, ...]
    """Shift of each level, the top one first: log2 of the bytes that an entry covers
    (PGDIR_SHIFT, ..., PAGE_SHIFT)."""

    frame: int
    """Mask of the physical address in an entry."""

    largest: int
    """Largest shift of an entry that can map a huge page."""

    huge: int
    """Bit of an entry above the lowest level that maps a huge page."""

    protnone: int
    """Bits any of which says, without ``present``, that a page is mapped, but
    inaccessible."""

    special: int
    """The zero page or device memory, see vm_normal_page()."""

    swap_type_shift: int
    """Shift of the number of the swap device in a swap entry; it has 5 bits."""

    top_entries: int
    """Number of entries in a top-level table."""

    user_entries: int
    """Number of user entries in a process's top-level table; they come first."""

    kernel_entry: int
    """Index of the first entry of the kernel's top-level table that maps the kernel."""

    present: int = 1 << 0
    high: int = 0
    """Mask of more bits of the physical address in an entry."""

    high_shift: int = 0
    """By how much ``high`` is shifted to the left."""

    flip: int = 0
    """``huge``, if that bit is clear in an entry that maps a huge page."""

    hardware: int = 0
    """Accessed and dirty, which some CPUs set in a none entry (erratum)."""

    inverts: bool = False
    """Whether the address is inverted in an entry that is not present."""

    @property
    def levels(self) -> int:
        """Number of levels."""
        return len(self.shifts)

    @property
    def page_shift(self) -> int:
        """log2 of the size of a page."""
        return self.shifts[-1]

    @property
    def table_bytes(self) -> int:
        """Size of a table, except at the top level."""
        return 1 << self.page_shift

    @property
    def entries(self) -> int:
        """Number of entries in a table, except at the top level."""
        return self.table_bytes // 8

    @property
    def user_bytes(self) -> int:
        """Bytes of the user entries in a process's top-level table."""
        return 8 * self.user_entries

    def pages_of(self, shift: int) -> int:
        """Return the number of pages that an entry of this shift maps."""
        return 1 << shift - self.page_shift

    def address(self, entry: int) -> int:
        """Return the physical address in an entry."""
        return entry & self.frame | (entry & self.high) << self.high_shift

    def addresses(self, entries: Words) -> Words:
        """Return the physical address in each entry."""
        addresses: Words = entries & np.uint64(self.frame)
        if self.high:
            high = entries & np.uint64(self.high)
            addresses |= high << np.uint64(self.high_shift)
        return addresses

    def maps_memory(self, entry: int, shift: int) -> bool:
        """Return whether a present entry maps memory, not a table."""
        return (entry ^ self.flip) & self.leaf_bits(shift) != 0

    def leaf_bits(self, shift: int) -> int:
        """Return the bit that is set in a present entry that maps memory.

        That is, if ``flip`` is inverted in the entry.
        """
        if shift == self.page_shift:
            return self.present
        return self.huge if shift <= self.largest else 0

    def huge_of(self, entries: Words, shift: int) -> Booleans | None:
        """Return which entries above the lowest level map huge pages, present or not.

        :return: ``None`` if entries of this shift cannot.
        """
        if shift > self.largest:
            return None
        huge: Booleans = ((entries ^ np.uint64(self.flip)) & np.uint64(self.huge)) != 0
        if self.flip:
            # The bit is clear in entries of nothing, too.
            huge &= self.mapped_of(entries)
        return huge

    def present_of(self, entries: Words) -> Booleans:
        """Return which entries are present."""
        present: Booleans = (entries & np.uint64(self.present)) != 0
        return present

    def mapped_of(self, entries: Words) -> Booleans:
        """Return which entries are present, or map an inaccessible page."""
        mapped: Booleans = (entries & np.uint64(self.present | self.protnone)) != 0
        return mapped

    def tables(self, entries: Words, shift: int) -> Words:
        """Return the physical addresses of the tables that entries point to."""
        return self.addresses(entries[self.table_entries(entries, shift)])

    def table_entries(self, entries: Words, shift: int) -> Booleans:
        """Return which entries above the lowest level point to tables."""
        named = self.present_of(entries)
        huge = self.huge_of(entries, shift)
        if huge is not None:
            named &= ~huge
        return named

    def user_pfns(self, entries: Words) -> Words:
        """Return the pfn that each user entry maps."""
        if self.inverts:
            entries = np.where(self.present_of(entries), entries, ~entries)
        return self.addresses(entries) >> np.uint64(self.page_shift)

    def swap_types(self, entries: Words) -> Words:
        """Return the number of the swap device in each swap entry."""
        types: Words = entries >> np.uint64(self.swap_type_shift) & np.uint64(31)
        return types


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
        self._leaf = {shift: form.leaf_bits(shift) for shift in form.shifts}
        self._last = dict.fromkeys(form.shifts, form.entries - 1)
        self._last[form.shifts[0]] = form.top_entries - 1

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
        start = self.form.address(entry) >> shift << shift
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
            found = self._frames(address + (done << self.form.page_shift), count - done)
            parts.append(found)
            done += len(found)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _frames(self, address: int, count: int) -> npt.NDArray[np.int64]:
        """Find as many frames as one entry, or one table of pages, tells."""
        form = self.form
        entry, shift, error = self._descend(address, form.shifts[:-1])
        within = (address & ((1 << shift) - 1)) >> form.page_shift
        room = min(count, form.pages_of(shift) - within)
        if error is not None or not entry:
            return np.full(room, -1, np.int64)
        table = form.address(entry)
        if form.maps_memory(entry, shift):
            first = (table >> shift << shift - form.page_shift) + within
            return np.arange(first, first + room, dtype=np.int64)
        # Not cached: there are many, and each is needed once or twice.
        try:
            entries = np.frombuffer(self._read_table(table), "<u8")
        except UNREADABLE:
            return np.full(room, -1, np.int64)
        words = entries[within : within + room]
        frames = form.addresses(words) >> np.uint64(form.page_shift)
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
        form = self.form
        present, flip, frame = form.present, form.flip, form.frame
        high, high_shift = form.high, form.high_shift
        for shift in shifts:
            entries = tables.get(table)
            if entries is None:
                try:
                    entries = tables[table] = self._read_table(table)
                except UNREADABLE as error:
                    return 0, shift, error
            index = address >> shift & self._last[shift]
            (entry,) = _U64.unpack_from(entries, index * 8)
            if not entry & present:
                return 0, shift, None
            # form.maps_memory() and address() inlined: calls would double the time.
            if (entry ^ flip) & self._leaf[shift]:
                break
            table = entry & frame | (entry & high) << high_shift
        return entry, shift, None
