# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads of linearly mapped kernel memory without a walk of page tables.

QEMU's dumps and kdumps have physical addresses only, so that drgn walks the kernel's
page tables for each read, with four or five more reads. On x86-64 (Documentation/arch/
x86/x86_64/mm.rst) the direct map of all memory begins at ``page_offset_base``, and the
kernel's image is mapped linearly, too; almost all reads go to one of these.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import drgn
from drgn import Architecture, FaultError, Program
from drgn.helpers.linux.mm import follow_phys

from msatools.selfdesc.variables import find_variable
from msatools.selfdesc.vmcoreinfo import vmcoreinfo_number
from msatools.target.addresses import START_KERNEL_MAP
from msatools.target.vmalloc import map_vmalloc

_DIRECT_MAP = "msatools.direct map"
"""Key of the program's cache."""

_PAGE_SHIFT = 12
_MAX_BYTES = 1 << 52
"""Maximum size of physical memory: addresses have 52 bits at most."""

# The parts of the kernel's image that are kept (arch/x86/kernel/vmlinux.lds.S): the
# init sections between them are freed after boot.
_IMAGE = (
    ("_stext", "_etext"),
    ("__start_rodata", "__end_rodata"),
    ("_sdata", "__init_begin"),
    ("__bss_start", "__bss_stop"),
)


class Piece(NamedTuple):
    """A range of virtual addresses that is physically contiguous."""

    start: int
    size: int
    physical: int


def map_kernel(prog: Program) -> None:
    """Let drgn walk the page tables of a dump or a guest as rarely as possible."""
    map_vmalloc(prog)
    map_linear(prog)


def map_linear(prog: Program) -> list[Piece]:
    """Let drgn read linearly mapped memory by physical address.

    A piece is skipped if the page tables map either end elsewhere. On architectures
    other than x86-64 nothing is changed.

    :return: The pieces.
    """
    platform = prog.platform
    if platform is None or platform.arch != Architecture.X86_64:
        return []
    memory = [piece for piece in _all_memory(prog) if _is_mapped(prog, piece)]
    pieces = memory + [piece for piece in _image(prog) if _is_mapped(prog, piece)]
    for piece in pieces:
        prog.add_memory_segment(piece.start, piece.size, _reading(prog, piece))
    for piece in memory:
        direct_map(prog).set(piece.start, piece.size)
    return pieces


class DirectMap:
    """
    The range where all physical memory is mapped, from its first byte on, if known.

    Callers with many reads translate addresses in it themselves and read physical
    memory: drgn's call back to this module takes half the time of a read.
    """

    __slots__ = ("size", "start")

    def __init__(self) -> None:
        self.start = self.size = 0

    def set(self, start: int, size: int) -> None:
        """Set the range, for all users of this object."""
        self.start, self.size = start, size


def direct_map(prog: Program) -> DirectMap:
    """Return the direct map of a program, which :func:`map_linear` may set later."""
    found: DirectMap = prog.cache.setdefault(_DIRECT_MAP, DirectMap())
    return found


def forget_direct_map(prog: Program) -> None:
    """Let readers use drgn's memory segments, as tests overlay memory with them."""
    direct_map(prog).set(0, 0)


def _all_memory(prog: Program) -> Iterator[Piece]:
    try:
        # Without CONFIG_DYNAMIC_MEMORY_LAYOUT it is a constant.
        start = find_variable(prog, "page_offset_base").value_()
        yield Piece(start, find_variable(prog, "max_pfn").value_() << _PAGE_SHIFT, 0)
    except (LookupError, FaultError):
        pass


def _image(prog: Program) -> Iterator[Piece]:
    base = vmcoreinfo_number(prog, "phys_base")
    if base is None:
        return
    for first, last in _IMAGE:
        try:
            start, end = prog.symbol(first).address, prog.symbol(last).address
        except LookupError:
            continue
        yield Piece(start, end - start, start - START_KERNEL_MAP + base)


def _is_mapped(prog: Program, piece: Piece) -> bool:
    """Return whether the page tables agree on both ends of a piece."""
    if not 0 < piece.size <= _MAX_BYTES:
        return False
    try:
        space = find_variable(prog, "init_mm").address_of_()
        return all(
            follow_phys(space, piece.start + offset).value_() == piece.physical + offset
            for offset in (0, piece.size - 1)
        )
    except (LookupError, FaultError, NotImplementedError):
        return False


def _reading(prog: Program, piece: Piece) -> Callable[[int, int, int, bool], bytes]:
    read, base = prog.read, piece.physical

    def read_physical(address: int, count: int, offset: int, physical: bool) -> bytes:
        try:
            data: bytes = read(base + offset, count, True)
        except drgn.FaultError as error:
            # Report the virtual address, as without this function.
            raise drgn.FaultError(str(error), address) from error
        return data

    return read_physical
