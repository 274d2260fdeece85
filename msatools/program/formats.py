# SPDX-License-Identifier: LGPL-2.1-or-later

"""File formats of dumps: ELF, kdump-compressed, its split parts, flattened.

A new format of a dump is described here, and recognized in
:mod:`msatools.program.dumpfile`; one of plain memory belongs into
:mod:`msatools.program.raw_formats`. Parsers take functions that read, not files.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from msgspec import Struct

from msatools.errors import DamagedDataError

# --- Reads for parsers of file formats, which take functions instead of files.


ReadAt = Callable[[int, int], bytes]
"""``read(offset, size)`` returns bytes, fewer at the end of the file."""


_MAX_OFFSET = (1 << 63) - 1

_LARGEST_TABLE = 1 << 30
"""Maximum size of a table in a sound file, in bytes."""


def reader_of(fd: int) -> ReadAt:
    """Return a function that reads from an open file without moving its position."""

    def read(offset: int, size: int) -> bytes:
        # No file is larger, and the system call fails for larger offsets.
        return os.pread(fd, size, offset) if offset <= _MAX_OFFSET else b""

    return read


@contextmanager
def opened(path: str) -> Iterator[ReadAt]:
    """Open a file, and yield the function that reads from it.

    :raises OSError: if it cannot be opened
    """
    with open(path, "rb", buffering=0) as file:
        yield reader_of(file.fileno())


def read_exactly(read: ReadAt, offset: int, size: int) -> bytes:
    """Read exactly *size* bytes.

    :raises EOFError: if the file ends before
    :raises DamagedDataError: if *size* is too large for a table of a sound file
    """
    if not 0 <= size <= _LARGEST_TABLE:
        raise DamagedDataError(f"a table of {size} bytes")
    data = read(offset, size)
    if len(data) < size:
        raise EOFError(f"the file ends before byte {offset + size}")
    return data


# --- Headers and notes of ELF files, such as the build ID.


MAGIC = b"\x7fELF"

_ET_CORE = 4
_PN_XNUM = 0xFFFF
_PT_LOAD = 1
_PT_NOTE = 4
_SHT_NOTE = 7
_SHT_NOBITS = 8
_NT_GNU_BUILD_ID = 3

_MOST_ENTRIES = 1 << 20
"""Maximum number of segments or sections: a dump has a segment for each range of
memory, or for each run of pages that were kept."""

_MOST_NOTES = 64 << 20
"""Maximum size of all notes in bytes; each of 8,192 CPUs has some hundred."""


class Extent(Struct, frozen=True):
    """The parts of a program header or section header that are used here."""

    kind: int
    """``p_type`` or ``sh_type``."""

    offset: int
    """Offset of its contents in the file, in bytes."""

    size: int
    """Size of its contents in the file, in bytes."""

    address: int = 0
    """``p_paddr``, or ``sh_addr``."""

    memory: int = 0
    """Size of a segment in memory, in bytes."""


class Elf(Struct, frozen=True):
    """The headers of an ELF file."""

    is_core: bool
    is_64: bool
    byteorder: str
    """``<`` or ``>``, as in formats of :mod:`struct`."""

    segments: tuple[Extent, ...]
    sections: tuple[Extent, ...]

    @property
    def loads(self) -> Iterator[Extent]:
        """The segments that have memory."""
        return (each for each in self.segments if each.kind == _PT_LOAD and each.size)

    @property
    def has_physical(self) -> bool:
        """Whether a segment has a physical address: programs have none."""
        return any(each.address for each in self.loads)

    @property
    def is_filtered(self) -> bool:
        """Whether memory of a segment was left out of the file."""
        return any(
            each.kind == _PT_LOAD and each.memory > each.size for each in self.segments
        )

    @property
    def end(self) -> int:
        """Minimum size of a file that holds all segments."""
        return max(
            (segment.offset + segment.size for segment in self.segments), default=0
        )


def parse_elf(read: ReadAt) -> Elf:
    """Parse the headers.

    The layouts are those of ``Elf32_*`` and ``Elf64_*`` in elf.h.

    :raises DamagedDataError: if this is not an ELF file
    :raises EOFError: if the file ends within its headers
    """
    ident = read_exactly(read, 0, 16)
    if not ident.startswith(MAGIC):
        raise DamagedDataError("not an ELF file")
    try:
        is_64 = {1: False, 2: True}[ident[4]]
        byteorder = {1: "<", 2: ">"}[ident[5]]
    except KeyError:
        raise DamagedDataError(
            "an ELF file of an unknown class or byte order"
        ) from None

    header = struct.Struct(byteorder + ("HHIQQQIHHHHHH" if is_64 else "HHIIIIIHHHHHH"))
    fields = header.unpack(read_exactly(read, 16, header.size))
    e_type, _, _, _, phoff, shoff, _, _, phentsize, phnum, shentsize, shnum, _ = fields

    if shoff and (shnum == 0 or phnum == _PN_XNUM):
        # Counts that do not fit into the header are in the first section header.
        count = struct.Struct(byteorder + ("32xQ4xI" if is_64 else "20xI4xI"))
        many_sections, many_segments = count.unpack(
            read_exactly(read, shoff, count.size)
        )
        shnum = shnum or many_sections
        phnum = many_segments if phnum == _PN_XNUM else phnum

    segment = struct.Struct(byteorder + ("I4xQ8xQQQ" if is_64 else "II4xIII"))
    section = struct.Struct(byteorder + ("4xI8xQQQ" if is_64 else "4xI4xIII"))
    return Elf(
        is_core=e_type == _ET_CORE,
        is_64=is_64,
        byteorder=byteorder,
        segments=tuple(
            Extent(kind, offset, size, address, memory)
            for kind, offset, address, size, memory in _table(
                read, phoff, phentsize, phnum, segment
            )
        ),
        sections=tuple(
            Extent(kind, offset, 0 if kind == _SHT_NOBITS else size, address)
            for kind, address, offset, size in _table(
                read, shoff, shentsize, shnum, section
            )
        ),
    )


class ElfNote(Struct, frozen=True):
    """An ELF note."""

    name: bytes
    kind: int
    """``n_type``, whose meaning depends on the name."""

    description: bytes


def notes(read: ReadAt, elf: Elf) -> Iterator[ElfNote]:
    """Yield the notes of an ELF file.

    :raises EOFError: if the file ends within them
    :raises DamagedDataError: if they are too large for notes
    """
    # The sections go first, for build_id(): the program headers of a separate debug
    # file point to contents that this file lacks.
    extents = [section for section in elf.sections if section.kind == _SHT_NOTE]
    extents += [segment for segment in elf.segments if segment.kind == _PT_NOTE]
    size = sum(extent.size for extent in extents)
    if size > _MOST_NOTES:
        raise DamagedDataError(f"an ELF file with notes of {size:,} bytes")
    for extent in extents:
        data = read_exactly(read, extent.offset, extent.size)
        yield from _parse_notes(data, elf.byteorder)


def build_id(read: ReadAt, elf: Elf) -> bytes | None:
    """Return the GNU build ID; ``None`` if not found.

    :raises EOFError: if the file ends within its notes
    """
    for note in notes(read, elf):
        if note.name == b"GNU" and note.kind == _NT_GNU_BUILD_ID:
            return note.description
    return None


def _table(
    read: ReadAt, offset: int, entry_size: int, count: int, layout: struct.Struct
) -> Iterator[tuple[int, ...]]:
    if not count:
        return
    if entry_size < layout.size:
        raise DamagedDataError("an ELF file whose header entries are too small")
    if count > _MOST_ENTRIES:
        raise DamagedDataError(f"an ELF file with a table of {count:,} entries")
    data = read_exactly(read, offset, entry_size * count)
    for index in range(count):
        yield layout.unpack_from(data, index * entry_size)


def _parse_notes(data: bytes, byteorder: str) -> Iterator[ElfNote]:
    header = struct.Struct(byteorder + "III")
    position = 0
    while position + header.size <= len(data):
        name_size, size, kind = header.unpack_from(data, position)
        name_start = position + header.size
        start = name_start + _aligned(name_size)
        position = start + _aligned(size)
        name = data[name_start : name_start + name_size].rstrip(b"\0")
        yield ElfNote(name, kind, data[start : start + size])


def _aligned(size: int) -> int:
    return (size + 3) & ~3


# --- Headers of makedumpfile's kdump-compressed format.
#
# The layouts are those of makedumpfile's struct disk_dump_header and struct
# kdump_sub_header.


KDUMP_SIGNATURE = b"KDUMP   "

_COMPRESSION = {0x1: "zlib", 0x2: "lzo", 0x4: "snappy", 0x20: "zstd"}
UNCOMPRESSED = "uncompressed"
_INCOMPLETE = 0x8

NAMELESS = "Unknown"
"""The machine's name in dumps of machines for which QEMU (seen in 7.2) has none."""

