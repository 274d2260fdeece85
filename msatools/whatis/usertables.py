# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the page tables of a process say about single addresses."""

from typing import Literal

import numpy as np
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.words import U64
from msatools.target.arch import table_format
from msatools.target.paging import TableFormat
from msatools.whatis.lookup import Lookup

State = Literal["mapped", "swapped", "absent", "unknown"]


class UserEntry(Struct, frozen=True):
    """The entry for an address in the page tables of a process."""

    state: State
    pfn: int | None = None
    """The page that is mapped; ``None`` if none is."""


_UNKNOWN = UserEntry("unknown")
_ABSENT = UserEntry("absent")


class UserEntries:
    """Looks up single addresses in page tables of processes."""

    def __init__(self, lookup: Lookup) -> None:
        self._reader = lookup.reader
        self._structs = lookup.structs
        self._form = table_format(lookup.prog)

    def find(self, mm: int, address: int) -> UserEntry:
        """Return the entry for an address.

        :param mm: Address of the ``struct mm_struct``.
        """
        form = self._form
        if form is None:
            return _UNKNOWN
        try:
            top = self._structs.member(mm, "mm_struct", "pgd")
            return self._walk(form, top, address)
        except UNREADABLE:
            return _UNKNOWN

    def _walk(self, form: TableFormat, top: int, address: int) -> UserEntry:
        if address >> form.shifts[0] >= form.user_entries:
            return _ABSENT
        table, physical = top, False
        last = form.user_entries - 1
        for shift in form.shifts:
            place = table + 8 * (address >> shift & last)
            (entry,) = U64.unpack(self._reader.read(place, 8, physical=physical))
            words = np.array([entry], np.uint64)
            huge = form.huge_of(words, shift)
            is_leaf = shift == form.page_shift or (huge is not None and bool(huge[0]))
            if is_leaf and form.mapped_of(words)[0]:
                pages = form.pages_of(shift)
                first = int(form.user_pfns(words)[0]) & ~(pages - 1)
                within = address >> form.page_shift & (pages - 1)
                return UserEntry("mapped", first + within)
            if not form.present_of(words)[0]:
                software = entry & ~form.hardware
                # Migration and other entries that are not present are not told apart.
                return UserEntry("swapped") if is_leaf and software else _ABSENT
            table, physical = form.address(entry), True
            last = form.entries - 1
        return _ABSENT
