# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of a kdump, many at a time.

libkdumpfile reads pages one by one: it looks up the descriptor, reads it, then the
data. Here the descriptors of many pages are read at once, and so are the data. Anything
unusual is left to libkdumpfile.

:mod:`msatools.target.descriptors` has the layout of a kdump.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msatools.errors import DamagedDataError
from msatools.target import kdump
from msatools.target.codecs import find_codec
from msatools.target.descriptors import DESCRIPTOR_BYTES
from msatools.target.flattened import unflattened
from msatools.target.reading import ReadAt, read_exactly, reader_of

Pfns = npt.NDArray[np.int64]

NO_PFN = -1

CUT_OFF = b""
"""A page that lies beyond the end of a truncated file."""

_VERSIONS = range(1, 7)
"""Versions of the header that makedumpfile has written so far."""

_WORDS = DESCRIPTOR_BYTES // 8

# A piece of the bitmap covers 128 MiB with pages of 4 KiB.
_PIECE_SHIFT = 15
_PIECE_BYTES = (1 << _PIECE_SHIFT) // 8
_PIECES_KEPT = 8
_BITMAP_READ = 256 * _PIECE_BYTES

_BATCH = 1024
"""Maximum number of pages to read at a time, to bound the memory used."""

_MAX_GAP = 16384
"""Number of bytes that are faster to read in vain than by another system call."""


class _Descriptors(NamedTuple):
    """Fields of ``struct page_desc``; negative if they are damaged."""

    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int64]


class LeftToDrgnError(Exception):
    """A kdump that only libkdumpfile reads."""


