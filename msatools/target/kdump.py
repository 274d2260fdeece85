# SPDX-License-Identifier: LGPL-2.1-or-later

"""Headers of makedumpfile's kdump-compressed format.

The layouts are those of makedumpfile's ``struct disk_dump_header`` and ``struct
kdump_sub_header``.
"""

import struct

from msgspec import Struct

from msatools.errors import DamagedDataError
from msatools.target.reading import ReadAt, read_exactly

SIGNATURE = b"KDUMP   "

_COMPRESSION = {0x1: "zlib", 0x2: "lzo", 0x4: "snappy", 0x20: "zstd"}
UNCOMPRESSED = "uncompressed"
_INCOMPLETE = 0x8

NAMELESS = "Unknown"
"""The machine in dumps by QEMU (seen in 7.2) for which it has no name."""

# arch/arm64/kernel/vmcore_info.c; no other architecture has it.
_ARM64_LINE = b"NUMBER(kimage_voffset)="
_VMCOREINFO_BYTES = 1 << 16

_MOST_NOTES = 64 << 20
"""Maximum size of each kind of notes in bytes; each of 8,192 CPUs has some hundred."""

_MOST_PAGES = 1 << 36
"""Maximum number of pages that a bitmap covers: 256 TiB with pages of 4 KiB."""

_BLOCK_SIZES = [1 << shift for shift in range(12, 19)]
"""Sizes of pages that libkdumpfile looks for; no kernel has the two largest."""

UTSNAME_FIELD = 65
UTSNAME_OFFSET = 12


class Kdump(Struct, frozen=True):
    """The headers of a kdump."""

    version: int
    release: str
    """``utsname.release``; empty in dumps that QEMU writes itself."""

    machine: str
    """``utsname.machine``, such as ``x86_64``; ``Unknown`` in dumps that QEMU writes
    itself of most architectures."""

    compression: str
    """``zlib``, ``lzo``, ``snappy``, ``zstd`` or ``uncompressed``."""

    compression_flag: int
    """Its flag in the header and in page descriptors; 0 for none."""

    incomplete: bool
    """Whether makedumpfile marked the dump as incomplete, having run out of space."""

    dump_level: int | None
    """Bit mask of the page types left out; ``None`` before header version 1."""

    part: range | None
    """Page frame numbers that the table of descriptors covers, if the dump was split
    into several files; ``None`` if it was not."""

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

    notes: tuple[range, ...]
    """Offsets in the file of VMCOREINFO, all ELF notes, and the list of what was
    erased; empty if the fields' offsets depend on the architecture's padding."""

    byteorder: str
    is_64: bool

    @property
    def table_offset(self) -> int:
        """Offset of the table of page descriptors in the file, in bytes."""
        return self.bitmap_offset + self.bitmap_size


