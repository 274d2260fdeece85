# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where a kdump has what, and copies of it that are damaged."""

import struct
from pathlib import Path

import numpy as np

from msatools.target import kdump
from msatools.target.flattened import unflattened
from msatools.target.kdumppages import Pfns
from msatools.target.reading import reader_of

DESCRIPTOR = struct.Struct("<QIIQ")


class Layout:
    """Where a dump has what, found without what is tested."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            read, _ = unflattened(reader_of(file.fileno()), size)
            header = kdump.parse(read)
            half = header.bitmap_size // 2
            bits = np.frombuffer(read(header.bitmap_offset + half, half), np.uint8)
            self.kept = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            self.table_at = header.bitmap_offset + header.bitmap_size
            table = read(self.table_at, len(self.kept) * DESCRIPTOR.size)
            self.descriptors = list(DESCRIPTOR.iter_unpack(table))
        assert header.max_pfn is not None
        self.max_pfn = header.max_pfn

    def left_out(self) -> Pfns:
        """The pages after such as were kept, as far as they were not."""
        return np.setdiff1d(self.kept + 1, [*self.kept, self.max_pfn])[:10]


def copied(path: Path, directory: Path, changes: dict[int, bytes]) -> Path:
    """A copy of a dump with some bytes changed."""
    data = bytearray(path.read_bytes())
    for at, new in changes.items():
        data[at : at + len(new)] = new
    copy = directory / "changed"
    copy.write_bytes(data)
    return copy
