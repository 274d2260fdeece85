# SPDX-License-Identifier: LGPL-2.1-or-later

"""The processes whose page tables are in a page.

``struct ptdesc`` (include/linux/mm_types.h) has ``pt_mm`` only for the top-level tables
of x86. So the tables of all processes are walked down to those above the last level:
one of them points to the table.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.target.arch import table_format
from msatools.target.model import Address
from msatools.target.paging import TableFormat, Words
from msatools.tasks.spaces import AddressSpace, address_spaces
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import TableOwner

MAX_OWNERS = 16
"""Processes that are listed for a table; those of hugetlb pages may be shared."""

_MAX_READ = 1 << 16
"""Tables that are read, of a page each: the upper ones of 64 TiB that is mapped."""

_MAX_LEVEL = 1 << 22
"""Tables of a level that are kept, in 100 MB: the lowest ones of 8 TiB."""


class _Level(NamedTuple):
    """The tables of one level, of all processes."""

    bytes: int
    """What a table maps."""

    tables: Words
    """Physical addresses."""

    spaces: npt.NDArray[np.intp]
    """Index of each table's process."""

    starts: Words
    """First address that each table maps."""


class TableOwners:
    """Finds the processes of page tables; all are walked once."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._form = table_format(lookup.prog)
        self._left = _MAX_READ

    def of(self, pfn: int) -> tuple[TableOwner, ...]:
        """Return the processes whose table is in a page, at most :data:`MAX_OWNERS`."""
        found = []
        for level in self._levels:
            pfns = level.tables // np.uint64(self._lookup.page_size)
            for row in np.flatnonzero(pfns == pfn)[:MAX_OWNERS].tolist():
                space = self._spaces[level.spaces[row]]
                found.append(
                    TableOwner(
                        pid=space.pid,
                        comm=space.comm,
                        start=Address(int(level.starts[row])),
                        bytes=level.bytes,
                    )
                )
        return tuple(found[:MAX_OWNERS])

    @cached_property
    def _spaces(self) -> list[AddressSpace]:
        return address_spaces(self._lookup.reader, self._lookup.losses)

    @cached_property
    def _levels(self) -> list[_Level]:
        """All tables, the top level first."""
        form = self._form
        if form is None:
            return []
        level = self._top(form)
        levels = [level]
        # Entries at the last level map pages.
        for shift in form.shifts[:-1]:
            is_top = level is levels[0]
            level = self._below(form, level, shift, is_top=is_top)
            levels.append(level)
        return levels

    def _top(self, form: TableFormat) -> _Level:
        """Return the top-level tables of all processes."""
        tables, spaces = [], []
        for number, space in enumerate(self._spaces):
            pages = self._lookup.tables
            pfn = None if pages is None else pages.pfn(space.top)
            if pfn is not None:
                within = space.top % self._lookup.page_size
                tables.append(pfn * self._lookup.page_size + within)
                spaces.append(number)
        return _Level(
            form.user_entries << form.shifts[0],
            np.array(tables, np.uint64),
            np.array(spaces, np.intp),
            np.zeros(len(tables), np.uint64),
        )

    def _below(
        self, form: TableFormat, level: _Level, shift: int, *, is_top: bool
    ) -> _Level:
        """Return the tables that the entries of a level point to.

        :param shift: Shift of these entries.
        """
        count = form.user_entries if is_top else form.entries
        tables, spaces, starts, left = [], [], [], _MAX_LEVEL
        rows = zip(
            level.tables.tolist(),
            level.spaces.tolist(),
            level.starts.tolist(),
            strict=True,
        )
        for table, space, start in rows:
            entries = self._read(table, count)
            if entries is None:
                continue
            places = np.flatnonzero(form.table_entries(entries, shift))
            named = form.addresses(entries[places])
            kept = self._in_memory(named)[:left]
            left -= len(kept)
            tables.append(named[kept])
            spaces.append(np.full(len(kept), space, np.intp))
            offsets = places[kept].astype(np.uint64) << np.uint64(shift)
            starts.append(offsets + np.uint64(start))
        if not left:
            self._lose(f"only {_MAX_LEVEL:,} page tables of a level are read")
        return _Level(
            1 << shift,
            _joined(tables, np.uint64),
            _joined(spaces, np.intp),
            _joined(starts, np.uint64),
        )

    def _in_memory(self, tables: Words) -> npt.NDArray[np.intp]:
        """Return the first row of each table that is in memory; others are damage."""
        distinct, rows = np.unique(tables, return_index=True)
        pfns = distinct // np.uint64(self._lookup.page_size)
        known = np.zeros(len(pfns), np.bool_)
        for part in self._lookup.memmap:
            known |= (pfns >= part.pfn) & (pfns < part.pfn + part.pages)
        if not known.all():
            self._lose("page tables of processes point outside of memory")
        kept: npt.NDArray[np.intp] = np.sort(rows[known])
        return kept

    def _lose(self, text: str) -> None:
        self._lookup.losses.lose(Loss.USER_TABLES, text)

    def _read(self, table: int, count: int) -> Words | None:
        """Return the entries of a table; ``None`` if it cannot be read."""
        if not self._left:
            self._lose(
                f"only {_MAX_READ:,} page tables are read to find the process of one"
            )
            return None
        self._left -= 1
        try:
            return self._lookup.reader.words(table, count, physical=True)
        except UNREADABLE:
            self._lose("page tables of processes cannot be read")
            return None


def _joined(parts: list[npt.NDArray[Any]], kind: type[Any]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, kind)
