# SPDX-License-Identifier: LGPL-2.1-or-later

"""Keys of futexes: ``union futex_key`` (include/linux/futex.h)."""

from typing import NamedTuple

_INODE, _MM_SHARED = 1, 2
"""Bits of a key's offset (``FUT_OFF_INODE``, ``FUT_OFF_MMSHARED``)."""

_PAGE = 4096


class FutexKey(NamedTuple):
    """The key of a futex: equal for all waiters of one futex."""

    object: int
    """Of an address space its ``struct mm_struct`` (or, newer, its number); of a
    mapped file ``inode.i_sequence``."""

    word: int
    """The page's address, or its number in the file."""

    offset: int
    """Within the page, and how it is shared."""

    @property
    def of_inode(self) -> bool:
        """Whether the key is that of a file, not of an address."""
        return bool(self.offset & _INODE)

    @property
    def shared(self) -> bool:
        """Whether other processes may use it."""
        return bool(self.offset & (_INODE | _MM_SHARED))

    @property
    def address(self) -> int | None:
        """Where it is in the address space; ``None`` for a place in a file."""
        return None if self.of_inode else self.word + (self.offset & ~_MM_SHARED)

    @property
    def file_offset(self) -> int | None:
        """Where it is in the file; ``None`` if it is in none."""
        return self.word * _PAGE + (self.offset & ~_INODE) if self.of_inode else None

    def moved(self, by: int) -> "FutexKey":
        """Return the key of another futex of the same memory.

        :param by: How many bytes behind this one it is, a multiple of 4.
        """
        flags = self.offset & (_INODE | _MM_SHARED)
        step, unit = (1, _PAGE) if self.of_inode else (_PAGE, 1)
        pages, offset = divmod(self.word * unit + (self.offset & ~flags) + by, _PAGE)
        return self._replace(word=pages * step, offset=offset | flags)

    def pair(self) -> tuple["FutexKey", "FutexKey"]:
        """Return this one and the other that is in the same 8 bytes, in order."""
        first = self.moved(-(self.offset & 4))
        return first, first.moved(4)
