# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find memory and CPU registers in an ELF dump, without msatools."""

import struct
from pathlib import Path

from drgn import Program
from drgn.helpers.linux.mm import follow_phys

Segments = list[tuple[int, int, int]]
"""Physical address, size and file offset of each segment."""

PT_LOAD, PT_NOTE = 1, 4
NT_PRSTATUS = 1
RIP_OFFSET, CS_OFFSET, RSP_OFFSET = (112 + 8 * number for number in (16, 17, 19))
"""Offsets of registers in x86-64's ``struct elf_prstatus``."""


def segments(path: Path, kind: int) -> Segments:
    """Return the segments of one kind in an ELF dump's program headers."""
    with path.open("rb") as file:
        header = file.read(64)
        (table,) = struct.unpack_from("<Q", header, 32)
        entry_size, count = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        entries = [file.read(entry_size) for _ in range(count)]
    fields = (struct.unpack("<IIQQQQQQ", entry) for entry in entries)
    return [(f[4], f[5], f[2]) for f in fields if f[0] == kind]


def load_segments(path: Path) -> Segments:
    """Return an ELF dump's memory segments."""
    return segments(path, PT_LOAD)


def in_user_mode(path: Path) -> list[bool]:
    """Return for each CPU whether it was in user mode, by its cs register."""
    with path.open("rb") as file:
        found = []
        for offset in cpu_registers(path):
            file.seek(offset + CS_OFFSET)
            found.append(file.read(1)[0] & 3 == 3)
        return found


def cpu_registers(path: Path) -> list[int]:
    """Return the file offset of each CPU's ``struct elf_prstatus``."""
    ((_, size, start),) = segments(path, PT_NOTE)
    with path.open("rb") as file:
        file.seek(start)
        notes = file.read(size)
    found, offset = [], 0
    while offset < size:
        name_size, length, kind = struct.unpack_from("<III", notes, offset)
        offset += 12
        name = notes[offset : offset + name_size]
        offset += (name_size + 3) & ~3
        if name == b"CORE\0" and kind == NT_PRSTATUS:
            found.append(start + offset)
        offset += (length + 3) & ~3
    return found


def file_offset(prog: Program, segments: Segments, address: int) -> int:
    """Return the file offset of a kernel address.

    :raises LookupError: if the dump does not contain it
    """
    physical: int = follow_phys(prog["init_mm"].address_of_(), address).value_()
    for start, size, offset in segments:
        if start <= physical < start + size:
            return offset + physical - start
    raise LookupError(hex(address))
