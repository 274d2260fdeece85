# SPDX-License-Identifier: LGPL-2.1-or-later

"""Formats of little-endian integers and list heads, and the smallest page size."""

import struct

PAGE = 4096
"""Bytes of the smallest page."""

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

LIST_HEAD = struct.Struct("<QQ")
"""``struct list_head``: next, prev."""


def unsigned(data: bytes, offset: int, size: int) -> int:
    """Return the unsigned integer of *size* bytes at *offset*."""
    return int.from_bytes(data[offset : offset + size], "little")