class KdumpPages:
    """
    The pages of a kdump.

    Reads do not move the file's position, so that processes can share it after a fork.
    """

    def __init__(self, path: str) -> None:
        """
        Open a kdump.

        :raises DamagedDataError: if this is not a kdump, or a damaged one
        :raises LeftToDrgnError: if it is left to libkdumpfile: big-endian, of 32 bits,
            of an unknown version, or with a compression whose library is not installed
        :raises EOFError: if the file ends within its bitmaps
        :raises OSError: if it cannot be read
        """
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        size = os.lseek(self._fd, 0, os.SEEK_END)
        opened = unflattened(reader_of(self._fd), size)
        self._read_file, self._file_size = opened.tables, opened.size
        self._read_pages = opened.pages
        header = kdump.parse(self._read_file)
        if (
            header.version not in _VERSIONS
            or header.byteorder != "<"
            or header.max_pfn is None
        ):
            raise LeftToDrgnError("a kdump of a kind that is not read in bulk")
        self.page_size = header.block_size
        # A page is compressed with the dump's method, or stored if that saves nothing.
        self._codec = find_codec(header.compression, self.page_size)
        if self._codec is None and header.compression != kdump.UNCOMPRESSED:
            raise LeftToDrgnError(f"no library for {header.compression} is installed")
        self._flag = header.compression_flag
        half = header.bitmap_size // 2
        if not 0 < header.max_pfn <= half * 8:
            raise DamagedDataError(
                "a kdump whose bitmaps do not say which pages it has"
            )
        self.pfns = range(header.max_pfn) if header.part is None else header.part
        if not 0 <= self.pfns.start < self.pfns.stop <= half * 8:
            raise DamagedDataError("a kdump that is a part of none")
        self._bitmap_offset = header.bitmap_offset + half
        self._bitmap_size = half
        self._table_offset = header.table_offset
        self._kept_before = _count(self._read_file, self._bitmap_offset, half)
        self._pieces: dict[int, Pfns] = {}
        # A part of several has the bitmaps of the whole, but its own descriptors only.
        self._before_part = self._kept_below(self.pfns.start)

    def read(self, pfns: Pfns) -> list[bytes | None]:
        """
        Read pages.

        :param pfns: In any order, with repetitions and :data:`NO_PFN`.
        :return: A page for each, in the same order. :data:`CUT_OFF` if it lies beyond
            the end of the file: libkdumpfile returns zeros for such a page or, as it
            maps the file, ends the process by SIGBUS (seen in that of drgn 0.3's
            wheel). ``None`` if it is left to libkdumpfile: not kept, damaged, or
            unknown here.
        """
        pages: list[bytes | None] = []
        for first in range(0, len(pfns), _BATCH):
            indices = self._indices(pfns[first : first + _BATCH])
            if indices[0] >= 0 and (indices[1:] > indices[:-1]).all():
                # The usual case: contiguous memory.
                pages += self._pages_at(indices)
                continue
            needed, rows = np.unique(indices, return_inverse=True)
            missing = int(np.count_nonzero(needed < 0))
            found = [None] * missing + self._pages_at(needed[missing:])
            pages += [found[row] for row in rows.tolist()]
        return pages

    def is_kept(self, pfn: int) -> bool:
        """Return whether the dump has a page, sound or not."""
        return bool(self._indices(np.array([pfn], np.int64))[0] >= 0)

    def kept_ranges(self) -> Iterator[range]:
        """Yield the page frames of the dump, those that follow each other at once.

        They are read with the bitmap, a piece at a time.
        """
        start = end = self.pfns.start
        for piece in range(start >> _PIECE_SHIFT, -(-self.pfns.stop >> _PIECE_SHIFT)):
            first = piece << _PIECE_SHIFT
            kept = np.flatnonzero(self._piece(piece) >= 0) + first
            kept = kept[(kept >= self.pfns.start) & (kept < self.pfns.stop)]
            breaks = np.flatnonzero(np.diff(kept) > 1) + 1
            for run in np.split(kept, breaks):
                if not len(run):
                    continue
                if int(run[0]) != end:
                    if start < end:
                        yield range(start, end)
                    start = int(run[0])
                end = int(run[-1]) + 1
        if start < end:
            yield range(start, end)

    def _indices(self, pfns: Pfns) -> npt.NDArray[np.int64]:
        """Find the index of each page's descriptor in the table; < 0 if not kept."""
        indices = np.full(len(pfns), -1, np.int64)
        known = (pfns >= self.pfns.start) & (pfns < self.pfns.stop)
        pieces = pfns >> _PIECE_SHIFT
        for piece in sorted({*pieces[known].tolist()}):
            here = known & (pieces == piece)
            found = self._piece(piece)[pfns[here] & ((1 << _PIECE_SHIFT) - 1)]
            indices[here] = found - self._before_part
        return indices

    def _kept_below(self, pfn: int) -> int:
        """Count the pages kept below a page frame, in all parts of the dump."""
        piece, rest = divmod(pfn, 1 << _PIECE_SHIFT)
        below = self._piece(piece)[:rest]
        return int(self._kept_before[piece]) + int(np.count_nonzero(below >= 0))

    def _piece(self, piece: int) -> npt.NDArray[np.int64]:
        """Find the indices of all pages in a piece of the bitmap; -1 if not kept."""
        indices = self._pieces.get(piece)
        if indices is None:
            start = piece * _PIECE_BYTES
            size = min(_PIECE_BYTES, self._bitmap_size - start)
            data = self._read(self._bitmap_offset + start, size).ljust(size, b"\0")
            kept = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
            indices = np.cumsum(kept, dtype=np.int64) + (self._kept_before[piece] - 1)
            indices[kept == 0] = -1
            if len(self._pieces) >= _PIECES_KEPT:
                del self._pieces[next(iter(self._pieces))]
            self._pieces[piece] = indices
        return indices

    def _pages_at(self, indices: npt.NDArray[np.int64]) -> list[bytes | None]:
        """Read the pages whose descriptors have these ascending indices."""
        table = self._descriptors(indices)
        cut_off = self._is_cut_off(table)
        rows = np.flatnonzero(self._is_known(table) & ~cut_off)
        rows = rows[np.argsort(table.offsets[rows], kind="stable")]
        offsets, sizes, flags = (column[rows] for column in table)
        ends = offsets + sizes
        pages: list[bytes | None] = [None] * len(indices)
        for row in np.flatnonzero(cut_off).tolist():
            pages[row] = CUT_OFF
        for run, start, end in _runs(offsets, ends):
            data = self._read(start, end - start, self._read_pages)
            here = (offsets[run] - start).tolist(), (ends[run] - start).tolist()
            blocks = [data[first:last] for first, last in zip(*here, strict=True)]
            found = self._pages_of(blocks, flags[run])
            for row, page in zip(rows[run].tolist(), found, strict=True):
                pages[row] = page
        return pages

    def _is_cut_off(self, table: "_Descriptors") -> npt.NDArray[np.bool_]:
        """Return which pages are not completely in the file."""
        offsets, sizes, _ = table
        return (offsets < 0) | (sizes > 0) & (offsets > self._file_size - sizes)

    def _is_known(self, table: "_Descriptors") -> npt.NDArray[np.bool_]:
        """Return which pages can be read here."""
        _, sizes, flags = table
        is_plain = (flags == 0) & (sizes == self.page_size)
        # A compressed page is never longer than the page.
        is_compressed = (sizes > 0) & (sizes <= self.page_size) & (flags != 0)
        known: npt.NDArray[np.bool_] = is_plain | is_compressed & (flags == self._flag)
        return known

    def _descriptors(self, indices: npt.NDArray[np.int64]) -> "_Descriptors":
        """Read descriptors by ascending index; zero beyond the end of the file."""
        words = np.zeros((len(indices), _WORDS), np.int64)
        starts = self._table_offset + indices * DESCRIPTOR_BYTES
        for run, start, end in _runs(starts, starts + DESCRIPTOR_BYTES):
            data = self._read(start, end - start).ljust(end - start, b"\0")
            rows = (starts[run] - start) // DESCRIPTOR_BYTES
            words[run] = np.frombuffer(data, "<i8").reshape(-1, _WORDS).take(rows, 0)
        # Offset; size and flags, of 32 bits each; page flags.
        return _Descriptors(words[:, 0], words[:, 1] & 0xFFFFFFFF, words[:, 1] >> 32)

    def _read(self, start: int, size: int, read: ReadAt | None = None) -> bytes:
        """Read from the file; less or nothing if the disk fails."""
        try:
            return (read or self._read_file)(start, size)
        except OSError:
            return b""

    def _pages_of(
        self, blocks: list[bytes], flags: npt.NDArray[np.int64]
    ) -> list[bytes | None]:
        """Return the pages in these blocks of the file."""
        if flags.all():
            return self._decompressed(blocks)
        pairs = list(zip(blocks, flags.tolist(), strict=True))
        pages = iter(self._decompressed([block for block, flag in pairs if flag]))
        # A block is short if the disk failed.
        return [
            next(pages) if flag else block if len(block) == self.page_size else None
            for block, flag in pairs
        ]

    def _decompressed(self, blocks: list[bytes]) -> list[bytes | None]:
        if self._codec is None:
            return [None] * len(blocks)
        decompress, errors, start = self._codec
        if start:
            # Every codec rejects an empty block.
            blocks = [block if block.startswith(start) else b"" for block in blocks]
        pages: list[bytes | None] = []
        for block in blocks:
            try:
                page = decompress(block)
            except errors:
                pages.append(None)
            else:
                pages.append(page if len(page) == self.page_size else None)
        return pages


