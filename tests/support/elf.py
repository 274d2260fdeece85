# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where in an ELF dump the memory of the kernel lies."""

import struct
from pathlib import Path

from drgn import Program
from drgn.helpers.linux.mm import follow_phys

Segments = list[tuple[int, int, int]]
"""Physical address, size and file offset of each."""

PT_LOAD, PT_NOTE = 1, 4
NT_PRSTATUS = 1
CS_OFFSET = 112 + 17 * 8
"""Of the code segment in the ``struct elf_prstatus`` of x86-64."""


def segments(path: Path, kind: int) -> Segments:
    """Read what an ELF dump's program headers of one kind say."""
    with path.open("rb") as file:
        header = file.read(64)
        (table,) = struct.unpack_from("<Q", header, 32)
        entry_size, count = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        entries = [file.read(entry_size) for _ in range(count)]
    fields = (struct.unpack("<IIQQQQQQ", entry) for entry in entries)
    return [(f[4], f[5], f[2]) for f in fields if f[0] == kind]


def load_segments(path: Path) -> Segments:
    """Read an ELF dump's memory segments."""
    return segments(path, PT_LOAD)


def in_user_mode(path: Path) -> list[bool]:
    """Tell of each CPU whether the code segment in its registers is user mode's."""
    ((_, size, offset),) = segments(path, PT_NOTE)
    with path.open("rb") as file:
        file.seek(offset)
        notes = file.read(size)
    found, at = [], 0
    while at < size:
        name_size, length, kind = struct.unpack_from("<III", notes, at)
        at += 12
        name = notes[at : at + name_size]
        at += (name_size + 3) & ~3
        if name == b"CORE\0" and kind == NT_PRSTATUS:
            found.append(notes[at + CS_OFFSET] & 3 == 3)
        at += (length + 3) & ~3
    return found


def file_offset(prog: Program, segments: Segments, address: int) -> int:
    """Find where a dump has the page of a kernel address."""
    physical: int = follow_phys(prog["init_mm"].address_of_(), address).value_()
    for start, size, offset in segments:
        if start <= physical < start + size:
            return offset + physical - start
    raise LookupError(hex(address))
