# SPDX-License-Identifier: LGPL-2.1-or-later

"""Decompression of a kdump's pages, by the fastest library for each format.

The libraries are the optional extra ``fast``. A dump whose library is not installed is
left to libkdumpfile.
"""

import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_DESCRIPTOR = b"\x60"
"""Frame header descriptor: a single segment, with its content size in 16 bits."""

_ZSTD_SIZE_BIAS = 256
"""A content size in 16 bits is stored minus this."""


_LZO_EXCESS = 64 << 20
"""Bytes beyond that of a page to which blocks of a dump may expand, all together: those
of a sound dump do not."""


class Codec(NamedTuple):
    """
    Decompression of a page.

    A block of the file may be damaged or malicious. If the format lets a few bytes
    claim any amount of memory, a valid block must begin with :attr:`start`.
    """

    decompress: Callable[[bytes], bytes]
    """Returns the content of a block; the caller must check that it is a page."""

    errors: tuple[type[Exception], ...]
    """Exceptions of :attr:`decompress` for damaged blocks."""

    start: bytes = b""
    """First bytes of any block that claims to hold one page."""


def find_codec(compression: str, page_size: int) -> Codec | None:
    """
    Find the codec for pages of *page_size* bytes.

    :param compression: Its name in :mod:`msatools.target.kdump`.
    :return: ``None`` if it is unknown, or its library is not installed.
    """
    make = _CODECS.get(compression)
    if make is None:
        return None
    try:
        return make(page_size)
    except ImportError:
        return None


def _zlib(page_size: int) -> Codec:
    # It expands a byte to about a thousand at most.
    try:
        from zlib_ng import zlib_ng as library
    except ImportError:
        library = zlib  # type: ignore[misc]
    begin, error = library.decompressobj, library.error

    def decompress(block: bytes) -> bytes:
        stream = begin()
        # One byte more than a page, so that it gets to the end of a sound one.
        page = stream.decompress(block, page_size + 1)
        return page if stream.eof else b""

    # Its stub file declares the class as an instance.
    return Codec(decompress, (error,))  # type: ignore[arg-type]


def _lzo(page_size: int) -> Codec:
    from lzallright import LZOCompressor, LZOError

    # It expands a byte to 255 at most, and the library has no bound for a block.
    room = _LZO_EXCESS

    def decompress(block: bytes) -> bytes:
        nonlocal room
        if room < 0:
            raise LZOError("too many blocks are larger than a page")
        page: bytes = LZOCompressor.decompress(block, output_size_hint=page_size)
        room -= max(len(page) - page_size, 0)
        return page

    return Codec(decompress, (LZOError,))


def _snappy(page_size: int) -> Codec:
    import cramjam

    decompress = cramjam.snappy.decompress_raw
    # A block begins with its uncompressed size (snappy's format_description.txt).
    return Codec(
        lambda block: bytes(decompress(block)),
        (cramjam.DecompressionError,),
        _varint(page_size),
    )


def _zstd(page_size: int) -> Codec:
    import zstandard

    # libzstd compresses a page to a single-segment frame without checksum and
    # dictionary, with the content size in 16 bits (RFC 8878, 3.1.1.1).
    size = (page_size - _ZSTD_SIZE_BIAS).to_bytes(2, "little")
    decompress = partial(
        zstandard.ZstdDecompressor().decompress,
        max_output_size=page_size,
        allow_extra_data=False,
    )
    start = _ZSTD_MAGIC + _ZSTD_DESCRIPTOR + size
    return Codec(decompress, (zstandard.ZstdError,), start)


def _varint(number: int) -> bytes:
    """Encode a number as snappy does: seven bits per byte, the lowest first."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_CODECS: dict[str, Callable[[int], Codec]] = {
    "zlib": _zlib,
    "lzo": _lzo,
    "snappy": _snappy,
    "zstd": _zstd,
}
