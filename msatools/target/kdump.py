# SPDX-License-Identifier: LGPL-2.1-or-later

"""The headers of makedumpfile's kdump-compressed format, as far as a report needs.

Layouts are those of makedumpfile's ``struct disk_dump_header``, ``struct
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
_UTSNAME_AT = 12
_FLAT_HEADER_SIZE = 4096
_FLAT_END = b"\xff" * 16
_FLAT_PIECES_SEEN = 64

# The header is in the first block, the sub header in the second; blocks are pages,
# of 64 KiB at most on the architectures that drgn knows.
_FLAT_FRONT = 1 << 18

# How many page descriptors from the end of the table to look at: the last pages
# may all be zero pages, which share one block near the front of the file.
_DESCRIPTORS_SEEN = 1 << 16


@dataclass(frozen=True)
class Kdump:
    """What the headers of a kdump say."""

    version: int
    release: str
    """``utsname.release``; empty in dumps that QEMU writes itself."""

    machine: str
    """``utsname.machine``, such as ``x86_64``."""

    compression: str
    """``zlib``, ``lzo``, ``snappy``, ``zstd`` or ``uncompressed``."""

    compression_flag: int
    """What says so in the header, and of a page in its descriptor; 0 for none."""

    incomplete: bool
    """makedumpfile itself marked the dump so, having run out of space."""

    dump_level: int | None
    """The bit mask of page types left out; ``None`` before header version 1."""

    split: bool
    """Whether this is one part of a dump that was split into several files."""

    has_vmcoreinfo: bool | None
    """Whether the dump says where the kernel keeps things; drgn needs it. ``None``
    where the architecture's padding would have to be known to tell."""

    nr_cpus: int
    max_pfn: int | None
    """Page frame numbers in the dump are below it; ``None`` where the architecture's
    padding would have to be known to tell."""

    block_size: int
    bitmap_at: int
    """Where the two page bitmaps begin, in bytes."""

    bitmap_size: int
    """Bytes that the two bitmaps take together."""

    byteorder: str


def parse(read: ReadAt) -> Kdump:
    """Parse the headers of a kdump that is not flattened.

    :raises ValueError: if they are not a kdump's, or make no sense
    :raises EOFError: if the file ends within them
    """
    if not read_exactly(read, 0, len(SIGNATURE)) == SIGNATURE:
        raise ValueError("not a kdump")
    byteorder, word, counts_at = _shape(read)

    version = _unpack(read, byteorder + "i", 8)[0]
    status, block_size, sub_header_blocks, bitmap_blocks = _unpack(
        read, byteorder + "Iiii", counts_at
    )
    (max_pfn,) = _unpack(read, byteorder + "I", counts_at + 16)
    (nr_cpus,) = _unpack(read, byteorder + "i", counts_at + 36)
    if sub_header_blocks < 0 or bitmap_blocks < 0 or nr_cpus < 0:
        raise ValueError("a kdump whose header holds negative sizes")

    # The sub header begins with phys_base, a word, and grew with the version.
    dump_level, split, vmcoreinfo_size = None, 0, None
    if version >= 1:
        (dump_level,) = _unpack(read, byteorder + "i", block_size + word)
    if version >= 2:
        (split,) = _unpack(read, byteorder + "i", block_size + word + 4)
    if version >= 3 and word == 8:
        (vmcoreinfo_size,) = _unpack(read, byteorder + "Q", block_size + 40)
    if version >= 6 and word == 8:
        # 32 bits were not enough for them.
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
        bitmap_at=(1 + sub_header_blocks) * block_size,
        bitmap_size=bitmap_blocks * block_size,
        byteorder=byteorder,
    )


def end(read: ReadAt, header: Kdump) -> int:
    """Return the size the file must have to hold its pages, or come close to it.

    Pages are written in order, so the last descriptors tell, and few are read.

    :raises EOFError: if the file ends within its bitmaps or descriptors
    """
    # struct page_desc: the page's data, size, flags and struct page flags.
    descriptor = struct.Struct(header.byteorder + "QI12x")
    first_at = header.bitmap_at + header.bitmap_size
    # The second bitmap has a bit for each page that was kept.
    half = header.bitmap_size // 2
    count = _bits_set(read, header.bitmap_at + half, half)
    seen = min(count, _DESCRIPTORS_SEEN)
    last_at = first_at + (count - seen) * descriptor.size
    table = read_exactly(read, last_at, seen * descriptor.size)
    return max(
        (offset + size for offset, size in descriptor.iter_unpack(table)),
        default=first_at,
    )


def is_flat_complete(last_bytes: bytes) -> bool:
    """Tell from its last 16 bytes whether a flattened file has its end marker."""
    return last_bytes == _FLAT_END


def unflatten(read: ReadAt) -> ReadAt:
    """Read the front of a flattened kdump as the file it stands for.

    The flattened form is a list of pieces, each with the offset at which it belongs,
    the headers among the first. Only they are put together.

    :raises EOFError: if the file ends within its first pieces
    :raises ValueError: if a piece belongs nowhere
    """
    piece_header = struct.Struct(">qq")
    front = bytearray()
    position = _FLAT_HEADER_SIZE
    for _ in range(_FLAT_PIECES_SEEN):
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
    """Tell byte order, word size, and where ``status`` lies in the header.

    The header does not say. ``block_size`` is a page size of the kernel, so it is a
    power of two in one of the four readings only.
    """
    # After utsname comes a struct timeval, of two words and aligned as one.
    for byteorder in "<>":
        for word, status_at in ((8, 424), (4, 412)):
            (block_size,) = _unpack(read, byteorder + "i", status_at + 4)
            if 1024 <= block_size <= 1 << 16 and block_size.bit_count() == 1:
                return byteorder, word, status_at
    raise ValueError("a kdump whose header has no sound block size")


def _unpack(read: ReadAt, layout: str, offset: int) -> tuple[int, ...]:
    return struct.unpack(layout, read_exactly(read, offset, struct.calcsize(layout)))


def _utsname(read: ReadAt, index: int) -> str:
    """Read a field of ``struct new_utsname``."""
    field = read_exactly(read, _UTSNAME_AT + index * _UTSNAME_FIELD, _UTSNAME_FIELD)
    return field.partition(b"\0")[0].decode("ascii", "backslashreplace")


def _bits_set(read: ReadAt, offset: int, size: int) -> int:
    chunk = 1 << 20
    return sum(
        int.from_bytes(
            read_exactly(read, at, min(chunk, offset + size - at)), "little"
        ).bit_count()
        for at in range(offset, offset + size, chunk)
    )
