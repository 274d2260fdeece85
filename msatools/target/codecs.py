# SPDX-License-Identifier: LGPL-2.1-or-later

"""The compressions that a kdump's pages can have, each undone by the fastest library.

The libraries are the optional extra ``fast``. Without the one that it needs, a dump is
left to libkdumpfile.
"""

import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SIZE_FOLLOWS = b"\x60"
_ZSTD_SIZE_LESS = 256


class Codec(NamedTuple):
    """
    How to get at a compressed page.

    A block of the file may be damaged, or made to do harm. Where a few bytes of it can
    ask for any amount of memory, its start has to be as expected.
    """

    decompress: Callable[[bytes], bytes]
    """What a block holds; whether that is a whole page is to be checked."""

    errors: tuple[type[Exception], ...]
    """What it raises for damaged blocks."""

    start: bytes = b""
    """What a block begins with that says to hold one page."""


def find_codec(compression: str, page_size: int) -> Codec | None:
    """
    Find how to decompress pages of *page_size* bytes.

    :param compression: As :mod:`msatools.target.kdump` names it.
    :return: ``None`` if it is unknown, or its library not installed.
    """
    make = _CODECS.get(compression)
    if make is None:
        return None
    try:
        return make(page_size)
    except ImportError:
        return None


def _zlib(page_size: int) -> Codec:
    # A byte becomes a thousand at most.
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return Codec(partial(zlib.decompress, bufsize=page_size), (zlib.error,))
    decompress = partial(zlib_ng.decompress, bufsize=page_size)
    # Its stub file calls the class an instance.
    return Codec(decompress, (zlib_ng.error,))  # type: ignore[arg-type]


def _lzo(page_size: int) -> Codec:
    from lzallright import LZOCompressor, LZOError

    # A byte becomes 255 at most.
    decompress = partial(LZOCompressor.decompress, output_size_hint=page_size)
    return Codec(decompress, (LZOError,))


def _snappy(page_size: int) -> Codec:
    import cramjam

    decompress = cramjam.snappy.decompress_raw
    # The size that comes out goes before (snappy's format_description.txt).
    return Codec(
        lambda block: bytes(decompress(block)),
        (cramjam.DecompressionError,),
        _varint(page_size),
    )


def _zstd(page_size: int) -> Codec:
    import zstandard

    # A frame of one segment without checksum and dictionary, and its size in 16 bits
    # (RFC 8878, 3.1.1.1): what the library makes of a page.
    size = (page_size - _ZSTD_SIZE_LESS).to_bytes(2, "little")
    decompress = partial(
        zstandard.ZstdDecompressor().decompress,
        max_output_size=page_size,
        allow_extra_data=False,
    )
    start = _ZSTD_MAGIC + _ZSTD_SIZE_FOLLOWS + size
    return Codec(decompress, (zstandard.ZstdError,), start)


def _varint(number: int) -> bytes:
    """Write a number as snappy does: seven bits a byte, the lowest first."""
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
