# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads for parsers of file formats, which take functions instead of files."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msatools.errors import DamagedDataError

ReadAt = Callable[[int, int], bytes]
"""``read(offset, size)`` returns bytes, fewer at the end of the file."""


_MAX_OFFSET = (1 << 63) - 1

_LARGEST_TABLE = 1 << 30
"""Maximum size of a table in a sound file, in bytes."""


def reader_of(fd: int) -> ReadAt:
    """Return a function that reads from an open file without moving its position."""

    def read(offset: int, size: int) -> bytes:
        # No file reaches further, and no call takes such an offset.
        return os.pread(fd, size, offset) if offset <= _MAX_OFFSET else b""

    return read


@contextmanager
def opened(path: str) -> Iterator[ReadAt]:
    """Open a file, and give the function that reads from it.

    :raises OSError: if it cannot be opened
    """
    with open(path, "rb", buffering=0) as file:
        yield reader_of(file.fileno())


def read_exactly(read: ReadAt, offset: int, size: int) -> bytes:
    """Read exactly *size* bytes.

    :raises EOFError: if the file ends before
    :raises DamagedDataError: if *size* is too large for a table of a sound file
    """
    if not 0 <= size <= _LARGEST_TABLE:
        raise DamagedDataError(f"a table of {size} bytes")
    data = read(offset, size)
    if len(data) < size:
        raise EOFError(f"the file ends before byte {offset + size}")
    return data
