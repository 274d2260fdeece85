# SPDX-License-Identifier: LGPL-2.1-or-later

"""Contents of files from the page cache; no file is opened."""

from collections.abc import Iterator

import drgn
from drgn.helpers.linux.xarray import xa_load

from msatools.kernel.vmemmap import vmemmap_base
from msatools.locks.base.struct_reader import Layout
from msatools.target.addresses import KERNEL_HALF

PAGE = 4096


class FilePages:
    """Reads files of one kernel, as far as they are in its page cache."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._prog = layout.reader.prog

    def read(self, file: int, offset: int, size: int) -> bytes:
        """
        Read a part of the file that the ``struct file`` at an address has open.

        :raises drgn.FaultError: if any of it is not there
        """
        parts = []
        for at, part in _pieces(offset, size):
            data = self._page(file, at // PAGE, at % PAGE, part)
            if data is None:
                raise drgn.FaultError("not in the page cache", at)
            parts.append(data)
        return b"".join(parts)

    def read_around_gaps(self, file: int, offset: int, size: int) -> bytes:
        """Read a part of a file, with zeros for what is not there."""
        parts = []
        for at, part in _pieces(offset, size):
            try:
                parts.append(self.read(file, at, part))
            except drgn.FaultError:
                parts.append(bytes(part))
        return b"".join(parts)

    def _page(self, file: int, index: int, offset: int, size: int) -> bytes | None:
        """Read from one page of a file; ``None`` if it is not there.

        :raises drgn.FaultError: if what leads to it is not in the dump, or the page
        """
        mapping = self._layout.member(file, "file", "f_mapping")
        pages = drgn.Object(self._prog, "struct address_space", address=mapping).i_pages
        folio = int(xa_load(pages.address_of_(), index).value_())
        # Of a page that was swapped out or reclaimed a number is left.
        if folio < KERNEL_HALF or folio & 0b11:
            return None
        # "mm: Introduce struct folio" (in v5.16); before, an entry is the page itself.
        whole = self._layout.has("folio", "index")
        number = (folio - vmemmap_base(self._prog)) // self._layout.size("page")
        if whole:
            number += index - self._layout.member(folio, "folio", "index")
        return self._layout.reader.read(number * PAGE + offset, size, physical=True)


def _pieces(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a part of a file by its pages: offsets and sizes."""
    while size > 0:
        part = min(size, PAGE - offset % PAGE)
        yield offset, part
        offset += part
        size -= part
