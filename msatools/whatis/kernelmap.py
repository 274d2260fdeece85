# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where the kernel maps memory: the direct map, and its own image."""

from functools import cached_property

import drgn

from msatools.errors import LOST, MissingError
from msatools.memory.pages.classes import CLASSES, PageClass
from msatools.target.arch import arch_of
from msatools.target.arch.model import Piece
from msatools.tasks.text import kernel_symbol
from msatools.whatis.model import Page

_NOT_FREED = tuple(
    CLASSES[code]
    for code in (
        PageClass.RESERVED,
        PageClass.EXCLUDED,
        PageClass.UNREADABLE,
        PageClass.HWPOISON,
    )
)
_MAX_ADDRESS = (1 << 64) - 1


class KernelMap:
    """Converts between addresses and physical memory."""

    def __init__(self, prog: drgn.Program) -> None:
        self._prog = prog

    def direct(self, physical: int) -> int | None:
        """Return the address of physical memory in the direct map."""
        piece = self._direct_map
        if piece is None or not 0 <= physical - piece.physical < piece.size:
            return None
        return piece.start + physical - piece.physical

    def is_direct(self, address: int) -> bool:
        """Return whether an address is in the direct map: slabs are only there."""
        piece = self._direct_map
        return piece is not None and 0 <= address - piece.start < piece.size

    @cached_property
    def _direct_map(self) -> Piece | None:
        try:
            return arch_of(self._prog).direct_map(self._prog)
        except LOST:
            return None

    def in_image(self, physical: int) -> int | None:
        """Return the address in the kernel's image of physical memory that it is in."""
        moved = arch_of(self._prog).image_offset(self._prog)
        if moved is None:
            return None
        address = (physical + moved) & _MAX_ADDRESS
        start, end = self.image
        return address if start <= address < end else None

    @cached_property
    def image(self) -> tuple[int, int]:
        """Start and end of the kernel's image; 0 if unknown."""
        return self._between("_text", "_end")

    def _between(self, *labels: str) -> tuple[int, int]:
        """Return the addresses of two of the linker's labels; 0 if unknown."""
        try:
            start, end = (kernel_symbol(self._prog, name) for name in labels)
        except MissingError:
            return 0, 0
        return start, end

    def in_init(self, address: int) -> bool:
        """Return whether an address is in the image's part for boot, freed after it."""
        start, end = self._between("__init_begin", "__init_end")
        return start <= address < end


def is_freed(page: Page | None) -> bool:
    """Return whether a page of the kernel's image was freed after boot.

    What stays of the image is reserved: free_kernel_image_pages(), free_initmem().
    """
    return page is not None and page.page_class not in _NOT_FREED
