# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads the memmap of a kdump many pages at a time.

drgn reads a kdump through libkdumpfile, page by page. This module translates a range by
the page tables, and reads all its pages from the file at once. It leaves the pages that
cannot be read this way to drgn, so that the result is always the same as drgn's.
"""

from itertools import groupby
from typing import NamedTuple

from drgn import Program, ProgramFlags

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.reader import Gap, Reader
from msatools.target.damaged import pages_read_here
from msatools.target.kdumppages import (
    CUT_OFF,
    AnyPages,
    KdumpPages,
    LeftToDrgnError,
)
from msatools.target.vmalloc import VmallocTables, page_tables


class _Source(NamedTuple):
    pages: AnyPages
    tables: VmallocTables

    @property
    def page(self) -> int:
        """Size of a page."""
        return self.pages.page_size


class BulkReader:
    """Reads ranges of kernel addresses as :class:`Reader` does, in bulk if possible."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._source = _find_source(reader.prog)
        self._is_checked = False

    @classmethod
    def of(cls, reader: Reader) -> "BulkReader":
        """Return a reader's bulk reader, made on first use."""
        return reader.once("bulk reader", lambda: cls(reader))

    @property
    def in_bulk(self) -> bool:
        """Whether pages are read in bulk rather than by drgn."""
        return self._source is not None

    def read_around_gaps(
        self, address: int, size: int, granule: int
    ) -> tuple[bytes | bytearray, list[Gap]]:
        """Read a range that may have gaps, as the reader does."""
        read_by_drgn = self._reader.read_around_gaps
        source = self._source
        if source is None or source.page % granule:
            return read_by_drgn(address, size, granule)
        page_size = source.page
        if size <= 0 or (address | size) % page_size:
            return read_by_drgn(address, size, granule)
        frames = source.tables.frames(address, size // page_size)
        pages = source.pages.read(frames)
        if not self._is_right(address, pages, page_size):
            self._source = None
            return read_by_drgn(address, size, granule)
        present = [page for page in pages if page]
        # Counted as one read, as from an uncompressed dump.
        self._reader.reads += bool(present)
        self._reader.bytes += len(present) * page_size
        if len(present) == len(pages):
            return b"".join(present), []
        return self._fill(address, pages, page_size)

    def _fill(
        self, address: int, pages: list[bytes | None], page_size: int
    ) -> tuple[bytearray, list[Gap]]:
        """Read the missing pages by drgn; return all data and the remaining gaps."""
        zeros = bytes(page_size)
        filled = bytearray().join(page or zeros for page in pages)
        gaps = [
            Gap(index * page_size, page_size, "unreadable")
            for index, page in enumerate(pages)
            if page == CUT_OFF
        ]
        numbered = enumerate(pages)
        for is_unknown, run in groupby(numbered, key=lambda item: item[1] is None):
            if not is_unknown:
                continue
            indices = [index for index, _ in run]
            start, size = indices[0] * page_size, len(indices) * page_size
            data, more = self._reader.read_around_gaps(address + start, size, page_size)
            filled[start : start + size] = data
            gaps += (Gap(start + gap.offset, gap.size, gap.reason) for gap in more)
        return filled, sorted(gaps, key=lambda gap: gap.offset)

    def _is_right(
        self, address: int, pages: list[bytes | None], page_size: int
    ) -> bool:
        """Check once that the first page read in bulk is the same as drgn's."""
        if self._is_checked:
            return True
        for index, page in enumerate(pages):
            if not page:
                continue
            self._is_checked = True
            try:
                start = address + index * page_size
                expected: bytes = self._reader.prog.read(start, page_size)
            except UNREADABLE:
                return False
            return page == expected
        return True


def _find_source(prog: Program) -> _Source | None:
    path = prog.core_dump_path
    pages = pages_read_here(prog)
    if pages is None:
        if path is None or prog.flags & ProgramFlags.IS_LIVE:
            return None
        try:
            pages = KdumpPages(path)
        except (OSError, EOFError, DamagedDataError, LeftToDrgnError):
            return None
    tables = page_tables(prog)
    if tables is None or pages.page_size != tables.form.table_bytes:
        return None
    return _Source(pages, tables)
