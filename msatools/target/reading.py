# SPDX-License-Identifier: LGPL-2.1-or-later

"""How the parsers of file formats get at bytes, without knowing of files."""

import os
from collections.abc import Callable

ReadAt = Callable[[int, int], bytes]
"""``read(offset, size)``: the bytes there, fewer where the file ends."""


_LARGEST_TABLE = 1 << 30
"""More than any table of a sound file takes, in bytes."""


def reader_of(fd: int) -> ReadAt:
    """Read from an open file, leaving its position alone."""

    def read(offset: int, size: int) -> bytes:
        return os.pread(fd, size, offset)

    return read


def read_exactly(read: ReadAt, offset: int, size: int) -> bytes:
    """Read ``size`` bytes.

    :raises EOFError: if the file ends before
    :raises ValueError: if no sound file has so large a table
    """
    if not 0 <= size <= _LARGEST_TABLE:
        raise ValueError(f"a table of {size} bytes")
    data = read(offset, size)
    if len(data) < size:
        raise EOFError(f"the file ends before byte {offset + size}")
    return data
