# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where in an ELF dump the memory of the kernel lies."""

import struct
from pathlib import Path

from drgn import Program
from drgn.helpers.linux.mm import follow_phys

Segments = list[tuple[int, int, int]]
"""Physical address, size and file offset of each."""


def load_segments(path: Path) -> Segments:
    """Read an ELF dump's memory segments."""
    with path.open("rb") as file:
        header = file.read(64)
        (table,) = struct.unpack_from("<Q", header, 32)
        entry_size, count = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        entries = [file.read(entry_size) for _ in range(count)]
    fields = (struct.unpack("<IIQQQQQQ", entry) for entry in entries)
    return [(f[4], f[5], f[2]) for f in fields if f[0] == 1]  # PT_LOAD


def file_offset(prog: Program, segments: Segments, address: int) -> int:
    """Find where a dump has the page of a kernel address."""
    physical: int = follow_phys(prog["init_mm"].address_of_(), address).value_()
    for start, size, offset in segments:
        if start <= physical < start + size:
            return offset + physical - start
    raise LookupError(hex(address))