# A line of VMCOREINFO that only arm64 has (arch/arm64/kernel/vmcore_info.c).
_ARM64_LINE = b"NUMBER(kimage_voffset)="
_VMCOREINFO_BYTES = 1 << 16

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
    """``utsname.machine``, such as ``x86_64``; for most architectures ``Unknown`` in
    dumps that QEMU writes itself."""

    compression: str
    """``zlib``, ``lzo``, ``snappy``, ``zstd`` or ``uncompressed``."""

    compression_flag: int
    """Flag of the compression in the header and in page descriptors; 0 for none."""

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


def parse_kdump(read: ReadAt) -> Kdump:
    """Parse the headers of a kdump that is not flattened.

    :raises DamagedDataError: if they are not those of a kdump, or contradict themselves
    :raises EOFError: if the file ends within them
    """
    if not read_exactly(read, 0, len(KDUMP_SIGNATURE)) == KDUMP_SIGNATURE:
        raise DamagedDataError("not a kdump")
    byteorder, word, status_offset = _shape(read)

    # Unsigned, as libkdumpfile takes a negative version for a later one.
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
        # Version 3 has VMCOREINFO only.
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
        release=_kdump_utsname(read, 2),
        machine=_kdump_utsname(read, 4),
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
    """Return whether a kdump is of arm64, but its header lacks the machine's name.

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
    sound power of two with only one of the four combinations. A header that fits two
    is refused, as libkdumpfile may choose the one that was not checked here.
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


def _kdump_utsname(read: ReadAt, index: int) -> str:
    """Read a field of ``struct new_utsname``."""
    field = read_exactly(read, UTSNAME_OFFSET + index * UTSNAME_FIELD, UTSNAME_FIELD)
    return field.partition(b"\0")[0].decode("ascii", "backslashreplace")


# --- The parts of a kdump that makedumpfile --split wrote.
#
# Each has the headers and bitmaps of the whole, but the pages of one range of page
# frames only. The parts' headers differ only in that range's ends, in the sub header.


_MOST_FILES = 4096
"""Maximum number of files in a directory that are checked to be a part."""

SUB_HEADER_BYTES = 104
_COMMON = ((0, 16), (32, 80), (96, SUB_HEADER_BYTES))
"""Ranges of ``struct kdump_sub_header`` that are the same in all parts: between them
lie start_pfn and end_pfn, of 32 bits and then of 64."""


class DumpPart(Struct, frozen=True):
    """One file of a split dump."""

    path: str
    pfns: range
    """Page frame numbers of its pages; some parts of a small dump have none."""


def find_parts(path: str, header: Kdump) -> list[DumpPart]:
    """Find all parts of a split dump in the directory of one of them.

    :param path: Path of that part.
    :param header: Its headers.
    :return: The parts that have pages, by page frame.
    """
    own = _head(path, header.block_size)
    directory = os.path.dirname(path)
    names = (entry.path for entry in _files(directory or "."))
    parts: dict[range, DumpPart] = {}
    for name in (path, *names):
        with suppress(OSError, EOFError, DamagedDataError):
            if _head(name, header.block_size) != own:
                continue
            with opened(name) as read:
                pfns = parse_kdump(read).part
            if pfns:
                # There may be two copies of a part.
                parts.setdefault(pfns, DumpPart(name, pfns))
    return sorted(parts.values(), key=lambda part: part.pfns.start)


def missing(parts: Sequence[DumpPart], header: Kdump) -> range | None:
    """Return the first page frames that no part has; ``None`` if all are there."""
    end = 0
    for part in parts:
        if part.pfns.start > end:
            return range(end, part.pfns.start)
        end = max(end, part.pfns.stop)
    last = header.max_pfn or 0
    return range(end, last) if end < last else None


def _files(directory: str) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(directory) as entries:
        for _, entry in zip(range(_MOST_FILES), entries, strict=False):
            if entry.is_file():
                yield entry


def _head(path: str, block_size: int) -> bytes:
    """Return the bytes of a dump's headers that are the same in all its parts."""
    with opened(path) as read:
        return read(0, block_size) + common(read(block_size, SUB_HEADER_BYTES))


