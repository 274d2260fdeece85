# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads of a flattened kdump as if it were not flattened.

makedumpfile writes this form to a pipe: a list of pieces, each with its offset in the
kdump (``struct makedumpfile_data_header``, big-endian). A later piece replaces what an
earlier one has at the same offsets.
"""

import struct
from bisect import bisect_right
from typing import NamedTuple

from msatools.errors import DamagedDataError
from msatools.target.reading import ReadAt, read_exactly

SIGNATURE = b"makedumpfile\0\0\0\0"

_HEADER_SIZE = 4096
_PIECE_HEADER = struct.Struct(">qq")
END = b"\xff" * _PIECE_HEADER.size

_NO_OFFSET = 1 << 63
"""No file has a byte there."""

_MAX_ODD_PIECES = 1 << 16
"""Maximum number of pieces that are small, or lie before others: a file of many would
take hours to open, in libkdumpfile even more than here."""

_SMALL = 4096
"""Bytes that most pieces have at least: makedumpfile writes headers and bitmaps by the
block, and pages by the MiB."""


_Piece = tuple[int, int, int]
"""Start and end in the kdump, and what to add for the position in the file."""


class FlatFile:
    """The kdump in a flattened file."""

    def __init__(self, read: ReadAt) -> None:
        """Find all pieces, to the end of the file.

        :raises DamagedDataError: if the offset or size of a piece is impossible
        """
        self._read_file = read
        # Disjoint ranges of the kdump, ascending: start, end, and what to add to an
        # offset for the position in the file.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._shifts: list[int] = []
        self.is_cut = False
        """Whether the file ends within a piece. Whole pieces can be missing, too."""

        self.is_complete = self._find_pieces()
        """Whether the list of pieces ends with the mark for it."""

    @property
    def size(self) -> int:
        """Size of the kdump in bytes."""
        return self._ends[-1] if self._ends else 0

    def read(self, offset: int, size: int) -> bytes:
        """Read from the kdump; fewer bytes where it has a hole."""
        parts = []
        end = offset + size
        index = max(bisect_right(self._starts, offset) - 1, 0)
        while offset < end and index < len(self._starts):
            if not self._starts[index] <= offset < self._ends[index]:
                break
            count = min(end, self._ends[index]) - offset
            part = self._read_file(offset + self._shifts[index], count)
            parts.append(part)
            if len(part) < count:
                break
            offset += count
            index += 1
        return b"".join(parts)

    def read_filled(self, offset: int, size: int) -> bytes:
        """Read from the kdump, with zeros where it has a hole."""
        parts = []
        end = min(offset + size, self.size)
        while offset < end:
            part = self.read(offset, end - offset)
            if not part:
                index = bisect_right(self._starts, offset)
                stop = self._starts[index] if index < len(self._starts) else end
                part = bytes(min(stop, end) - offset)
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def is_whole(self, start: int, end: int) -> bool:
        """Return whether there is no hole from one offset to another."""
        first = bisect_right(self._starts, start) - 1
        last = bisect_right(self._starts, end - 1) - 1
        if first < 0 or self._ends[first] < start or self._ends[last] < end:
            return False
        return self._ends[first:last] == self._starts[first + 1 : last + 1]

    def _find_pieces(self) -> bool:
        position = _HEADER_SIZE
        odd = 0
        # Whether the file has all of a piece is known where it goes on.
        last: _Piece | None = None
        while True:
            try:
                header = read_exactly(self._read_file, position, _PIECE_HEADER.size)
            except EOFError:
                if last is not None:
                    self._insert_rest(*last)
                return False
            if last is not None:
                self._insert(*last)
            if header == END:
                return True
            offset, size = _PIECE_HEADER.unpack(header)
            odd += size < _SMALL or offset < self.size
            position += _PIECE_HEADER.size
            is_sound = offset >= 0 and 0 < size < _NO_OFFSET - max(offset, position)
            if not is_sound or odd > _MAX_ODD_PIECES:
                raise DamagedDataError("a flattened kdump with an impossible piece")
            last = (offset, offset + size, position - offset)
            position += size

    def _insert_rest(self, start: int, end: int, shift: int) -> None:
        """Add what the file has of its last piece."""
        low, high = start, end
        while low < high:
            middle = (low + high) // 2
            if self._read_file(middle + shift, 1):
                low = middle + 1
            else:
                high = middle
        self.is_cut = low < end
        if low > start:
            self._insert(start, low, shift)

    def _insert(self, start: int, end: int, shift: int) -> None:
        """Add a range, which replaces what is there."""
        first = bisect_right(self._ends, start)
        last = bisect_right(self._starts, end - 1)
        pieces = [(start, end, shift)]
        if first < last:
            # What remains of the ranges at either edge.
            before = (self._starts[first], start, self._shifts[first])
            after = (end, self._ends[last - 1], self._shifts[last - 1])
            pieces = [
                piece for piece in (before, *pieces, after) if piece[0] < piece[1]
            ]
        starts, ends, shifts = zip(*pieces, strict=True)
        self._starts[first:last] = starts
        self._ends[first:last] = ends
        self._shifts[first:last] = shifts


class Unflattened(NamedTuple):
    """How to read a kdump."""

    tables: ReadAt
    """Reads headers, bitmaps and descriptors: what a file without its end lacks reads
    as zeros, which no descriptor is."""

    pages: ReadAt
    """Reads pages; less where the kdump has a hole."""

    size: int


def unflattened(read: ReadAt, size: int) -> Unflattened:
    """Return how to read a kdump, flattened or not.

    :param size: Size of the file in bytes.
    :raises DamagedDataError: if it is flattened, and a piece is impossible
    """
    if read(0, len(SIGNATURE)) != SIGNATURE:
        return Unflattened(read, read, size)
    flat = FlatFile(read)
    tables = flat.read if flat.is_complete else flat.read_filled
    return Unflattened(tables, flat.read, flat.size)
