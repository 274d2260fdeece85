# SPDX-License-Identifier: LGPL-2.1-or-later

"""Find the parts of a kdump, and make damaged copies of it."""

import struct
from pathlib import Path

import numpy as np

from fixtures.lab import sparse
from msatools.program import formats
from msatools.program.formats import reader_of, unflattened
from msatools.program.kdump_pages import Pfns

DESCRIPTOR = struct.Struct("<QIIQ")


class Layout:
    """The pages, descriptors and offsets of a dump, read without kdumppages."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            read = unflattened(reader_of(file.fileno()), size).tables
            header = formats.parse_kdump(read)
            half = header.bitmap_size // 2
            bits = np.frombuffer(read(header.bitmap_offset + half, half), np.uint8)
            self.kept = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            self.table_offset = header.bitmap_offset + header.bitmap_size
            table = read(self.table_offset, len(self.kept) * DESCRIPTOR.size)
            self.descriptors = list(DESCRIPTOR.iter_unpack(table))
        assert header.max_pfn is not None
        self.max_pfn = header.max_pfn

    def left_out(self) -> Pfns:
        """Return up to ten pfns that are not in the dump, each after one that is."""
        return np.setdiff1d(self.kept + 1, [*self.kept, self.max_pfn])[:10]


def copied(path: Path, directory: Path, changes: dict[int, bytes]) -> Path:
    """Return a copy of a dump with some bytes changed.

    :param changes: file offset -> new bytes
    """
    copy = directory / "changed"
    sparse.copy_file(path, copy)
    with copy.open("r+b") as file:
        for offset, new in changes.items():
            file.seek(offset)
            file.write(new)
    return copy
