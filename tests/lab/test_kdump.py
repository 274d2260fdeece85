# SPDX-License-Identifier: LGPL-2.1-or-later
import io
import struct
import zlib

import pytest

from fixtures.lab.errors import LabError
from fixtures.lab.kdump import Codec, recompress

BLOCK = 4096
CODEC = Codec(flag=0x4, compress=zlib.compress)


def kdump(pages: list[bytes]) -> io.BytesIO:
    """A kdump of uncompressed pages at page frames 1, 3, 5, ..."""
    header = bytearray(BLOCK)
    header[:8] = b"KDUMP   "
    struct.pack_into("<4I", header, 424, 0, BLOCK, 1, 2)
    bitmap = bytearray(BLOCK)
    for number in range(len(pages)):
        frame = 2 * number + 1
        bitmap[frame // 8] |= 1 << frame % 8
    start = 4 * BLOCK + 24 * len(pages)
    table = b"".join(
        struct.pack("<QIIQ", start + n * BLOCK, BLOCK, 0, n) for n in range(len(pages))
    )
    parts: list[bytes] = [
        bytes(header),
        b"s" * BLOCK,
        b"\xff" * BLOCK,
        bytes(bitmap),
        table,
        *pages,
    ]
    return io.BytesIO(b"".join(parts))


def test_every_page_comes_back() -> None:
    pages = [bytes([n]) * BLOCK for n in range(20)]
    out = io.BytesIO()
    recompress(kdump(pages), out, CODEC)
    packed = out.getvalue()
    assert struct.unpack_from("<I", packed, 424) == (CODEC.flag,)
    assert packed[BLOCK : 4 * BLOCK] == kdump(pages).getvalue()[BLOCK : 4 * BLOCK]
    for number, page in enumerate(pages):
        offset, size, flags, page_flags = struct.unpack_from(
            "<QIIQ", packed, 4 * BLOCK + 24 * number
        )
        assert (flags, page_flags) == (CODEC.flag, number)
        assert zlib.decompress(packed[offset : offset + size]) == page
    assert offset + size == len(packed)


def test_page_that_would_grow_is_kept() -> None:
    out = io.BytesIO()
    page = bytes(BLOCK)
    recompress(kdump([page]), out, Codec(0x20, lambda page: page + b"!"))
    offset, size, flags, _ = struct.unpack_from("<QIIQ", out.getvalue(), 4 * BLOCK)
    assert flags == 0
    assert out.getvalue()[offset : offset + size] == page


def test_only_kdump_is_taken() -> None:
    with pytest.raises(LabError, match="not a kdump"):
        recompress(io.BytesIO(b"\x7fELF"), io.BytesIO(), CODEC)
