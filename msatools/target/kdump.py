# SPDX-License-Identifier: LGPL-2.1-or-later

"""Headers of makedumpfile's kdump-compressed format.

The layouts are those of makedumpfile's ``struct disk_dump_header``, ``struct
kdump_sub_header``, ``struct page_desc`` and, for the flattened form, ``struct
makedumpfile_data_header``. Pages themselves are read by libkdumpfile, not here.
"""

import struct
from dataclasses import dataclass

from msatools.target.reading import ReadAt, read_exactly

SIGNATURE = b"KDUMP   "
FLATTENED_SIGNATURE = b"makedumpfile\0\0\0\0"

_COMPRESSION = {0x1: "zlib", 0x2: "lzo", 0x4: "snappy", 0x20: "zstd"}
UNCOMPRESSED = "uncompressed"
_INCOMPLETE = 0x8

_UTSNAME_FIELD = 65
_UTSNAME_OFFSET = 12
_FLAT_HEADER_SIZE = 4096
_FLAT_END = b"\xff" * 16
_MAX_FLAT_PIECES = 64

# The header is in the first block, the sub header in the second; a block is a page, of
# 64 KiB at most on the architectures that drgn supports.
_FLAT_FRONT = 1 << 18

# Number of page descriptors to read at the end of the table. One would not do: the last
# pages may all be zero pages, which share one block near the front of the file.
_MAX_DESCRIPTORS = 1 << 16


@dataclass(frozen=True)
class Kdump:
    """The headers of a kdump."""

    version: int
    release: str
    """``utsname.release``; empty in dumps that QEMU writes itself."""

    machine: str
    """``utsname.machine``, such as ``x86_64``."""

    compression: str
    """``zlib``, ``lzo``, ``snappy``, ``zstd`` or ``uncompressed``."""

    compression_flag: int
    """Its flag in the header and in page descriptors; 0 for none."""

    incomplete: bool
    """Whether makedumpfile marked the dump as incomplete, having run out of space."""

    dump_level: int | None
    """Bit mask of the page types left out; ``None`` before header version 1."""

    split: bool
    """Whether this is one part of a dump that was split into several files."""

    has_vmcoreinfo: bool | None
    """Whether the dump has a VMCOREINFO note, which drgn needs; ``None`` if the field's
    offset depends on the architecture's padding."""

    nr_cpus: int
    max_pfn: int | None
    """End of the page frame numbers in the dump; ``None`` if the field's offset depends
    on the architecture's padding."""

    block_size: int
    bitmap_offset: int
    """Offset of the two page bitmaps in the file, in bytes."""

    bitmap_size: int
    """Total size of the two bitmaps, in bytes."""

    byteorder: str
    is_64: bool


def parse(read: ReadAt) -> Kdump:
    """Parse the headers of a kdump that is not flattened.

    :raises ValueError: if they are not those of a kdump, or contradict themselves
    :raises EOFError: if the file ends within them
    """
    if not read_exactly(read, 0, len(SIGNATURE)) == SIGNATURE:
        raise ValueError("not a kdump")
    byteorder, word, status_offset = _shape(read)

    version = _unpack(read, byteorder + "i", 8)[0]
    status, block_size, sub_header_blocks, bitmap_blocks = _unpack(
        read, byteorder + "Iiii", status_offset
    )
    (max_pfn,) = _unpack(read, byteorder + "I", status_offset + 16)
    (nr_cpus,) = _unpack(read, byteorder + "i", status_offset + 36)
    if sub_header_blocks < 0 or bitmap_blocks < 0 or nr_cpus < 0:
        raise ValueError("a kdump whose header holds negative sizes")

    # The sub header begins with phys_base, one word, and grew with the version.
    dump_level, split, vmcoreinfo_size = None, 0, None
    if version >= 1:
        (dump_level,) = _unpack(read, byteorder + "i", block_size + word)
    if version >= 2:
        (split,) = _unpack(read, byteorder + "i", block_size + word + 4)
    if version >= 3 and word == 8:
        (vmcoreinfo_size,) = _unpack(read, byteorder + "Q", block_size + 40)
    if version >= 6 and word == 8:
        # max_pfn_64, as 32 bits were not enough.
        (max_pfn,) = _unpack(read, byteorder + "Q", block_size + 96)

    flag = next((bit for bit in _COMPRESSION if status & bit), 0)
    return Kdump(
        version=version,
        release=_utsname(read, 2),
        machine=_utsname(read, 4),
        compression=_COMPRESSION.get(flag, UNCOMPRESSED),
        compression_flag=flag,
        incomplete=bool(status & _INCOMPLETE),
        dump_level=dump_level,
        split=bool(split),
        has_vmcoreinfo=None if vmcoreinfo_size is None else vmcoreinfo_size > 0,
        nr_cpus=nr_cpus,
        max_pfn=max_pfn if word == 8 else None,
        block_size=block_size,
        bitmap_offset=(1 + sub_header_blocks) * block_size,
        bitmap_size=bitmap_blocks * block_size,
        byteorder=byteorder,
        is_64=word == 8,
    )