def common(sub_header: bytes) -> bytes:
    """Return the bytes of a ``struct kdump_sub_header`` that all parts share."""
    return b"".join(sub_header[first:last] for first, last in _COMMON)


# --- Reads of a flattened kdump as if it were not flattened.
#
# makedumpfile writes this form to a pipe: a list of pieces, each with its offset in the
# kdump (struct makedumpfile_data_header, big-endian). A later piece replaces an earlier
# one where both have the same offsets.


FLATTENED_SIGNATURE = b"makedumpfile\0\0\0\0"

_HEADER_SIZE = 4096
_PIECE_HEADER = struct.Struct(">qq")
END = b"\xff" * _PIECE_HEADER.size

_NO_OFFSET = 1 << 63
"""Lowest offset that no file reaches."""

_MAX_ODD_PIECES = 1 << 16
"""Maximum number of pieces that are small, or come after pieces with higher offsets: a
file with very many would take hours to open, even longer with libkdumpfile."""

_SMALL = 4096
"""Minimum bytes of a piece that is not small: makedumpfile writes headers and bitmaps
by the block, and pages by the MiB."""


_Piece = tuple[int, int, int]
"""Start and end offset in the kdump, and the number to add to an offset for the
position in the file."""


class FlatFile:
    """A flattened kdump, read by the offsets of the kdump."""

    def __init__(self, read: ReadAt) -> None:
        """Find all pieces, to the end of the file.

        :raises DamagedDataError: if the offset or size of a piece is impossible
        """
        self._read_file = read
        # Disjoint _Pieces, ascending, as three columns.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._shifts: list[int] = []
        self.is_cut = False
        """Whether the file ends within a piece. Whole pieces can be missing, too."""

        self.is_complete = self._find_pieces()
        """Whether the list of pieces ends with its end mark (:data:`END`)."""

    @property
    def size(self) -> int:
        """Size of the kdump in bytes."""
        return self._ends[-1] if self._ends else 0

    def read(self, offset: int, size: int) -> bytes:
        """Read from the kdump; fewer bytes where it has a hole."""
        parts = []
        end = offset + size
        index = max(bisect_right(self._starts, offset) - 1, 0)
        while offset < end and index < len(self._starts):
            if not self._starts[index] <= offset < self._ends[index]:
                break
            count = min(end, self._ends[index]) - offset
            part = self._read_file(offset + self._shifts[index], count)
            parts.append(part)
            if len(part) < count:
                break
            offset += count
            index += 1
        return b"".join(parts)

    def read_filled(self, offset: int, size: int) -> bytes:
        """Read from the kdump, with zeros where it has a hole."""
        parts = []
        end = min(offset + size, self.size)
        while offset < end:
            part = self.read(offset, end - offset)
            if not part:
                index = bisect_right(self._starts, offset)
                stop = self._starts[index] if index < len(self._starts) else end
                part = bytes(min(stop, end) - offset)
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def is_whole(self, start: int, end: int) -> bool:
        """Return whether there is no hole from *start* up to *end*."""
        first = bisect_right(self._starts, start) - 1
        last = bisect_right(self._starts, end - 1) - 1
        if first < 0 or self._ends[first] < start or self._ends[last] < end:
            return False
        return self._ends[first:last] == self._starts[first + 1 : last + 1]

    def _find_pieces(self) -> bool:
        position = _HEADER_SIZE
        odd = 0
        # Inserted once the next header is read: then the file has all of this piece.
        last: _Piece | None = None
        while True:
            try:
                header = read_exactly(self._read_file, position, _PIECE_HEADER.size)
            except EOFError:
                if last is not None:
                    self._insert_rest(*last)
                return False
            if last is not None:
                self._insert(*last)
            if header == END:
                return True
            offset, size = _PIECE_HEADER.unpack(header)
            odd += size < _SMALL or offset < self.size
            position += _PIECE_HEADER.size
            is_sound = offset >= 0 and 0 < size < _NO_OFFSET - max(offset, position)
            if not is_sound or odd > _MAX_ODD_PIECES:
                raise DamagedDataError("a flattened kdump with an impossible piece")
            last = (offset, offset + size, position - offset)
            position += size

    def _insert_rest(self, start: int, end: int, shift: int) -> None:
        """Add the part of the last piece that the file has."""
        low, high = start, end
        while low < high:
            middle = (low + high) // 2
            if self._read_file(middle + shift, 1):
                low = middle + 1
            else:
                high = middle
        self.is_cut = low < end
        if low > start:
            self._insert(start, low, shift)

    def _insert(self, start: int, end: int, shift: int) -> None:
        """Add a range, which replaces earlier ones where they overlap."""
        first = bisect_right(self._ends, start)
        last = bisect_right(self._starts, end - 1)
        pieces = [(start, end, shift)]
        if first < last:
            # The remaining parts of the ranges at either edge.
            before = (self._starts[first], start, self._shifts[first])
            after = (end, self._ends[last - 1], self._shifts[last - 1])
            pieces = [
                piece for piece in (before, *pieces, after) if piece[0] < piece[1]
            ]
        starts, ends, shifts = zip(*pieces, strict=True)
        self._starts[first:last] = starts
        self._ends[first:last] = ends
        self._shifts[first:last] = shifts