class SplitPages:
    """The pages of a kdump that was split into several files."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Open its parts, as :class:`KdumpPages` opens each.

        :param paths: Parts that have pages, by page frame.
        """
        self._parts = [KdumpPages(path) for path in paths]
        self._starts = np.array([part.pfns.start for part in self._parts], np.int64)
        self.page_size = self._parts[0].page_size

    def read(self, pfns: Pfns) -> list[bytes | None]:
        """Read pages, as :meth:`KdumpPages.read` does."""
        pages: list[bytes | None] = [None] * len(pfns)
        numbers = self._numbers(pfns)
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            found = self._parts[number].read(pfns[rows])
            for row, page in zip(rows.tolist(), found, strict=True):
                pages[row] = page
        return pages

    def is_kept(self, pfn: int) -> bool:
        """Return whether the dump has a page, sound or not."""
        number = int(self._numbers(np.array([pfn], np.int64))[0])
        return self._parts[number].is_kept(pfn)

    def _numbers(self, pfns: Pfns) -> npt.NDArray[np.int64]:
        """Return the part to ask for each page."""
        numbers = np.searchsorted(self._starts, pfns, side="right") - 1
        return np.maximum(numbers, 0).astype(np.int64)


AnyPages = KdumpPages | SplitPages


def _runs(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Iterator[tuple[slice, int, int]]:
    """
    Yield the runs of neighbours to read at once.

    :param starts: Ascending offsets in the file, at most :data:`_BATCH`.
    :param ends: Their ends, at most a page further.
    :return: Rows of each run, and the start and end of its read.
    """
    far = np.flatnonzero(starts[1:] - ends[:-1] > _MAX_GAP) + 1
    edges = [0, *far.tolist(), len(starts)]
    for first, last in pairwise(edges):
        if first < last:
            run = slice(first, last)
            yield run, int(starts[first]), int(ends[run].max())


def _count(read: ReadAt, start: int, size: int) -> npt.NDArray[np.int64]:
    """Count the pages kept before each piece of the bitmap."""
    counts = [0]
    for offset in range(start, start + size, _BITMAP_READ):
        data = read_exactly(read, offset, min(_BITMAP_READ, start + size - offset))
        counts += (
            int.from_bytes(data[i : i + _PIECE_BYTES], "little").bit_count()
            for i in range(0, len(data), _PIECE_BYTES)
        )
    return np.cumsum(counts, dtype=np.int64)
