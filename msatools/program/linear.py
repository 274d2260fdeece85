# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads of kernel memory without libkdumpfile: the direct map, and vmalloc() memory.

Also the lowest addresses of the kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import drgn
import numpy as np
import numpy.typing as npt
from drgn import FaultError, Program, ProgramFlags
from drgn.helpers.linux.mm import follow_phys, pfn_to_virt

from msatools.errors import LOST, UNREADABLE, MissingError, NotSupportedError
from msatools.program.arch import Piece, TableFormat, TableWalk, arch_of, table_format
from msatools.selfdesc.find import (
    ask,
    find_symbol,
    find_variable,
    hex_number,
    vmcoreinfo,
)

# --- The lowest addresses of the kernel, and the address of its memmap.
#
# They are used to follow pointers, to classify program counters and to search memory
# for pointers.


KERNEL_HALF: Final = 1 << 63
"""
Start of the kernel's half of the address space: bit 63 of its addresses is set, and
that of user addresses is not, on every 64-bit architecture and with any number of page
table levels.
"""

_KERNEL_START = "msatools.kernel start"
"""Key in ``prog.cache`` of :func:`kernel_start`."""


def kernel_start(prog: drgn.Program) -> int:
    """
    Return the lowest canonical address of this kernel.

    No memory is mapped between :data:`KERNEL_HALF` and this address. List poison lies
    there (POISON_POINTER_DELTA, 0xdead000000000000), so that pointers of unlinked
    entries do not count as addresses.
    """
    found: int | None = prog.cache.get(_KERNEL_START)
    if found is None:
        bits = arch_of(prog).address_bits(vmcoreinfo(prog))
        found = prog.cache[_KERNEL_START] = (1 << 64) - (1 << bits)
    return found


def code_start(prog: drgn.Program) -> int:
    """
    Return an address above the direct map, and not above any code.

    The kernel's image with its static variables, and modules, lie above.
    """
    return arch_of(prog).code_start(vmcoreinfo(prog))


Words = npt.NDArray[np.uint64]


def vmemmap_base(prog: drgn.Program) -> int:
    """
    Return the address that the struct page of pfn 0 has or would have.

    x86-64 keeps it in a variable; elsewhere drgn works it out from the table of
    memory sections, which a truncated dump may lack. On arm64 a variable of that name
    belongs to KVM's code at EL2 (arch/arm64/kvm/hyp/nvhe/mm.c).

    :raises MissingError: if the kernel has no virtual memory map
    :raises drgn.FaultError: if the dump lacks the variable or the table
    """
    platform = prog.platform
    if platform is not None and platform.arch == drgn.Architecture.X86_64:
        with suppress(MissingError):
            return int(find_variable(prog, "vmemmap_base").value_())
    return int(find_variable(prog, "vmemmap").value_())


# --- Reads of vmalloc() memory in a dump, with each page table read once.
#
# Kernel stacks and modules lie in vmalloc() memory. drgn walks four or five tables for
# each read; in a dump they do not change, so tables are cached here. The same tables
# translate other mappings, such as the memmap, many pages at a time.


def map_vmalloc(prog: Program) -> bool:
    """
    Let drgn read vmalloc() memory and modules of a dump with cached page tables.

    It must be called before :func:`map_linear`, whose segments take precedence.

    :return: Whether the format of this kernel's tables is known.
    """
    tables = page_tables(prog)
    if tables is None:
        return False
    paged = list(arch_of(prog).paged(prog, tables.form))
    for start, size in paged:
        prog.add_memory_segment(start, size, tables.read)
    direct_map(prog).set_paged(paged, tables)
    return True


