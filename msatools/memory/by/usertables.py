# SPDX-License-Identifier: LGPL-2.1-or-later

"""
What the page tables of processes map: the pages of each address space.

Tables come a level at a time, 4 KiB a read, and are looked through many at once.
How they are made is in msatools.target.paging.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.selfdesc.variables import find_variable
from msatools.target.paging import (
    PAGE_SHIFT,
    TABLE_BYTES,
    Words,
    pages_of,
    table_format,
)

Indices = npt.NDArray[np.intp]

SPACE_BITS = 24
"""Of a key, below the pfn; there are no more address spaces than PID_MAX_LIMIT."""

_SPACES = np.uint64((1 << SPACE_BITS) - 1)
_WORD = (1 << 64) - 1
_AT_ONCE = 256
"""Tables that are looked through at a time: 1 MiB, as much as fits the L2 cache."""


@dataclass(frozen=True)
class Mapped:
    """
    Every mapping of a page by an address space, in the order of pages.

    A key is the pfn above :data:`SPACE_BITS` bits that number the address space.
    """

    small: Words
    """Keys of what single entries of the lowest tables map."""

    large: tuple[tuple[int, Words], ...]
    """The same of higher tables: pages that an entry maps, and keys by the first."""

    known: npt.NDArray[np.bool_]
    """By address space, whether all of its tables could be read."""

    swapped: npt.NDArray[np.int64] | None
    """Pages in swap by address space; ``None`` if nothing tells what is swap."""

    # It can be large. Workers of a scan look things up in what they were forked with,
    # and what travels back from them is only summed up.
    def __deepcopy__(self, memo: object) -> "Mapped":
        return self

    def __reduce__(self) -> tuple[type["Mapped"], tuple[object, ...]]:
        return Mapped, (np.empty(0, np.uint64), (), np.empty(0, np.bool_), None)

    def small_within(self, pfn: int, pages: int) -> tuple[Indices, Indices]:
        """Find what single entries map of a part of memory.

        :return: Index of the page in that part, and number of the address space.
        """
        keys = _within(self.small, pfn, pfn + pages)
        return _pages(keys, pfn), (keys & _SPACES).astype(np.intp)

    def large_within(self, pfn: int, pages: int) -> tuple[Indices, Indices, Indices]:
        """Find what entries of higher tables map of a part of memory.

        :return: Index of the first page and behind the last one in that part, and
            number of the address space.
        """
        firsts, ends, spaces = [], [], []
        for length, keys in self.large:
            near = _within(keys, max(pfn - length + 1, 0), pfn + pages)
            first = _pages(near, pfn)
            firsts.append(np.maximum(first, 0))
            ends.append(np.minimum(first + length, pages))
            spaces.append((near & _SPACES).astype(np.intp))
        return _joined(firsts), _joined(ends), _joined(spaces)


def _within(keys: Words, first: int, end: int) -> Words:
    # Keys of the array's own type, or all of it is converted at each call.
    ends = np.array((first << SPACE_BITS, end << SPACE_BITS), np.uint64)
    start, stop = np.searchsorted(keys, ends)
    return keys[start:stop]


def _pages(keys: Words, pfn: int) -> Indices:
    found: Indices = (keys >> np.uint64(SPACE_BITS)).astype(np.intp) - pfn
    return found


def _joined(parts: list[Indices]) -> Indices:
    return np.concatenate(parts) if parts else np.empty(0, np.intp)


class UserTables:
    """Walks the page tables of many address spaces."""

    def __init__(self, reader: Reader, losses: LossLog, end_pfn: int) -> None:
        """
        :param end_pfn: Behind the last page of memory: no entry can name a page there.
        :raises LookupError: if this kernel's page tables are not known
        """
        form = table_format(reader.prog)
        if form is None:
            raise LookupError("no known page tables")
        self._reader = reader
        self._losses = losses
        self._end = end_pfn
        self._form = form
        # Each table is a page. Those of hugetlb may be shared, and are met again.
        self._left = 2 * end_pfn
        self._swaps = self._swap_types()
        self._small: list[Words] = []
        self._large: dict[int, list[Words]] = {}
        self._swapped = 0
        self._is_whole = True

    @staticmethod
    def supported(prog: drgn.Program) -> bool:
        """Return whether this kernel's page tables are known."""
        return table_format(prog) is not None

    def walk(self, tops: Addresses) -> Mapped:
        """
        Find all that address spaces map, each known by its place in *tops*.

        A table that is lost is counted, and so is an entry that names no memory.

        :param tops: The virtual address of each one's top-level table.
        """
        if len(tops) > int(_SPACES):
            left_out = len(tops) - int(_SPACES)
            text = f"{left_out:,} address spaces are not looked at: too many"
            self._losses.lose(Loss.ADDRESS_SPACES, text)
            tops = tops[: int(_SPACES)]
        known = np.zeros(len(tops), np.bool_)
        swapped = np.zeros(len(tops), np.int64)
        for space, top in enumerate(tops.tolist()):
            self._swapped, self._is_whole = 0, True
            self._walk_one(space, top)
            known[space], swapped[space] = self._is_whole, self._swapped
        return Mapped(
            _sorted(self._small),
            tuple((pages, _sorted(keys)) for pages, keys in self._large.items()),
            known,
            None if self._swaps is None else swapped,
        )

    def _swap_types(self) -> int | None:
        """Count the swap devices: a swap entry of a type above has another use."""
        try:
            return int(find_variable(self._reader.prog, "nr_swapfiles").value_())
        except LookupError:
            # CONFIG_SWAP=n has no such variable, and no types do not tell it apart.
            return None
        except drgn.FaultError:
            return None

    def _walk_one(self, space: int, top: int) -> None:
        try:
            # The others are the kernel's own.
            entries = self._reader.words(top, self._form.user_entries)
        except drgn.FaultError:
            self._lose_table()
            return
        first, *middle, _ = self._form.shifts
        tables = self._form.tables(entries, first)
        for shift in middle:
            below = []
            for entries in self._read(tables):
                self._take_large(entries, shift, space)
                below.append(self._form.tables(entries, shift))
            tables = np.concatenate(below) if below else tables[:0]
        for entries in self._read(tables):
            self._take_small(entries, space)

    def _read(self, tables: Words) -> Iterator[Words]:
        """Read tables, each once, and give their entries many at a time."""
        tables = self._in_memory(np.unique(tables), 1)
        if len(tables) > self._left:
            text = "there are more page tables than memory has room for"
            self._losses.lose(Loss.USER_TABLES, f"{text}: some are not looked at")
            tables = tables[: self._left]
            self._is_whole = False
        self._left -= len(tables)
        for first in range(0, len(tables), _AT_ONCE):
            part = tables[first : first + _AT_ONCE].tolist()
            data = bytearray()
            for physical in part:
                try:
                    data += self._reader.read(physical, TABLE_BYTES, physical=True)
                except drgn.FaultError:
                    self._lose_table()
            yield np.frombuffer(data, "<u8")

    def _lose_table(self) -> None:
        self._losses.lose(Loss.USER_TABLES)
        self._is_whole = False

    def _take_large(self, entries: Words, shift: int, space: int) -> None:
        """Note what entries of a higher table map themselves."""
        huge = self._form.huge_of(entries, shift)
        if huge is None or not huge.any():
            return
        # pmd_present(): a huge page that is being split has this bit alone.
        pages = pages_of(shift)
        chosen = entries[huge & ((entries & np.uint64(self._form.special)) == 0)]
        # Lower bits are flags here.
        pfns = self._form.user_pfns(chosen) & np.uint64(~(pages - 1) & _WORD)
        pfns = self._in_memory(pfns << np.uint64(PAGE_SHIFT), pages)
        self._large.setdefault(pages, []).append(
            (pfns >> np.uint64(PAGE_SHIFT)) << np.uint64(SPACE_BITS) | np.uint64(space)
        )

    def _take_small(self, entries: Words, space: int) -> None:
        """Note what entries of the lowest tables map, and count those in swap."""
        form = self._form
        present = (entries & np.uint64(form.present | form.protnone)) != 0
        chosen = entries[present & ((entries & np.uint64(form.special)) == 0)]
        addresses = form.user_pfns(chosen) << np.uint64(PAGE_SHIFT)
        addresses = self._in_memory(addresses, 1)
        self._small.append(
            addresses << np.uint64(SPACE_BITS - PAGE_SHIFT) | np.uint64(space)
        )
        if self._swaps:
            software = np.uint64(~form.hardware & _WORD)
            absent = entries[~present & ((entries & software) != 0)]
            types = absent >> np.uint64(form.swap_type_shift)
            self._swapped += int(np.count_nonzero(types < np.uint64(self._swaps)))

    def _in_memory(self, addresses: Words, pages: int) -> Words:
        """Leave out physical addresses that are beyond memory, which is counted."""
        last = self._end - pages
        good = addresses <= np.uint64(max(last, 0) << PAGE_SHIFT)
        wild = len(addresses) - int(np.count_nonzero(good))
        if wild:
            self._losses.lose(Loss.USER_TABLE_ENTRIES, count=wild)
            addresses = addresses[good]
        return addresses


def _sorted(parts: list[Words]) -> Words:
    if not parts:
        return np.empty(0, np.uint64)
    keys = np.concatenate(parts)
    parts.clear()
    keys.sort()
    return keys
