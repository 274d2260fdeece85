# SPDX-License-Identifier: LGPL-2.1-or-later

"""What the tools need to know of an architecture."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from drgn import Program

from msatools.errors import DamagedDataError
from msatools.target.paging import TableFormat

KERNEL_HALF_BITS = 63
"""Bits of an address in the kernel's half, on every 64-bit architecture."""


class Piece(NamedTuple):
    """A range of virtual addresses that is physically contiguous."""

    start: int
    size: int
    physical: int

    @classmethod
    def read(cls, start: int, size: int, physical: int) -> "Piece":
        """Return a range that the kernel's variables describe.

        :raises DamagedDataError: if there are no such addresses
        """
        if size < 0 or start + size > _ADDRESSES:
            raise DamagedDataError(f"a map of {size:,} bytes", start)
        return cls(start, size, physical)


_ADDRESSES = 1 << 64


class Arch:
    """An architecture; by default one of which nothing is known."""

    image: tuple[tuple[str, str], ...] = ()
    """Symbols of the start and end of each part of the kernel's image that stays mapped
    after boot."""

    has_frame_records = False
    """Whether kernel code always makes frame records."""

    saved_registers: tuple[str, ...] = ()
    """Members of ``task_struct`` where a task's registers are saved when another is
    switched to: the stack pointer, and more if its stack does not have them."""

    user_registers: tuple[str, ...] = ()
    """drgn's names of the stack pointer and of the frame pointer; empty if user stacks
    are not read."""

    longest_call = 0
    """Maximum length of a call instruction in bytes, without prefixes."""

    def ends_with_call(self, code: bytes) -> bool:
        """Return whether the last instruction of some user code may be a call."""
        return False

    def address_bits(self, vmcoreinfo: Mapping[str, str]) -> int:
        """
        Return the number of bits of a kernel address that are translated.

        :param vmcoreinfo: Lines of the kernel's VMCOREINFO note.
        """
        return KERNEL_HALF_BITS

    def code_start(self, vmcoreinfo: Mapping[str, str]) -> int:
        """Return an address above the direct map, and not above any code.

        The kernel's image with its static variables, and modules, lie above.
        """
        return 1 << KERNEL_HALF_BITS

    def image_range(self, prog: Program) -> tuple[int, int]:
        """
        Return the range of the kernel's image; on x86-64 of modules, too.

        It has no memory that is allocated otherwise. Empty if unknown.
        """
        return 0, 0

    def table_format(self, prog: Program) -> TableFormat | None:
        """Return the format of a kernel's page tables; ``None`` if unknown."""
        return None

    def image_offset(self, prog: Program) -> int | None:
        """Return virtual minus physical address of the image; ``None`` if unknown."""
        return None

    def direct_map(self, prog: Program) -> Piece | None:
        """
        Return where all memory is mapped; ``None`` if unknown.

        :raises MissingError: if the kernel does not say where
        :raises UNREADABLE: if the dump lacks it, or it is damaged
        """
        return None

    def paged(self, prog: Program, form: TableFormat) -> Iterator[tuple[int, int]]:
        """Yield start and size of the ranges of vmalloc() memory and of modules."""
        return iter(())