def end(read: ReadAt, header: Kdump) -> int:
    """Return the minimum size of a file that holds all pages, or nearly that.

    Pages are written in order, so that reading the last few descriptors suffices.

    :raises EOFError: if the file ends within its bitmaps or descriptors
    """
    # struct page_desc: the page's data, size, flags and struct page flags.
    descriptor = struct.Struct(header.byteorder + "QI12x")
    start = header.bitmap_offset + header.bitmap_size
    # The second bitmap has a bit for each page that was kept.
    half = header.bitmap_size // 2
    count = _bits_set(read, header.bitmap_offset + half, half)
    last = min(count, _MAX_DESCRIPTORS)
    last_start = start + (count - last) * descriptor.size
    table = read_exactly(read, last_start, last * descriptor.size)
    return max(
        (offset + size for offset, size in descriptor.iter_unpack(table)),
        default=start,
    )


def is_flat_complete(last_bytes: bytes) -> bool:
    """Return whether the last 16 bytes of a flattened file are its end marker."""
    return last_bytes == _FLAT_END


def unflatten(read: ReadAt) -> ReadAt:
    """Rebuild the front of a flattened kdump, which has the headers.

    The flattened form is a list of pieces, each with its offset in the kdump, the
    headers among the first.

    :raises EOFError: if the file ends within its first pieces
    :raises ValueError: if the offset or size of a piece is negative
    """
    piece_header = struct.Struct(">qq")
    front = bytearray()
    position = _FLAT_HEADER_SIZE
    for _ in range(_MAX_FLAT_PIECES):
        header = read_exactly(read, position, piece_header.size)
        if header == _FLAT_END:
            break
        offset, size = piece_header.unpack(header)
        position += piece_header.size
        if offset < 0 or size < 0:
            raise ValueError("a flattened kdump with a piece of negative place")
        if offset < _FLAT_FRONT:
            data = read_exactly(read, position, min(size, _FLAT_FRONT - offset))
            front.extend(bytes(max(0, offset + len(data) - len(front))))
            front[offset : offset + len(data)] = data
        position += size

    def read_front(offset: int, size: int) -> bytes:
        return bytes(front[offset : offset + size])

    return read_front


def _shape(read: ReadAt) -> tuple[str, int, int]:
    """Find byte order, word size, and the offset of ``status`` in the header.

    The header does not store them. ``block_size`` is the kernel's page size, which is a
    sound power of two with only one of the four combinations.
    """
    # utsname is followed by a struct timeval: two words, aligned to a word.
    for byteorder in "<>":
        for word, status in ((8, 424), (4, 412)):
            (block_size,) = _unpack(read, byteorder + "i", status + 4)
            if 1024 <= block_size <= 1 << 16 and block_size.bit_count() == 1:
                return byteorder, word, status
    raise ValueError("a kdump whose header has no sound block size")


def _unpack(read: ReadAt, layout: str, offset: int) -> tuple[int, ...]:
    return struct.unpack(layout, read_exactly(read, offset, struct.calcsize(layout)))


def _utsname(read: ReadAt, index: int) -> str:
    """Read a field of ``struct new_utsname``."""
    field = read_exactly(read, _UTSNAME_OFFSET + index * _UTSNAME_FIELD, _UTSNAME_FIELD)
    return field.partition(b"\0")[0].decode("ascii", "backslashreplace")


def _bits_set(read: ReadAt, offset: int, size: int) -> int:
    chunk = 1 << 20
    return sum(
        int.from_bytes(
            read_exactly(read, at, min(chunk, offset + size - at)), "little"
        ).bit_count()
        for at in range(offset, offset + size, chunk)
    )
