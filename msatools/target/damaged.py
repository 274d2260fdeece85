# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kdumps with pages that libkdumpfile must not read, or does not find.

It maps the file and trusts the descriptors of pages, so that one page that is not in
the file ends the process by SIGBUS. Its own walks of page tables may lead there, too.
In QEMU's kdumps of arm64 it does not find the pages, and a flattened one without its
last piece it does not open at all.
Such a dump is opened by libkdumpfile, for its headers and notes, but all its pages are
read here, and drgn walks the page tables.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from drgn import FaultError, Program

from msatools.errors import DamagedDataError
from msatools.selfdesc.find import ask
from msatools.target import flatheaders
from msatools.target.errors import DamagedDumpError
from msatools.target.kdumppages import AnyPages, KdumpPages, LeftToDrgnError, SplitPages

_PREFER_DRGN = "DRGN_PREFER_PGTABLE_READER"
"""Environment variable by which drgn, not libkdumpfile, translates addresses."""

_ALL_MEMORY = (1 << 64) - 1

_PAGES_KEPT = 1024

_PAGES = "msatools pages of a kdump"

_EXCLUDED = "Excluded page"
"""What libkdumpfile says of a page that was left out of the dump."""

_DAMAGED = "damaged page, or beyond the end of the file"


def set_kdump_read_here(prog: Program, path: str, reason: str) -> None:
    """Set the core dump of a program so that libkdumpfile reads none of its pages.

    :param reason: Why it must not, for the error.
    :raises DamagedDumpError: if only libkdumpfile can read its pages
    """
    _set(prog, path, path, reason)


def set_flat_headers(prog: Program, path: str) -> None:
    """Set the core dump of a program to a flattened kdump without its end.

    libkdumpfile gets a file with the headers and bitmaps of the kdump alone.

    :raises DamagedDumpError: if only libkdumpfile can read its pages
    """
    # The program closes it.
    _set(prog, path, flatheaders.take(path), "its last part is cut off")


def set_parts(prog: Program, path: str, parts: Sequence[str]) -> None:
    """Set the core dump of a program to the parts of a split dump.

    libkdumpfile gets one of them, as all have the headers.

    :param parts: Paths of those that have pages, by page frame.
    :raises DamagedDumpError: if only libkdumpfile can read their pages
    """
    _set(prog, path, path, "it is split into several files", parts)


def pages_read_here(prog: Program) -> AnyPages | None:
    """Return the pages of a dump that is read here; ``None`` for any other."""
    found: AnyPages | None = prog.cache.get(_PAGES)
    return found


def _set(
    prog: Program, path: str, core: str | int, reason: str, parts: Sequence[str] = ()
) -> None:
    try:
        pages = SplitPages(parts) if parts else KdumpPages(path)
    except (DamagedDataError, LeftToDrgnError, EOFError) as error:
        if isinstance(core, int):
            os.close(core)
        raise DamagedDumpError(
            path,
            f"{reason}, and {error}",
            "copy the dump again, or install msatools[fast]",
        ) from error
    with _preferring_drgn():
        ask(prog.set_core_dump, core)
    prog.add_memory_segment(0, _ALL_MEMORY, _PageReader(pages), True)
    prog.cache[_PAGES] = pages


@contextmanager
def _preferring_drgn() -> Iterator[None]:
    before = os.environ.get(_PREFER_DRGN)
    os.environ[_PREFER_DRGN] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PREFER_DRGN]
        else:
            os.environ[_PREFER_DRGN] = before


class _PageReader:
    """Reads physical memory for drgn."""

    def __init__(self, pages: AnyPages) -> None:
        self._pages = pages
        self._kept: dict[int, bytes | None] = {}

    def __call__(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        """Read as :meth:`drgn.Program.add_memory_segment` describes it.

        :raises FaultError: if a page is not in the dump, or damaged
        """
        size = self._pages.page_size
        first, last = address // size, (address + count - 1) // size
        self._keep(range(first, last + 1))
        parts = []
        for pfn in range(first, last + 1):
            page = self._kept[pfn]
            if not page:
                kept = self._pages.is_kept(pfn)
                why = (
                    "damaged page, or beyond the end of the file" if kept else _EXCLUDED
                )
                raise FaultError(why, max(address, pfn * size))
            parts.append(page)
        start = address - first * size
        return b"".join(parts)[start : start + count]

    def _keep(self, pfns: range) -> None:
        missing = [pfn for pfn in pfns if pfn not in self._kept]
        if not missing:
            return
        if len(self._kept) + len(missing) > _PAGES_KEPT:
            self._kept.clear()
            missing = list(pfns)
        pages = self._pages.read(np.array(missing, np.int64))
        self._kept.update(zip(missing, pages, strict=True))
