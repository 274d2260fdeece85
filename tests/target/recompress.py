# SPDX-License-Identifier: LGPL-2.1-or-later

"""Kdumps with snappy and zstd pages, which not every makedumpfile can write.

The encoders use nothing of the two formats but runs of one byte and bytes as they
are, which is enough for a decoder to have to know the format.
"""

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from msatools.target import kdump
from msatools.target.reading import ReadAt

PAGE = 4096


def pieces(page: bytes) -> Iterator[tuple[bytes, int]]:
    """Split a page into single runs (a byte, its count) and the rest (bytes, 1)."""
    start = 0
    for match in re.finditer(rb"(.)\1{31,}", page, re.DOTALL):
        if match.start() > start:
            yield page[start : match.start()], 1
        yield match[1], len(match[0])
        start = match.end()
    if start < len(page):
        yield page[start:], 1


def zstd(page: bytes) -> bytes:
    """A frame of raw and RLE blocks, as RFC 8878 has them."""
    frame = b"\x28\xb5\x2f\xfd\x60" + struct.pack("<H", len(page) - 256)
    parts = list(pieces(page))
    for i, (data, count) in enumerate(parts):
        is_last = i == len(parts) - 1
        kind, size = (1, count) if count > 1 else (0, len(data))
        frame += (is_last | kind << 1 | size << 3).to_bytes(3, "little") + data
    return frame


def snappy(page: bytes) -> bytes:
    """A raw stream of literals and copies from one byte back."""
    out = bytearray(b"\x80\x20")  # 4096, as a varint
    for data, count in pieces(page):
        out += struct.pack("<BH", 61 << 2, len(data) - 1) + data
        left = count - 1
        while left > 0:
            out += struct.pack("<BH", (min(left, 64) - 1) << 2 | 2, 1)
            left -= 64
    return bytes(out)


FORMATS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "snappy": (0x4, snappy),
    "zstd": (0x20, zstd),
}


def recompress(raw: Path, out: Path, format: str, pages: int) -> dict[int, bytes]:
    """Copy a kdump of uncompressed pages, some compressed in ``format``.

    :param pages: how many pages to compress
    :return: the pages that were, by page frame number
    """
    flag, encode = FORMATS[format]
    whole = raw.read_bytes()
    read: ReadAt = lambda offset, size: whole[offset : offset + size]  # noqa: E731
    header = kdump.parse(read)
    half = header.bitmap_size // 2
    bitmap = int.from_bytes(read(header.bitmap_at + half, half), "little")
    at = header.bitmap_at + header.bitmap_size
    changed = bytearray(whole)
    struct.pack_into("<I", changed, 424, flag)
    done: dict[int, bytes] = {}
    pfn = -1
    while bitmap and len(done) < pages:
        step = (bitmap & -bitmap).bit_length()
        pfn, bitmap = pfn + step, bitmap >> step
        offset, size, _, page_flags = struct.unpack_from("<QIIQ", whole, at)
        page = read(offset, size)
        encoded = encode(page)
        # Zero pages share their data with each other: they stay as they are.
        if any(page) and len(encoded) < size:
            changed[offset : offset + len(encoded)] = encoded
            struct.pack_into(
                "<QIIQ", changed, at, offset, len(encoded), flag, page_flags
            )
            done[pfn] = page
        at += 24
    out.write_bytes(changed)
    return done