def page_tables(prog: Program) -> "VmallocTables | None":
    """Return a dump's kernel page tables; ``None`` if not found, or the kernel runs."""
    form = table_format(prog)
    if form is None or prog.flags & ProgramFlags.IS_LIVE:
        return None
    root = vmcoreinfo(prog).get("SYMBOL(swapper_pg_dir)")
    offset = arch_of(prog).image_offset(prog)
    if root is None or offset is None:
        return None
    try:
        address = hex_number(root)
        tables = VmallocTables(prog, address - offset, form)
        # Check the address from VMCOREINFO against drgn's own translation.
        expected = _by_drgn(prog, address)
        if expected is None:
            expected = address - offset
        is_right = tables.translate(address)[0] == expected
    except LOST:
        return None
    return tables if is_right else None


def physical_address(prog: Program, address: int) -> int:
    """Translate an address of the kernel, each time with a walk of page tables.

    :raises FaultError: if it is not mapped, or a page table cannot be read
    :raises MissingError: if the page tables are not found
    """
    physical = _by_drgn(prog, address)
    if physical is None:
        tables = page_tables(prog)
        if tables is None:
            raise MissingError("this architecture's page tables are not read")
        physical = tables.translate(address)[0]
    return physical


def _by_drgn(prog: Program, address: int) -> int | None:
    """Translate an address; ``None`` if drgn does not know the architecture."""
    space = find_variable(prog, "init_mm").address_of_()
    try:
        return int(ask(follow_phys, space, address).value_())
    except NotSupportedError:
        return None


class VmallocTables(TableWalk):
    """The kernel's page tables, each read once, and reads of the memory they map."""

    def __init__(self, prog: Program, root: int, form: TableFormat) -> None:
        """
        :param root: Physical address of the top-level table.
        """
        size = form.table_bytes
        super().__init__(form, root, lambda table: prog.read(table, size, True))
        self._read = prog.read

    def read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        """Read memory for drgn (:meth:`drgn.Program.add_memory_segment`).

        Pages that are physically contiguous take one read.
        """
        parts: list[bytes] = []
        end = address + count
        while address < end:
            start, room = self.translate(address)
            size = min(room, end - address)
            while address + size < end:
                following, room = self._following(address + size)
                if following != start + size:
                    break
                size = min(size + room, end - address)
            try:
                parts.append(self._read(start, size, True))
            except UNREADABLE as error:
                raise FaultError(str(error), address) from error
            address += size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def translate(self, address: int) -> tuple[int, int]:
        """
        Translate an address as :meth:`find` does.

        :raises FaultError: if nothing is mapped there
        """
        found = self.find(address)
        if found is None:
            raise FaultError("address is not mapped", address)
        return found

    def _following(self, address: int) -> tuple[int, int]:
        try:
            return self.find(address) or (-1, 0)
        except UNREADABLE:
            return -1, 0

    def find_each(self, addresses: Words) -> tuple[Words, Words]:
        """
        Translate many addresses, a level at a time for all of them.

        :return: The physical address of each, and the number of bytes up to the end of
            its page: 0 if nothing is mapped there, or a table cannot be read.
        """
        form = self.form
        physical, room = np.zeros_like(addresses), np.zeros_like(addresses)
        rows = np.arange(len(addresses))
        tables = np.full(len(addresses), self._root, np.uint64)
        for shift in form.shifts:
            entries = self._entries_of(tables, addresses[rows], shift)
            present = form.present_of(entries)
            leaf = np.uint64(self._leaf[shift])
            maps = present & ((entries ^ np.uint64(form.flip)) & leaf != 0)
            mask = np.uint64((1 << shift) - 1)
            within = addresses[rows[maps]] & mask
            physical[rows[maps]] = (form.addresses(entries[maps]) & ~mask) + within
            room[rows[maps]] = mask + np.uint64(1) - within
            goes_on = present & ~maps
            rows, tables = rows[goes_on], form.addresses(entries[goes_on])
        return physical, room

    def _entries_of(self, tables: Words, addresses: Words, shift: int) -> Words:
        """Return the entry for each address in its table; 0 if that is unreadable."""
        order = np.argsort(tables, kind="stable")
        ascending = tables[order]
        starts = np.flatnonzero(np.diff(ascending, prepend=~ascending[:1]))
        indices = addresses >> np.uint64(shift) & np.uint64(self._last[shift])
        entries = np.zeros(len(tables), np.uint64)
        for rows in np.split(order, starts[1:]) if len(order) else ():
            table = int(tables[rows[0]])
            data = self._tables.get(table)
            if data is None:
                try:
                    data = self._tables[table] = self._read_table(table)
                except UNREADABLE:
                    continue
            entries[rows] = np.frombuffer(data, "<u8")[indices[rows].astype(np.intp)]
        return entries


