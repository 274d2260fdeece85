# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Finds the pages that each address space maps, from its page tables.

Tables are read a level at a time, one read each, and decoded many at once. Their format
is in msatools.target.paging.
"""

from collections.abc import Iterator

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader, distinct
from msatools.kernel.report import LossLog
from msatools.selfdesc.find import find_variable
from msatools.target.arch import table_format
from msatools.target.paging import Words

Indices = npt.NDArray[np.intp]

SPACE_BITS = 24
"""Bits of a key below the pfn; address spaces are at most PID_MAX_LIMIT (2^22)."""

_SPACE_MASK = np.uint64((1 << SPACE_BITS) - 1)
_U64 = (1 << 64) - 1
_AT_ONCE = 256
"""Tables decoded at once: with 4 KiB 1 MiB, which fits the L2 cache."""


class Mapped(Struct, frozen=True):
    """
    Every mapping of a page by an address space, in pfn order.

    A key is the pfn, and the index of the address space in the low :data:`SPACE_BITS`.
    """

    small: Words
    """Keys of the pages that PTEs map."""

    large: tuple[tuple[int, Words], ...]
    """Huge mappings: pages of an entry, and keys of their first pages."""

    tables: Words
    """Keys of the page tables themselves, without those at the top."""

    known: npt.NDArray[np.bool_]
    """Whether all tables could be read, by address space."""

    swapped: npt.NDArray[np.int64] | None
    """Pages in swap by address space; ``None`` if swap entries cannot be identified."""

    # It can be large. Workers of a scan have it from their parent by fork(); they send
    # back only sums.
    def __deepcopy__(self, memo: object) -> "Mapped":
        return self

    def __reduce__(self) -> tuple[type["Mapped"], tuple[object, ...]]:
        none = np.empty(0, np.uint64)
        return Mapped, (none, (), none, np.empty(0, np.bool_), None)

    def small_within(self, pfn: int, pages: int) -> tuple[Indices, Indices]:
        """Find the mappings by PTEs of a range of memory.

        :return: Index of each page in the range, and index of the address space.
        """
        keys = _within(self.small, pfn, pfn + pages)
        return _pages(keys, pfn), (keys & _SPACE_MASK).astype(np.intp)

    def tables_within(self, pfn: int, pages: int) -> tuple[Indices, Indices]:
        """Find the page tables in a range of memory, as :meth:`small_within` does."""
        keys = _within(self.tables, pfn, pfn + pages)
        return _pages(keys, pfn), (keys & _SPACE_MASK).astype(np.intp)

    def large_within(self, pfn: int, pages: int) -> tuple[Indices, Indices, Indices]:
        """Find the huge mappings of a range of memory.

        :return: Index of the first page in the range, index after the last one, and
            index of the address space.
        """
        firsts, ends, spaces = [], [], []
        for length, keys in self.large:
            near = _within(keys, max(pfn - length + 1, 0), pfn + pages)
            first = _pages(near, pfn)
            firsts.append(np.maximum(first, 0))
            ends.append(np.minimum(first + length, pages))
            spaces.append((near & _SPACE_MASK).astype(np.intp))
        return _joined(firsts), _joined(ends), _joined(spaces)


def _within(keys: Words, first: int, end: int) -> Words:
    # searchsorted() would convert the whole array if the types differed.
    ends = np.array((first << SPACE_BITS, end << SPACE_BITS), np.uint64)
    start, stop = np.searchsorted(keys, ends)
    return keys[start:stop]


def _pages(keys: Words, pfn: int) -> Indices:
    indices: Indices = (keys >> np.uint64(SPACE_BITS)).astype(np.intp) - pfn
    return indices


def _joined(parts: list[Indices]) -> Indices:
    return np.concatenate(parts) if parts else np.empty(0, np.intp)


class UserTables:
    """Walks the page tables of many address spaces."""

    def __init__(self, reader: Reader, losses: LossLog, end_pfn: int) -> None:
        """
        :param end_pfn: pfn after the last page of memory; entries beyond it are damage.
        :raises MissingError: if the format of this kernel's page tables is unknown
        """
        form = table_format(reader.prog)
        if form is None:
            raise MissingError("no known page tables")
        self._reader = reader
        self._losses = losses
        self._end = end_pfn
        self._form = form
        # Each table is a page. Those of hugetlb may be shared, and are read again.
        self._left = 2 * end_pfn
        self._swaps = self._swap_types()
        self._small: list[Words] = []
        self._large: dict[int, list[Words]] = {}
        self._tables: list[Words] = []
        self._swapped = 0
        self._is_whole = True

    @staticmethod
    def supported(prog: drgn.Program) -> bool:
        """Return whether the format of this kernel's page tables is known."""
        return table_format(prog) is not None

    def walk(self, tops: Addresses) -> Mapped:
        """
        Find all pages that address spaces map, each identified by its index in *tops*.

        Unreadable tables and entries beyond the end of memory are counted as losses.

        :param tops: Virtual addresses of the top-level tables.
        """
        if len(tops) > int(_SPACE_MASK):
            left_out = len(tops) - int(_SPACE_MASK)
            text = f"{left_out:,} address spaces were not read: too many"
            self._losses.lose(Loss.ADDRESS_SPACES, text)
            tops = tops[: int(_SPACE_MASK)]
        known = np.zeros(len(tops), np.bool_)
        swapped = np.zeros(len(tops), np.int64)
        for space, top in enumerate(tops.tolist()):
            self._swapped, self._is_whole = 0, True
            self._walk_one(space, top)
            known[space], swapped[space] = self._is_whole, self._swapped
        return Mapped(
            _sorted(self._small),
            tuple((pages, _sorted(keys)) for pages, keys in self._large.items()),
            _sorted(self._tables),
            known,
            None if self._swaps is None else swapped,
        )

    def _swap_types(self) -> int | None:
        """Return the number of swap devices: entries of a higher type are not swap."""
        try:
            return int(find_variable(self._reader.prog, "nr_swapfiles").value_())
        except MissingError:
            # Either CONFIG_SWAP=n or missing debug info: they look the same.
            return None
        except UNREADABLE:
            return None

    def _walk_one(self, space: int, top: int) -> None:
        try:
            # The entries above map the kernel.
            entries = self._reader.words(top, self._form.user_entries)
        except UNREADABLE:
            self._lose_table()
            return
        first, *middle, _ = self._form.shifts
        self._take_large(entries, first, space)
        tables = self._form.tables(entries, first)
        for shift in middle:
            below = []
            for entries in self._read(tables, space):
                self._take_large(entries, shift, space)
                below.append(self._form.tables(entries, shift))
            tables = np.concatenate(below) if below else tables[:0]
        for entries in self._read(tables, space):
            self._take_small(entries, space)

    def _read(self, tables: Words, space: int) -> Iterator[Words]:
        """Read each table once, and yield the entries of many at a time."""
        tables = self._in_memory(distinct(tables), 1)
        if len(tables) > self._left:
            text = "there are more page tables than memory has room for"
            self._losses.lose(Loss.USER_TABLES, f"{text}: some were not read")
            tables = tables[: self._left]
            self._is_whole = False
        self._left -= len(tables)
        page_shift = np.uint64(self._form.page_shift)
        self._tables.append(
            (tables >> page_shift) << np.uint64(SPACE_BITS) | np.uint64(space)
        )
        for first in range(0, len(tables), _AT_ONCE):
            part = tables[first : first + _AT_ONCE].tolist()
            data = bytearray()
            for physical in part:
                try:
                    data += self._reader.read(
                        physical, self._form.table_bytes, physical=True
                    )
                except UNREADABLE:
                    self._lose_table()
            yield np.frombuffer(data, "<u8")

    def _lose_table(self) -> None:
        self._losses.lose(Loss.USER_TABLES)
        self._is_whole = False

    def _take_large(self, entries: Words, shift: int, space: int) -> None:
        """Add the huge mappings in entries of a higher table."""
        huge = self._form.huge_of(entries, shift)
        if huge is None or not huge.any():
            return
        # pmd_present(): a huge page that is being split has only the huge bit.
        pages = self._form.pages_of(shift)
        chosen = entries[huge & ((entries & np.uint64(self._form.special)) == 0)]
        # Lower bits are flags here.
        pfns = self._form.user_pfns(chosen) & np.uint64(~(pages - 1) & _U64)
        page_shift = np.uint64(self._form.page_shift)
        pfns = self._in_memory(pfns << page_shift, pages)
        self._large.setdefault(pages, []).append(
            (pfns >> page_shift) << np.uint64(SPACE_BITS) | np.uint64(space)
        )

    def _take_small(self, entries: Words, space: int) -> None:
        """Add the mappings in PTEs, and count the swap entries."""
        form = self._form
        page_shift = form.page_shift
        present = form.mapped_of(entries)
        chosen = entries[present & ((entries & np.uint64(form.special)) == 0)]
        addresses = form.user_pfns(chosen) << np.uint64(page_shift)
        addresses = self._in_memory(addresses, 1)
        self._small.append(
            addresses << np.uint64(SPACE_BITS - page_shift) | np.uint64(space)
        )
        if self._swaps:
            software = np.uint64(~form.hardware & _U64)
            absent = entries[~present & ((entries & software) != 0)]
            types = form.swap_types(absent)
            self._swapped += int(np.count_nonzero(types < np.uint64(self._swaps)))

    def _in_memory(self, addresses: Words, pages: int) -> Words:
        """Drop physical addresses beyond the end of memory, and count them."""
        last = self._end - pages
        valid = addresses <= np.uint64(max(last, 0) << self._form.page_shift)
        invalid = len(addresses) - int(np.count_nonzero(valid))
        if invalid:
            self._losses.lose(Loss.USER_TABLE_ENTRIES, count=invalid)
            addresses = addresses[valid]
        return addresses


def _sorted(parts: list[Words]) -> Words:
    if not parts:
        return np.empty(0, np.uint64)
    keys = np.concatenate(parts)
    parts.clear()
    keys.sort()
    return keys
