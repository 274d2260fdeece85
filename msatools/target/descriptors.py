# SPDX-License-Identifier: LGPL-2.1-or-later

"""The table of page descriptors of a kdump, and a check of all of it.

The second of a kdump's bitmaps has a bit for each page that was kept. The table has a
``struct page_desc`` (makedumpfile's diskdump_mod.h) for each such bit, in order.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msatools.target.kdump import Kdump
from msatools.target.reading import ReadAt, read_exactly

DESCRIPTOR_BYTES = 24

_AT_ONCE = 1 << 14
"""Number of descriptors to check at a time: more do not fit into a CPU's cache."""

_BITMAP_READ = 1 << 20

_FLAGS = 0x1 | 0x2 | 0x4 | 0x20
"""DUMP_DH_COMPRESSED_*: the method by which a page is compressed; none for stored."""


class DescriptorCheck(NamedTuple):
    """What the descriptors of a dump say of its file."""

    bad: int
    """Pages that cannot be read: not in the file, or of an impossible size."""

    is_cut: bool
    """Whether the file ends within a page, or where one should begin."""


def check_descriptors(read: ReadAt, header: Kdump, size: int) -> DescriptorCheck:
    """DescriptorCheck all descriptors against the size of the file.

    libkdumpfile trusts them: it maps the file, and a page that is not in it ends the
    process by SIGBUS, or reads as zeros.

    :param size: Size of the kdump in bytes.
    :raises EOFError: if the file ends within its bitmaps or descriptors
    """
    count = kept_pages(read, header)
    data = header.table_offset + count * DESCRIPTOR_BYTES
    if data > size:
        raise EOFError(f"the file ends before byte {data}")
    bad, is_cut = 0, False
    for start in range(header.table_offset, data, _AT_ONCE * DESCRIPTOR_BYTES):
        table = read(start, min(_AT_ONCE * DESCRIPTOR_BYTES, data - start))
        rows = _Rows(table, header.byteorder)
        if not rows.are_good(data, size, header.block_size):
            bad += int(np.count_nonzero(~rows.good(data, size, header.block_size)))
            is_cut = is_cut or rows.is_cut(size, header.block_size)
    return DescriptorCheck(bad, is_cut)


def kept_pages(read: ReadAt, header: Kdump) -> int:
    """Count the descriptors of a dump.

    :raises EOFError: if the file ends within its bitmaps
    """
    half = header.bitmap_size // 2
    first, last = 0, half * 8
    if header.part is not None:
        first, last = min(header.part.start, last), min(header.part.stop, last)
    return sum(
        _bits(read, header.bitmap_offset + half, pfn, min(pfn + _BITMAP_READ, last))
        for pfn in range(first, last, _BITMAP_READ)
    )


def _bits(read: ReadAt, offset: int, first: int, last: int) -> int:
    """Count the bits of a bitmap from one to another."""
    start = first // 8
    data = read_exactly(read, offset + start, (last + 7) // 8 - start)
    bits = int.from_bytes(data, "little") >> first % 8
    return (bits & ((1 << (last - first)) - 1)).bit_count()


class _Rows:
    """Some descriptors."""

    def __init__(self, table: bytes, byteorder: str) -> None:
        fields = np.frombuffer(
            table,
            [
                ("offset", byteorder + "u8"),
                ("size", byteorder + "u4"),
                ("flags", byteorder + "u4"),
                ("page_flags", byteorder + "u8"),
            ],
        )
        self._offsets: npt.NDArray[np.uint64] = fields["offset"]
        self._sizes: npt.NDArray[np.uint32] = fields["size"]
        self._flags: npt.NDArray[np.uint32] = fields["flags"]

    def are_good(self, data: int, size: int, page_size: int) -> bool:
        """Return whether all descriptors are certainly good, at the least cost."""
        sizes = self._sizes
        return bool(
            int(self._offsets.min()) >= data
            and int(self._offsets.max()) <= size - page_size
            and int(sizes.min()) > 0
            and int(sizes.max()) <= page_size
            and not int(np.bitwise_or.reduce(self._flags)) & ~_FLAGS
        )

    def good(self, data: int, size: int, page_size: int) -> npt.NDArray[np.bool_]:
        """Return which pages can be read.

        :param data: Offset of the first byte that can belong to a page.
        :param size: Size of the file.
        """
        offsets, sizes = self._offsets, self._sizes
        # A compressed page is never longer than the page.
        has_size = (sizes > 0) & (sizes <= page_size)
        is_inside = (offsets >= data) & (offsets <= size) & (sizes <= size - offsets)
        is_known: npt.NDArray[np.bool_] = (self._flags & ~np.uint32(_FLAGS)) == 0
        good: npt.NDArray[np.bool_] = has_size & is_inside & is_known
        return good

    def is_cut(self, size: int, page_size: int) -> bool:
        """Return whether one of these pages is where the file ends."""
        sizes = self._sizes
        at_end = (self._offsets <= size) & (self._offsets + sizes > size)
        return bool((at_end & (sizes > 0) & (sizes <= page_size)).any())
