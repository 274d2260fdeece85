# SPDX-License-Identifier: LGPL-2.1-or-later

"""Contents of files, read from the page cache."""

from collections.abc import Iterator

from msatools.errors import UNREADABLE, DamagedDataError
from msatools.kernel.vmemmap import vmemmap_base
from msatools.kernel.xarray import XArray
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF


class FilePages:
    """Reads the pages of files that are in the page cache of a kernel."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._prog = layout.reader.prog

    def read(self, file: int, offset: int, size: int) -> bytes:
        """
        Read a part of a file.

        :param file: Address of a ``struct file``.
        :raises UNREADABLE: if any page of the part is not in the page cache
        """
        parts = []
        page_size = self._layout.page_size
        for start, length in split_by_page(offset, size, page_size):
            data = self._page(file, *divmod(start, page_size), length)
            if data is None:
                raise DamagedDataError("not in the page cache", start)
            parts.append(data)
        return b"".join(parts)

    def read_around_gaps(self, file: int, offset: int, size: int) -> bytes:
        """Read a part of a file, with zeros in place of missing pages."""
        parts = []
        for start, length in split_by_page(offset, size, self._layout.page_size):
            try:
                parts.append(self.read(file, start, length))
            except UNREADABLE:
                parts.append(bytes(length))
        return b"".join(parts)

    def _page(self, file: int, index: int, offset: int, size: int) -> bytes | None:
        """Read from one page of a file; ``None`` if it is not in the page cache.

        :raises drgn.FaultError: if the page, or a structure that leads to it, cannot
            be read
        """
        layout = self._layout
        mapping = layout.member(file, "file", "f_mapping")
        pages = mapping + layout.offset("address_space", "i_pages")
        # It is 0 for the shadow entry of a page that was reclaimed, too, and for the
        # swap entry of a page of tmpfs.
        head = XArray(layout.reader, pages).load(index)
        if head < KERNEL_HALF:
            return None
        # All slots of a large folio hold its head page since 4101196b19d7 ("mm: page
        # cache: store only head pages in i_pages") (in v5.4); 7b230db3b8d3 ("mm:
        # Introduce struct folio") (in v5.16) gave that a type of its own.
        type_name = "folio" if layout.has("folio", "index") else "page"
        pfn = (head - vmemmap_base(self._prog)) // layout.size("page")
        pfn += index - layout.member(head, type_name, "index")
        return layout.reader.read(pfn * layout.page_size + offset, size, physical=True)


def split_by_page(offset: int, size: int, page_size: int) -> Iterator[tuple[int, int]]:
    """Split a range at page boundaries; yield the start and the size of each part."""
    while size > 0:
        length = min(size, page_size - offset % page_size)
        yield offset, length
        offset += length
        size -= length
