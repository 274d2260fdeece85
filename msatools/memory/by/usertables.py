# SPDX-License-Identifier: LGPL-2.1-or-later

"""
What the page tables of processes map: the pages of each address space.

Tables come a level at a time, 4 KiB a read, and are looked through many at once.
x86-64 (arch/x86/include/asm/pgtable_types.h and pgtable_64.h).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.losses import Loss
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.target.paging import ENTRIES, HUGE, PAGE_SHIFT, PRESENT, table_format

Words = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]

SPACE_BITS = 24
"""Of a key, below the pfn; there are no more address spaces than PID_MAX_LIMIT."""

_SPACES = np.uint64((1 << SPACE_BITS) - 1)
_AT_ONCE = 256
"""Tables that are looked through at a time: 1 MiB, as much as fits the L2 cache."""

_PRESENT = np.uint64(PRESENT)
_HUGE = np.uint64(HUGE)

_PROTNONE = np.uint64(1 << 8)
"""Without ``_PAGE_PRESENT``: mapped all the same, but not to be touched."""

_SPECIAL = np.uint64(1 << 9)
"""vm_normal_page() finds no page there: the zero page, or memory of a device."""

_HARDWARE = np.uint64(1 << 5 | 1 << 6)
"""Accessed and dirty, which some CPUs set in an entry that is none (erratum)."""

_SWAP_TYPE_SHIFT = np.uint64(59)


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

    def __init__(self, reader: Reader, findings: LossLog, end_pfn: int) -> None:
        """
        :param end_pfn: Behind the last page of memory: no entry can name a page there.
        :raises LookupError: if this kernel's page tables are not known
        """
        form = table_format(reader.prog)
        if form is None:
            raise LookupError("no known page tables")
        self._reader = reader
        self._findings = findings
        self._end = end_pfn
        self._address = np.uint64(form.frame)
        self._levels = form.levels
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
            self._findings.lose(Loss.ADDRESS_SPACES, text)
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
            return int(self._reader.prog["nr_swapfiles"].value_())
        except LookupError:
            # CONFIG_SWAP=n has no such variable, and no types do not tell it apart.
            return None
        except drgn.FaultError:
            return None

    def _walk_one(self, space: int, top: int) -> None:
        try:
            # The other half is the kernel's own.
            entries = self._reader.words(top, ENTRIES // 2)
        except drgn.FaultError:
            self._lose_table()
            return
        tables = self._tables(entries)
        for level in range(self._levels - 1, 1, -1):
            below = [
                self._tables(self._take_large(entries, level, space))
                for entries in self._read(tables)
            ]
            tables = np.concatenate(below) if below else tables[:0]
        for entries in self._read(tables):
            self._take_small(entries, space)

    def _tables(self, entries: Words) -> Words:
        """Find the physical addresses of the tables that entries name."""
        tables: Words = entries[(entries & _PRESENT) != 0] & self._address
        return tables

    def _read(self, tables: Words) -> Iterator[Words]:
        """Read tables, each once, and give their entries many at a time."""
        tables = self._in_memory(np.unique(tables), 1)
        if len(tables) > self._left:
            text = "there are more page tables than memory has room for"
            self._findings.lose(Loss.USER_TABLES, f"{text}: some are not looked at")
            tables = tables[: self._left]
            self._is_whole = False
        self._left -= len(tables)
        for first in range(0, len(tables), _AT_ONCE):
            part = tables[first : first + _AT_ONCE].tolist()
            data = bytearray()
            for physical in part:
                try:
                    data += self._reader.read(physical, 8 * ENTRIES, physical=True)
                except drgn.FaultError:
                    self._lose_table()
            yield np.frombuffer(data, "<u8")

    def _lose_table(self) -> None:
        self._findings.lose(Loss.USER_TABLES)
        self._is_whole = False

    def _take_large(self, entries: Words, level: int, space: int) -> Words:
        """Note what entries of a higher table map themselves; give the others.

        :param level: 2 for tables whose entries map 2 MiB, 3 for 1 GiB.
        """
        if level > 3:
            return entries
        huge = (entries & _HUGE) != 0
        if not huge.any():
            return entries
        # pmd_present(): a huge page that is being split has this bit alone.
        pages = 1 << 9 * (level - 1)
        chosen = entries[huge & ((entries & _SPECIAL) == 0)]
        # Bit 12 is a flag here.
        pfns = self._pfns(chosen) & np.uint64(~(pages - 1) & 0xFFFF_FFFF_FFFF)
        pfns = self._in_memory(pfns << np.uint64(PAGE_SHIFT), pages)
        self._large.setdefault(pages, []).append(
            (pfns >> np.uint64(PAGE_SHIFT)) << np.uint64(SPACE_BITS) | np.uint64(space)
        )
        tables: Words = entries[~huge]
        return tables

    def _take_small(self, entries: Words, space: int) -> None:
        """Note what entries of the lowest tables map, and count those in swap."""
        present = (entries & (_PRESENT | _PROTNONE)) != 0
        chosen = entries[present & ((entries & _SPECIAL) == 0)]
        addresses = self._in_memory(self._pfns(chosen) << np.uint64(PAGE_SHIFT), 1)
        self._small.append(
            addresses << np.uint64(SPACE_BITS - PAGE_SHIFT) | np.uint64(space)
        )
        if self._swaps:
            absent = entries[~present & ((entries & ~_HARDWARE) != 0)]
            types = absent >> _SWAP_TYPE_SHIFT
            self._swapped += int(np.count_nonzero(types < np.uint64(self._swaps)))

    def _pfns(self, entries: Words) -> Words:
        # Linux kernel commit 6b28baca9b1f ("x86/speculation/l1tf: Protect PROT_NONE
        # PTEs against speculation") (in v4.19): what is not present is inverted.
        straight = np.where((entries & _PRESENT) != 0, entries, ~entries)
        pfns: Words = (straight & self._address) >> np.uint64(PAGE_SHIFT)
        return pfns

    def _in_memory(self, addresses: Words, pages: int) -> Words:
        """Leave out physical addresses that are beyond memory, which is counted."""
        last = self._end - pages
        good = addresses <= np.uint64(max(last, 0) << PAGE_SHIFT)
        wild = len(addresses) - int(np.count_nonzero(good))
        if wild:
            self._findings.lose(Loss.USER_TABLE_ENTRIES, count=wild)
            addresses = addresses[good]
        return addresses


def _sorted(parts: list[Words]) -> Words:
    if not parts:
        return np.empty(0, np.uint64)
    keys = np.concatenate(parts)
    parts.clear()
    keys.sort()
    return keys
