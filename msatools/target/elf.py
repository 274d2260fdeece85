# SPDX-License-Identifier: LGPL-2.1-or-later

"""Headers and notes of ELF files, such as the build ID."""

import struct
from collections.abc import Iterator

from msgspec import Struct

from msatools.errors import DamagedDataError
from msatools.target.reading import ReadAt, read_exactly

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
    def end(self) -> int:
        """Minimum size of a file that holds all segments."""
        return max(
            (segment.offset + segment.size for segment in self.segments), default=0
        )


def parse(read: ReadAt) -> Elf:
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

    segment = struct.Struct(byteorder + ("I4xQ8xQQ" if is_64 else "II4xII"))
    section = struct.Struct(byteorder + ("4xI8xQQQ" if is_64 else "4xI4xIII"))
    return Elf(
        is_core=e_type == _ET_CORE,
        is_64=is_64,
        byteorder=byteorder,
        segments=tuple(
            Extent(kind, offset, size, address)
            for kind, offset, address, size in _table(
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
    # The sections go first: the program headers of a separate debug file point to
    # contents that it does not have.
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
) -> Iterator[tuple[int, int, int, int]]:
    if not count:
        return
    if entry_size < layout.size:
        raise DamagedDataError("an ELF file whose header entries are too small")
    if count > _MOST_ENTRIES:
        raise DamagedDataError(f"an ELF file with a table of {count:,} entries")
    data = read_exactly(read, offset, entry_size * count)
    for index in range(count):
        first, second, third, fourth = layout.unpack_from(data, index * entry_size)
        yield first, second, third, fourth


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