class Unflattened(NamedTuple):
    """Functions that read a kdump by its offsets, flattened or not."""

    tables: ReadAt
    """Reads headers, bitmaps and descriptors. If a flattened kdump lacks its end,
    missing bytes are zeros, which are no valid descriptor."""

    pages: ReadAt
    """Reads pages; fewer bytes where the kdump has a hole."""

    size: int


def unflattened(read: ReadAt, size: int) -> Unflattened:
    """Return the functions that read a kdump, flattened or not.

    :param read: Reads the file.
    :param size: Size of the file in bytes.
    :raises DamagedDataError: if the file is flattened, and a piece is impossible
    """
    if read(0, len(FLATTENED_SIGNATURE)) != FLATTENED_SIGNATURE:
        return Unflattened(read, read, size)
    flat = FlatFile(read)
    tables = flat.read if flat.is_complete else flat.read_filled
    return Unflattened(tables, flat.read, flat.size)


# --- The headers of a flattened kdump without its end, as a file of their own.
#
# libkdumpfile opens no flattened kdump that lacks its end. Headers and bitmaps are not
# lost, as makedumpfile writes them first.


_AT_ONCE = 1 << 20

_copied: dict[str, int] = {}
"""Maps the path of a dump to the descriptor of the file with its headers."""


def copy(path: str) -> None:
    """Copy the headers of a dump, if it is a flattened kdump without its end.

    It must be called before a sandbox forbids writes. Errors are ignored here: opening
    the dump reports them.
    """
    # Opening a FIFO without a writer would block.
    if not os.path.isfile(path):
        return
    with suppress(OSError, EOFError, DamagedDataError), opened(path) as read:
        ends_well = read(os.path.getsize(path) - len(END), len(END)) == END
        if read(0, len(FLATTENED_SIGNATURE)) == FLATTENED_SIGNATURE and not ends_well:
            flat = FlatFile(read)
            if not flat.is_complete:
                _copied[path] = _copied_of(flat)


