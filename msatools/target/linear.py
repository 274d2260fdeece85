# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads of linearly mapped kernel memory without a walk of page tables.

QEMU's dumps and kdumps have physical addresses only, so that drgn walks the kernel's
page tables for each read, with four or five more reads. All memory is mapped linearly
(the direct map), and the kernel's image, too; almost all reads go to one of these.
"""

from collections.abc import Callable, Iterator

import drgn
from drgn import Program
from drgn.helpers.linux.mm import pfn_to_virt

from msatools.errors import LOST, UNREADABLE, MissingError, NotSupportedError
from msatools.selfdesc.find import ask, find_symbol, find_variable
from msatools.target.arch import arch_of
from msatools.target.arch.model import Piece
from msatools.target.vmalloc import map_vmalloc, physical_address

_DIRECT_MAP = "msatools.direct map"
"""Key of the program's cache."""

_MAX_BYTES = 1 << 52
"""Maximum size of physical memory: addresses have 52 bits at most."""


def map_kernel(prog: Program) -> None:
    """Let drgn walk the page tables of a dump or a guest as rarely as possible."""
    map_vmalloc(prog)
    map_linear(prog)


def map_linear(prog: Program) -> list[Piece]:
    """Let drgn read linearly mapped memory by physical address.

    A piece is skipped if the page tables map either end elsewhere.

    :return: The pieces; empty if nothing is known of the architecture.
    """
    memory = [piece for piece in _all_memory(prog) if _is_mapped(prog, piece)]
    pieces = memory + [piece for piece in _image(prog) if _is_mapped(prog, piece)]
    for piece in pieces:
        prog.add_memory_segment(piece.start, piece.size, _reading(prog, piece))
    for piece in memory:
        direct_map(prog).set(piece)
    return pieces


class DirectMap:
    """
    The range where all physical memory is mapped, if known.

    Callers with many reads translate addresses in it themselves and read physical
    memory: drgn's call back to this module takes half the time of a read.
    """

    __slots__ = ("physical", "size", "start")

    def __init__(self) -> None:
        self.start = self.size = self.physical = 0

    def set(self, piece: Piece) -> None:
        """Set the range, for all users of this object."""
        self.start, self.size, self.physical = piece


def direct_map(prog: Program) -> DirectMap:
    """Return the direct map of a program, which :func:`map_linear` may set later."""
    found: DirectMap = prog.cache.setdefault(_DIRECT_MAP, DirectMap())
    return found


def page_address(prog: Program, pfn: int) -> int:
    """Return the address of a page in the direct map.

    :raises MissingError: if it is not known where this architecture maps memory
    """
    try:
        return int(ask(pfn_to_virt, prog, pfn).value_())
    except NotSupportedError:
        piece = arch_of(prog).direct_map(prog)
        if piece is None:
            raise MissingError("it is not known where memory is mapped") from None
        size: int = find_variable(prog, "PAGE_SIZE").value_()
        return piece.start - piece.physical + pfn * size


def forget_direct_map(prog: Program) -> None:
    """Let readers use drgn's memory segments, as tests overlay memory with them."""
    direct_map(prog).set(Piece(0, 0, 0))


def _all_memory(prog: Program) -> Iterator[Piece]:
    try:
        memory = arch_of(prog).direct_map(prog)
    except LOST:
        return
    if memory is not None:
        yield memory


def _image(prog: Program) -> Iterator[Piece]:
    arch = arch_of(prog)
    moved = arch.image_offset(prog)
    if moved is None:
        return
    for first, last in arch.image:
        try:
            start, end = (
                find_symbol(prog, first).address,
                find_symbol(prog, last).address,
            )
        except MissingError:
            continue
        yield Piece(start, end - start, start - moved)


def _is_mapped(prog: Program, piece: Piece) -> bool:
    """Return whether the page tables agree on both ends of a piece."""
    if not 0 < piece.size <= _MAX_BYTES:
        return False
    try:
        return all(
            physical_address(prog, piece.start + offset) == piece.physical + offset
            for offset in (0, piece.size - 1)
        )
    except LOST:
        return False


def _reading(prog: Program, piece: Piece) -> Callable[[int, int, int, bool], bytes]:
    read, base = prog.read, piece.physical

    def read_physical(address: int, count: int, offset: int, physical: bool) -> bytes:
        try:
            data: bytes = read(base + offset, count, True)
        except UNREADABLE as error:
            # Report the virtual address, as without this function.
            raise drgn.FaultError(str(error), address) from error
        return data

    return read_physical
