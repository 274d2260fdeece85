# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reading the memmap of a kdump by whole pages, many at a time.

drgn reads a kdump through libkdumpfile, page by page. Here the page tables tell where
the pages of a range are in physical memory, and all of them are read from the file at
once. Whatever is not read so, drgn is asked for: no other answer is given than its own.
"""

from itertools import groupby
from typing import NamedTuple

from drgn import FaultError, Program, ProgramFlags

from msatools.kernel.reader import Gap, Reader
from msatools.target.kdumppages import CUT_OFF, KdumpPages
from msatools.target.vmalloc import VmallocTables, page_tables

_PAGE = 4096
"""Of x86-64, of which alone the page tables are known."""

_NOTHING = bytes(_PAGE)


class _Source(NamedTuple):
    pages: KdumpPages
    tables: VmallocTables


class BulkReader:
    """Reads ranges of kernel addresses as :class:`Reader` does, in bulk if it can."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._source = _find_source(reader.prog)
        self._is_checked = False

    @classmethod
    def of(cls, reader: Reader) -> "BulkReader":
        """Return the one of a reader, made on first use."""
        return reader.once("bulk reader", lambda: cls(reader))

    @property
    def in_bulk(self) -> bool:
        """Whether pages are read here rather than by drgn."""
        return self._source is not None

    def read_around_gaps(
        self, address: int, size: int, granule: int
    ) -> tuple[bytes | bytearray, list[Gap]]:
        """Read a range of which parts may be missing, as the reader does."""
        ask_drgn = self._reader.read_around_gaps
        is_whole = size > 0 and not (address | size) % _PAGE
        if self._source is None or granule != _PAGE or not is_whole:
            return ask_drgn(address, size, granule)
        frames = self._source.tables.frames(address, size // _PAGE)
        pages = self._source.pages.read(frames)
        if not self._is_right(address, pages):
            self._source = None
            return ask_drgn(address, size, granule)
        there = [page for page in pages if page]
        # As of a dump that is not compressed, it is one read.
        self._reader.reads += bool(there)
        self._reader.bytes += len(there) * _PAGE
        if len(there) == len(pages):
            return b"".join(there), []
        return self._fill(address, pages)

    def _fill(
        self, address: int, pages: list[bytes | None]
    ) -> tuple[bytearray, list[Gap]]:
        """Ask drgn for the pages that were not read, and name those that are lost."""
        filled = bytearray().join(page or _NOTHING for page in pages)
        gaps = [
            Gap(index * _PAGE, _PAGE, "unreadable")
            for index, page in enumerate(pages)
            if page == CUT_OFF
        ]
        numbered = enumerate(pages)
        for is_unknown, run in groupby(numbered, key=lambda item: item[1] is None):
            if not is_unknown:
                continue
            indices = [index for index, _ in run]
            at, size = indices[0] * _PAGE, len(indices) * _PAGE
            found = self._reader.read_around_gaps(address + at, size, _PAGE)
            filled[at : at + size], more = found
            gaps += (Gap(at + gap.offset, gap.size, gap.reason) for gap in more)
        return filled, sorted(gaps, key=lambda gap: gap.offset)

    def _is_right(self, address: int, pages: list[bytes | None]) -> bool:
        """Hold the first page that is read in bulk against what drgn reads."""
        if self._is_checked:
            return True
        for index, page in enumerate(pages):
            if not page:
                continue
            self._is_checked = True
            try:
                same: bytes = self._reader.prog.read(address + index * _PAGE, _PAGE)
            except FaultError:
                return False
            return page == same
        return True


def _find_source(prog: Program) -> _Source | None:
    path = prog.core_dump_path
    if path is None or prog.flags & ProgramFlags.IS_LIVE:
        return None
    try:
        pages = KdumpPages(path)
    except (OSError, EOFError, ValueError):
        return None
    tables = page_tables(prog)
    if tables is None or pages.page_size != _PAGE:
        return None
    return _Source(pages, tables)