def take(path: str) -> int:
    """Return the descriptor of a file with a dump's headers; the caller closes it.

    :raises DamagedDataError: if the headers contradict themselves
    :raises EOFError: if the dump ends within its headers or bitmaps
    :raises OSError: if the dump cannot be read, or the copy not be written
    """
    headers = _copied.pop(path, None)
    if headers is not None:
        return headers
    with opened(path) as read:
        return _copied_of(FlatFile(read))


def _copied_of(flat: FlatFile) -> int:
    header = parse_kdump(flat.read_filled)
    if not flat.is_whole(header.bitmap_offset, header.table_offset):
        raise EOFError("the file ends before its pages can be found")
    headers = os.memfd_create("headers of a kdump", os.MFD_CLOEXEC)
    try:
        # Ranges that are not written stay holes; the file has all of the bitmaps.
        os.ftruncate(headers, flat.size)
        for span in (
            range(2 * header.block_size),
            *header.notes,
            range(header.bitmap_offset, header.table_offset),
        ):
            for start in range(span.start, min(span.stop, flat.size), _AT_ONCE):
                size = min(_AT_ONCE, span.stop - start)
                os.pwrite(headers, flat.read_filled(start, size), start)
        if not header.release and header.machine != NAMELESS:
            os.pwrite(headers, _flat_utsname(header), UTSNAME_OFFSET)
    except BaseException:
        os.close(headers)
        raise
    return headers


def _flat_utsname(header: Kdump) -> bytes:
    """Return the fields of utsname that QEMU leaves blank, all but the machine.

    If they are blank, libkdumpfile searches all pages for them. The values do not
    matter, as the kernel's release comes from VMCOREINFO.
    """
    fields = ("Linux", "(none)", "(unknown)", "(unknown)", header.machine, "(none)")
    return b"".join(field.encode().ljust(UTSNAME_FIELD, b"\0") for field in fields)