def parse(read: ReadAt) -> Kdump:
    """Parse the headers of a kdump that is not flattened.

    :raises DamagedDataError: if they are not those of a kdump, or contradict themselves
    :raises EOFError: if the file ends within them
    """
    if not read_exactly(read, 0, len(SIGNATURE)) == SIGNATURE:
        raise DamagedDataError("not a kdump")
    byteorder, word, status_offset = _shape(read)

    # libkdumpfile takes a negative one for a later one.
    version = _unpack(read, byteorder + "I", 8)[0]
    status, block_size, sub_header_blocks, bitmap_blocks = _unpack(
        read, byteorder + "Iiii", status_offset
    )
    (max_pfn,) = _unpack(read, byteorder + "I", status_offset + 16)
    (nr_cpus,) = _unpack(read, byteorder + "i", status_offset + 36)
    if sub_header_blocks < 0 or bitmap_blocks < 0 or nr_cpus < 0:
        raise DamagedDataError("a kdump whose header holds negative sizes")

    # The sub header begins with phys_base, one word, and grew with the version.
    dump_level, split, part = None, 0, None
    notes: list[range] = []
    if version >= 1:
        (dump_level,) = _unpack(read, byteorder + "i", block_size + word)
    if version >= 2:
        (split,) = _unpack(read, byteorder + "i", block_size + word + 4)
        if split and word == 8:
            part = range(*_unpack(read, byteorder + "QQ", block_size + 16))
    if version >= 3 and word == 8:
        fields = _unpack(read, byteorder + "6Q", block_size + 32)
        # Until version 4, there was VMCOREINFO only.
        pairs = zip(fields[::2], fields[1::2], strict=True)
        notes = [range(start, start + size) for start, size in pairs]
        notes = notes if version >= 4 else notes[:1]
    if version >= 6 and word == 8:
        # As 32 bits were not enough: start_pfn_64, end_pfn_64 and max_pfn_64.
        start, end, max_pfn = _unpack(read, byteorder + "QQQ", block_size + 80)
        part = range(start, end) if split else None

    if any(each.stop - each.start > _MOST_NOTES for each in notes):
        raise DamagedDataError("a kdump whose notes have an impossible size")
    covered = bitmap_blocks * block_size // 2 * 8
    if covered > _MOST_PAGES:
        raise DamagedDataError("a kdump whose bitmaps have an impossible size")
    if max_pfn > covered:
        # libkdumpfile would take both bitmaps for one.
        raise DamagedDataError("a kdump whose bitmaps are too small for its memory")
    flag = next((bit for bit in _COMPRESSION if status & bit), 0)
    return Kdump(
        version=version,
        release=_utsname(read, 2),
        machine=_utsname(read, 4),
        compression=_COMPRESSION.get(flag, UNCOMPRESSED),
        compression_flag=flag,
        incomplete=bool(status & _INCOMPLETE),
        dump_level=dump_level,
        part=part,
        has_vmcoreinfo=bool(notes[0]) if notes else None,
        nr_cpus=nr_cpus,
        max_pfn=max_pfn if word == 8 else None,
        block_size=block_size,
        bitmap_offset=(1 + sub_header_blocks) * block_size,
        bitmap_size=bitmap_blocks * block_size,
        notes=tuple(notes),
        byteorder=byteorder,
        is_64=word == 8,
    )


def is_nameless_arm64(read: ReadAt, header: Kdump) -> bool:
    """Return whether a kdump is of arm64 and its header does not say so.

    :raises EOFError: if the file ends within VMCOREINFO
    """
    if header.machine != NAMELESS or not header.notes:
        return False
    at = header.notes[0]
    text = read_exactly(read, at.start, min(len(at), _VMCOREINFO_BYTES))
    return _ARM64_LINE in text


def _shape(read: ReadAt) -> tuple[str, int, int]:
    """Find byte order, word size, and the offset of ``status`` in the header.

    The header does not store them. ``block_size`` is the kernel's page size, which is a
    sound power of two with only one of the four combinations. If it is with two,
    libkdumpfile may take the other one, and what is checked here is not what it reads.
    """
    found = []
    # utsname is followed by a struct timeval: two words, aligned to a word.
    for byteorder in "<>":
        for word, status in ((8, 424), (4, 412)):
            (block_size,) = _unpack(read, byteorder + "i", status + 4)
            if block_size in _BLOCK_SIZES:
                found.append((byteorder, word, status))
    if len(found) != 1:
        count = "two block sizes" if found else "no sound block size"
        raise DamagedDataError(f"a kdump whose header has {count}")
    return found[0]


def _unpack(read: ReadAt, layout: str, offset: int) -> tuple[int, ...]:
    return struct.unpack(layout, read_exactly(read, offset, struct.calcsize(layout)))


def _utsname(read: ReadAt, index: int) -> str:
    """Read a field of ``struct new_utsname``."""
    field = read_exactly(read, UTSNAME_OFFSET + index * UTSNAME_FIELD, UTSNAME_FIELD)
    return field.partition(b"\0")[0].decode("ascii", "backslashreplace")
