# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a dumped kernel maps page by page, read with each page table read once.

Kernel stacks and modules lie where vmalloc() puts things. drgn walks four tables for
each read; in a dump they do not change, so one that was read is kept. x86-64 with
tables of four levels (Documentation/arch/x86/x86_64/mm.rst).
"""

import struct
from contextlib import suppress

from drgn import Architecture, FaultError, Program, ProgramFlags
from drgn.helpers.linux.mm import follow_phys

from msatools.selfdesc.vmcoreinfo import vmcoreinfo, vmcoreinfo_number

START_KERNEL_MAP = 0xFFFF_FFFF_8000_0000
"""Where the kernel's image is mapped (__START_KERNEL_map)."""

_VMALLOC_BYTES = (32 << 40) - 1
_MODULES = 0xFFFF_FFFF_A000_0000
_MODULES_END = 0xFFFF_FFFF_FF00_0000

_PAGE_SHIFT = 12
_PAGE = 1 << _PAGE_SHIFT
_LEVELS = (39, 30, 21, 12)
"""How many bits of an address each level leaves to the next."""
_INDEX = 511

_PRESENT = 1
_LARGE = 1 << 7
_FRAME = 0x000F_FFFF_FFFF_F000
_ENTRY = struct.Struct("<Q")


def map_vmalloc(prog: Program) -> bool:
    """
    Have drgn read what vmalloc() mapped in a dump with each page table read once.

    What :func:`msatools.target.linear.map_linear` maps has to be mapped after it: the
    kernel's image lies between modules.

    :return: Whether this kernel's tables are known.
    """
    tables = _tables(prog)
    if tables is None:
        return False
    ranges = [(_MODULES, _MODULES_END - _MODULES)]
    with suppress(LookupError, FaultError):
        # Without CONFIG_DYNAMIC_MEMORY_LAYOUT it is a constant, and no variable.
        ranges.append((prog["vmalloc_base"].value_(), _VMALLOC_BYTES))
    for start, size in ranges:
        prog.add_memory_segment(start, size, tables.read)
    return True


def _tables(prog: Program) -> "_Tables | None":
    platform = prog.platform
    if platform is None or platform.arch != Architecture.X86_64:
        return None
    if prog.flags & ProgramFlags.IS_LIVE or _number(prog, "pgtable_l5_enabled"):
        return None
    root = vmcoreinfo(prog).get("SYMBOL(swapper_pg_dir)")
    base = vmcoreinfo_number(prog, "phys_base")
    if root is None or base is None:
        return None
    try:
        address = int(root, 16)
        encrypted = _number(prog, "sme_mask")
        tables = _Tables(prog, address - START_KERNEL_MAP + base, encrypted)
        # Where the kernel says that its tables are, they may not be.
        space = prog["init_mm"].address_of_()
        right = tables.translate(address)[0] == follow_phys(space, address).value_()
    except (LookupError, FaultError, NotImplementedError, ValueError, OverflowError):
        return None
    return tables if right else None


def _number(prog: Program, name: str) -> int:
    return vmcoreinfo_number(prog, name) or 0


class _Tables:
    """The kernel's page tables, each read when it is needed first."""

    def __init__(self, prog: Program, root: int, encrypted: int) -> None:
        self._read = prog.read
        self._root = root
        self._frame = _FRAME & ~encrypted
        self._tables: dict[int, bytes] = {}

    def read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        """Read memory; neighbours in physical memory, too, with one read."""
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
            except FaultError as error:
                raise FaultError(str(error), address) from error
            address += size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _following(self, address: int) -> tuple[int, int]:
        try:
            return self.translate(address)
        except FaultError:
            return -1, 0

    def translate(self, address: int) -> tuple[int, int]:
        """
        Find the physical address, and how many bytes follow in the same page.

        :raises FaultError: if there is none
        """
        table = self._root
        for shift in _LEVELS:
            entries = self._tables.get(table) or self._table(table)
            (entry,) = _ENTRY.unpack_from(entries, (address >> shift & _INDEX) << 3)
            if not entry & _PRESENT:
                break
            table = entry & self._frame
            if shift == _PAGE_SHIFT or entry & _LARGE:
                within = address & ((1 << shift) - 1)
                return (table >> shift << shift) + within, (1 << shift) - within
        raise FaultError("address is not mapped", address)

    def _table(self, place: int) -> bytes:
        entries: bytes = self._read(place, _PAGE, True)
        self._tables[place] = entries
        return entries
