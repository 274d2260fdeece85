# SPDX-License-Identifier: LGPL-2.1-or-later

"""Integers in the kernel's memory: their formats, and the largest plausible ones."""

import struct

from msatools.errors import DamagedDataError

PAGE = 4096
"""Bytes of the smallest page."""

MAX_PLAUSIBLE = 1 << 60
"""Maximum of times and counts that is believed: 36 years in nanoseconds."""

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

LIST_HEAD = struct.Struct("<QQ")
"""``struct list_head``: next, prev."""


_WORD_BITS = 64


def bit(number: int) -> int:
    """
    Return a word with one bit set.

    :param number: From the kernel's types, which may be damaged.
    :raises DamagedDataError: if a word of 64 bits has no such bit
    """
    if not 0 <= number < _WORD_BITS:
        raise DamagedDataError(f"a word has no bit {number}")
    return 1 << number


def unsigned(data: bytes, offset: int, size: int) -> int:
    """Return the unsigned integer of *size* bytes at *offset*."""
    return int.from_bytes(data[offset : offset + size], "little")
