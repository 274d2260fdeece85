# SPDX-License-Identifier: LGPL-2.1-or-later

"""The parts of a kdump that ``makedumpfile --split`` wrote.

Each has the headers and bitmaps of the whole, but the pages of a range of page frames
alone. What tells the parts apart are that range's ends in the sub header.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

from msgspec import Struct

from msatools.errors import DamagedDataError
from msatools.target import kdump
from msatools.target.reading import opened

_MOST_FILES = 4096
"""Files of a directory that are looked at."""

SUB_HEADER_BYTES = 104
_COMMON = ((0, 16), (32, 80), (96, SUB_HEADER_BYTES))
"""Ranges of ``struct kdump_sub_header`` that all parts have the same: between them lie
start_pfn and end_pfn, of 32 bits and then of 64."""


class DumpPart(Struct, frozen=True):
    """One part."""

    path: str
    pfns: range
    """Page frame numbers of its pages; some parts of a small dump have none."""


def find_parts(path: str, header: kdump.Kdump) -> list[DumpPart]:
    """Find all parts of a split dump in the directory of one of them.

    :param header: The headers of that one.
    :return: By page frame, without those that have no pages; *path* among them unless
        it has none.
    """
    own = _head(path, header.block_size)
    directory = os.path.dirname(path)
    names = (entry.path for entry in _files(directory or "."))
    parts: dict[range, DumpPart] = {}
    for name in (path, *names):
        with suppress(OSError, EOFError, DamagedDataError):
            if _head(name, header.block_size) != own:
                continue
            with opened(name) as read:
                pfns = kdump.parse(read).part
            if pfns:
                # The same part may lie there twice.
                parts.setdefault(pfns, DumpPart(name, pfns))
    return sorted(parts.values(), key=lambda part: part.pfns.start)


def missing(parts: Sequence[DumpPart], header: kdump.Kdump) -> range | None:
    """Return the first page frames that no part has; ``None`` if all are there."""
    end = 0
    for part in parts:
        if part.pfns.start > end:
            return range(end, part.pfns.start)
        end = max(end, part.pfns.stop)
    last = header.max_pfn or 0
    return range(end, last) if end < last else None


def _files(directory: str) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(directory) as entries:
        for _, entry in zip(range(_MOST_FILES), entries, strict=False):
            if entry.is_file():
                yield entry


def _head(path: str, block_size: int) -> bytes:
    """Return a dump's headers without what differs between its parts."""
    with opened(path) as read:
        return read(0, block_size) + common(read(block_size, SUB_HEADER_BYTES))


def common(sub_header: bytes) -> bytes:
    """Return what a ``struct kdump_sub_header`` has that all parts have the same."""
    return b"".join(sub_header[first:last] for first, last in _COMMON)
