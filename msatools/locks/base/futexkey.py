# SPDX-License-Identifier: LGPL-2.1-or-later

"""Keys of futexes: ``union futex_key`` (include/linux/futex.h)."""

from typing import NamedTuple

from msatools.kernel.words import PAGE

_INODE, _MM_SHARED = 1, 2
"""Flags in the offset of a key (``FUT_OFF_INODE``, ``FUT_OFF_MMSHARED``)."""


class FutexKey(NamedTuple):
    """The key of a futex: equal for all waiters of one futex."""

    object: int
    """The ``struct mm_struct`` of an address space, or, newer, its number;
    ``inode.i_sequence`` of a mapped file."""

    word: int
    """Address of the page, or its index in the file."""

    offset: int
    """Offset in the page, and flags that mark a shared futex."""

    page_size: int = PAGE
    """Size of the kernel's pages in bytes."""

    @property
    def of_inode(self) -> bool:
        """Whether the futex is in a file, not at an address."""
        return bool(self.offset & _INODE)

    @property
    def shared(self) -> bool:
        """Whether other processes may use the futex."""
        return bool(self.offset & (_INODE | _MM_SHARED))

    @property
    def address(self) -> int | None:
        """User address of the futex; ``None`` if it is in a file."""
        return None if self.of_inode else self.word + (self.offset & ~_MM_SHARED)

    @property
    def file_offset(self) -> int | None:
        """Offset of the futex in the file; ``None`` if it is in none."""
        if not self.of_inode:
            return None
        return self.word * self.page_size + (self.offset & ~_INODE)

    def moved(self, by: int) -> "FutexKey":
        """Return the key of another futex in the same memory.

        :param by: Bytes from this futex to that one, a multiple of 4.
        """
        flags = self.offset & (_INODE | _MM_SHARED)
        size = self.page_size
        step, unit = (1, size) if self.of_inode else (size, 1)
        pages, offset = divmod(self.word * unit + (self.offset & ~flags) + by, size)
        return self._replace(word=pages * step, offset=offset | flags)

    def pair(self) -> tuple["FutexKey", "FutexKey"]:
        """Return the keys of both futexes in the same aligned 8 bytes, in order."""
        first = self.moved(-(self.offset & 4))
        return first, first.moved(4)
