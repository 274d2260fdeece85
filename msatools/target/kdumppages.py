# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages of a kdump, many at a time.

libkdumpfile reads pages one by one: look up where its descriptor is, read that, then
the data. Here the descriptors of all that are wanted come with one read, and the data
with another. What is unusual in any way is not read here at all: libkdumpfile has the
last word.

A kdump (makedumpfile's IMPLEMENTATION and diskdump_mod.h) has two bitmaps of page frame
numbers (pfns), of which the second has a bit for each page that was kept. A table of
descriptors follows, one for each such bit: where the page is, its size there, and how
it is compressed. Pages of which all is zero share one place.
"""

import os
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msatools.target import kdump
from msatools.target.codecs import find_codec
from msatools.target.reading import ReadAt, read_exactly, reader_of

Pfns = npt.NDArray[np.int64]

NO_PFN = -1

CUT_OFF = b""
"""A page of which the file should hold more than it does."""

_VERSIONS = range(1, 7)
"""Those of the header that makedumpfile has written so far."""

_DESCRIPTOR_BYTES = 24
_WORDS = _DESCRIPTOR_BYTES // 8

# The pages of which a piece of the bitmap tells: 128 MiB on most machines.
_PIECE_SHIFT = 15
_PIECE_BYTES = (1 << _PIECE_SHIFT) // 8
_PIECES_KEPT = 8
_BITMAP_READ = 256 * _PIECE_BYTES

_BATCH = 1024
"""Pages to read at a time, so that little memory is needed however many are asked."""

_MAX_GAP = 16384
"""To read so many bytes too many takes less than another system call."""


class _Descriptors(NamedTuple):
    """Of pages, as far as they are needed; negative where they cannot be."""

    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int64]


class KdumpPages:
    """
    The pages of a kdump.

    The file has no position that reads move, so that processes can share it after a
    fork.
    """

    def __init__(self, path: str) -> None:
        """
        Open a kdump.

        :raises ValueError: if this is no kdump, or one of a kind that is left to
            libkdumpfile: flattened, split, big-endian, of 32 bits, unknown, or with
            a compression of which the library is not installed
        :raises EOFError: if the file ends within its bitmaps
        :raises OSError: if it cannot be read
        """
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._file_size = os.lseek(self._fd, 0, os.SEEK_END)
        read = reader_of(self._fd)
        header = kdump.parse(read)
        if (
            header.version not in _VERSIONS
            or header.byteorder != "<"
            or header.split
            or header.max_pfn is None
        ):
            raise ValueError("a kdump of a kind that is not read in bulk")
        self.page_size = header.block_size
        # A dump has pages of one compression, and such as do not get smaller by it.
        self._codec = find_codec(header.compression, self.page_size)
        if self._codec is None and header.compression != kdump.UNCOMPRESSED:
            raise ValueError(f"no library for {header.compression} is installed")
        self._flag = header.compression_flag
        half = header.bitmap_size // 2
        if not 0 < header.max_pfn <= half * 8:
            raise ValueError("a kdump whose bitmaps do not tell which pages it has")
        self._max_pfn = header.max_pfn
        self._bitmap_at = header.bitmap_at + half
        self._bitmap_size = half
        self._table_at = header.bitmap_at + header.bitmap_size
        self._kept_before = _count(read, self._bitmap_at, half)
        self._pieces: dict[int, Pfns] = {}

    def read(self, pfns: Pfns) -> list[bytes | None]:
        """
        Read pages.

        :param pfns: In any order; a pfn may come often, and :data:`NO_PFN` may.
        :return: A page for each, in the same order. :data:`CUT_OFF` for what lies
            beyond the file's end: libkdumpfile takes zeros for such a page or, as it
            maps the file, ends the process by SIGBUS (seen in that of drgn 0.3's
            wheel). ``None`` where libkdumpfile has to be asked: not kept, damaged, or
            unknown here.
        """
        pages: list[bytes | None] = []
        for first in range(0, len(pfns), _BATCH):
            places = self._places(pfns[first : first + _BATCH])
            if places[0] >= 0 and (places[1:] > places[:-1]).all():
                # As most are, for what is in one piece in memory.
                pages += self._pages_at(places)
                continue
            wanted, which = np.unique(places, return_inverse=True)
            missing = int(np.count_nonzero(wanted < 0))
            found = [None] * missing + self._pages_at(wanted[missing:])
            pages += [found[i] for i in which.tolist()]
        return pages

    def _places(self, pfns: Pfns) -> npt.NDArray[np.int64]:
        """Find where in the table each page's descriptor is, -1 if it has none."""
        places = np.full(len(pfns), -1, np.int64)
        known = (pfns >= 0) & (pfns < self._max_pfn)
        pieces = pfns >> _PIECE_SHIFT
        for piece in sorted({*pieces[known].tolist()}):
            here = known & (pieces == piece)
            places[here] = self._piece(piece)[pfns[here] & ((1 << _PIECE_SHIFT) - 1)]
        return places

    def _piece(self, piece: int) -> npt.NDArray[np.int64]:
        """Find the descriptors' places of all pages in a piece of the bitmap."""
        places = self._pieces.get(piece)
        if places is None:
            at = piece * _PIECE_BYTES
            size = min(_PIECE_BYTES, self._bitmap_size - at)
            data = self._read(self._bitmap_at + at, size).ljust(size, b"\0")
            kept = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
            places = np.cumsum(kept, dtype=np.int64) + (self._kept_before[piece] - 1)
            places[kept == 0] = -1
            if len(self._pieces) >= _PIECES_KEPT:
                del self._pieces[next(iter(self._pieces))]
            self._pieces[piece] = places
        return places

    def _pages_at(self, places: npt.NDArray[np.int64]) -> list[bytes | None]:
        """Read the pages of which the descriptors are at ascending places."""
        table = self._descriptors(places)
        cut_off = self._is_cut_off(table)
        rows = np.flatnonzero(self._is_known(table) & ~cut_off)
        rows = rows[np.argsort(table.offsets[rows], kind="stable")]
        offsets, sizes, flags = (column[rows] for column in table)
        ends = offsets + sizes
        pages: list[bytes | None] = [None] * len(places)
        for row in np.flatnonzero(cut_off).tolist():
            pages[row] = CUT_OFF
        for run, start, end in _runs(offsets, ends):
            data = self._read(start, end - start)
            here = (offsets[run] - start).tolist(), (ends[run] - start).tolist()
            blocks = [data[first:last] for first, last in zip(*here, strict=True)]
            found = self._pages_of(blocks, flags[run])
            for row, page in zip(rows[run].tolist(), found, strict=True):
                pages[row] = page
        return pages

    def _is_cut_off(self, table: "_Descriptors") -> npt.NDArray[np.bool_]:
        """Return which descriptors are of pages that are not wholly in the file."""
        offsets, sizes, _ = table
        return (offsets < 0) | (sizes > 0) & (offsets > self._file_size - sizes)

    def _is_known(self, table: "_Descriptors") -> npt.NDArray[np.bool_]:
        """Return which descriptors are of pages that can be read here."""
        _, sizes, flags = table
        is_plain = (flags == 0) & (sizes == self.page_size)
        # No page is longer for being compressed.
        is_compressed = (sizes > 0) & (sizes <= self.page_size) & (flags != 0)
        known: npt.NDArray[np.bool_] = is_plain | is_compressed & (flags == self._flag)
        return known

    def _descriptors(self, places: npt.NDArray[np.int64]) -> "_Descriptors":
        """Read descriptors at ascending places; they are zero beyond the file's end."""
        words = np.zeros((len(places), _WORDS), np.int64)
        starts = self._table_at + places * _DESCRIPTOR_BYTES
        for run, start, end in _runs(starts, starts + _DESCRIPTOR_BYTES):
            data = self._read(start, end - start).ljust(end - start, b"\0")
            rows = (starts[run] - start) // _DESCRIPTOR_BYTES
            words[run] = np.frombuffer(data, "<i8").reshape(-1, _WORDS).take(rows, 0)
        # Offset; size and flags, of 32 bits each; page flags.
        return _Descriptors(words[:, 0], words[:, 1] & 0xFFFFFFFF, words[:, 1] >> 32)

    def _read(self, start: int, size: int) -> bytes:
        """Read from the file; what the disk does not give is left out at the end."""
        try:
            return os.pread(self._fd, size, start)
        except OSError:
            return b""

    def _pages_of(
        self, blocks: list[bytes], flags: npt.NDArray[np.int64]
    ) -> list[bytes | None]:
        """Make pages of what the file has of each."""
        if flags.all():
            return self._decompressed(blocks)
        pairs = list(zip(blocks, flags.tolist(), strict=True))
        pages = iter(self._decompressed([block for block, flag in pairs if flag]))
        # A block is short where the disk did not give it.
        return [
            next(pages) if flag else block if len(block) == self.page_size else None
            for block, flag in pairs
        ]

    def _decompressed(self, blocks: list[bytes]) -> list[bytes | None]:
        if self._codec is None:
            return [None] * len(blocks)
        decompress, errors, start = self._codec
        if start:
            # No codec makes anything of an empty block.
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


def _runs(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Iterator[tuple[slice, int, int]]:
    """
    Find what one read each covers.

    :param starts: Ascending, at most :data:`_BATCH`.
    :param ends: A page further at most.
    :return: Which of them it covers, and from where to where it reads.
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
    for at in range(start, start + size, _BITMAP_READ):
        data = read_exactly(read, at, min(_BITMAP_READ, start + size - at))
        counts += (
            int.from_bytes(data[i : i + _PIECE_BYTES], "little").bit_count()
            for i in range(0, len(data), _PIECE_BYTES)
        )
    return np.cumsum(counts, dtype=np.int64)