# --- Reads of linearly mapped kernel memory without a walk of page tables.
#
# QEMU's dumps and kdumps have physical addresses only, so that drgn walks the kernel's
# page tables for each read, with four or five more reads. All memory is mapped linearly
# (the direct map), and the kernel's image, too; almost all reads go to these mappings.


_DIRECT_MAP = "msatools.direct map"
"""Key in ``prog.cache`` of the program's :class:`DirectMap`."""

_MAX_BYTES = 1 << 52
"""Maximum size of physical memory: addresses have 52 bits at most."""


def map_kernel(prog: Program) -> None:
    """Let drgn walk the page tables of a dump or a guest as rarely as possible."""
    map_vmalloc(prog)
    map_linear(prog)


def map_linear(prog: Program) -> list[Piece]:
    """Let drgn read linearly mapped memory by physical address.

    A piece is skipped if the page tables map either end elsewhere.

    :return: The pieces that drgn reads so; empty for an unknown architecture.
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
    The range where all physical memory is mapped, and those of vmalloc(), if known.

    Callers with many reads translate addresses by it and read physical memory: drgn's
    call back to this module would take half the time of a read.
    """

    __slots__ = ("paged", "physical", "size", "start", "tables")

    def __init__(self) -> None:
        self.start = self.size = self.physical = 0
        self.paged: Sequence[tuple[int, int]] = ()
        """Start and size of each range of vmalloc() memory that *tables* map."""

        self.tables: VmallocTables | None = None

    def set(self, piece: Piece) -> None:
        """Set the direct map's range, for all users of this object."""
        self.start, self.size, self.physical = piece

    def set_paged(
        self, paged: Sequence[tuple[int, int]], tables: VmallocTables | None
    ) -> None:
        """Set the ranges of vmalloc() memory, for all users of this object."""
        self.paged, self.tables = paged, tables

    def is_paged(self, address: int, size: int) -> bool:
        """Return whether a piece of memory is in one of the :attr:`paged` ranges."""
        # Not any(), which takes three times as long: most reads call this.
        for start, whole in self.paged:
            if 0 <= address - start <= whole - size:
                break
        else:
            return False
        return True

    def places(self, addresses: Words, sizes: Words) -> list[int]:
        """Return the physical address of each piece of vmalloc() memory.

        :return: -1 for a piece that is not within one page, or not known to be mapped.
        """
        if self.tables is None or not len(addresses):
            return [-1] * len(addresses)
        inside = np.zeros(len(addresses), np.bool_)
        for start, whole in self.paged:
            inside |= addresses - np.uint64(start) < np.uint64(whole)
        physical, room = self.tables.find_each(np.where(inside, addresses, 0))
        fits = inside & (sizes <= room)
        found: list[int] = np.where(fits, physical.astype(np.int64), -1).tolist()
        return found


def direct_map(prog: Program) -> DirectMap:
    """Return the direct map of a program, which :func:`map_linear` may set later."""
    found: DirectMap = prog.cache.setdefault(_DIRECT_MAP, DirectMap())
    return found


def page_address(prog: Program, pfn: int) -> int:
    """Return the address of a page in the direct map.

    :raises MissingError: if the direct map of this architecture is unknown
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
    """Make readers use drgn's memory segments, with which tests overlay memory."""
    direct_map(prog).set(Piece(0, 0, 0))
    direct_map(prog).set_paged((), None)


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
    """Return whether page tables map both ends of a piece to its physical addresses."""
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
