# SPDX-License-Identifier: LGPL-2.1-or-later

"""riscv64 (Documentation/arch/riscv/vm-layout.rst): its memory, but no stacks."""

from collections.abc import Iterator, Mapping

from drgn import Program

from msatools.selfdesc.find import find_variable
from msatools.selfdesc.vmcoreinfo import number, vmcoreinfo, vmcoreinfo_number
from msatools.target.arch.model import KERNEL_HALF_BITS, Arch, Piece
from msatools.target.paging import TableFormat

_ALL = (1 << 64) - 1
_PAGE_SHIFT = 12

_SHIFTS = {39: (30, 21, 12), 48: (39, 30, 21, 12), 57: (48, 39, 30, 21, 12)}
"""Shifts of each level by the bits of virtual addresses: Sv39, Sv48 and Sv57."""

_BELOW_CODE = 0xFFFF_FFFF_0000_0000
"""The last 2 GiB are the kernel's image; modules are within 2 GiB of it, or below it
(asm/pgtable.h: KERNEL_LINK_ADDR, MODULES_VADDR)."""

_PAGED = (
    ("VMALLOC_START", "VMALLOC_END"),
    ("MODULES_VADDR", "MODULES_END"),
    ("VMEMMAP_START", "VMEMMAP_END"),
)
"""Lines of VMCOREINFO (arch/riscv/kernel/vmcore_info.c)."""


class Riscv64(Arch):
    """riscv64, with pages of 4 KiB."""

    image = (
        ("_stext", "_etext"),
        ("__start_rodata", "__end_rodata"),
        ("_sdata", "_edata"),
        ("__bss_start", "__bss_stop"),
    )

    def address_bits(self, vmcoreinfo: Mapping[str, str]) -> int:
        bits = vmcoreinfo.get("NUMBER(VA_BITS)")
        # Both halves together have so many.
        return KERNEL_HALF_BITS if bits is None else int(bits) - 1

    def code_start(self, vmcoreinfo: Mapping[str, str]) -> int:
        return _BELOW_CODE

    def table_format(self, prog: Program) -> TableFormat | None:
        bits = number(vmcoreinfo(prog).get("NUMBER(VA_BITS)", "0"))
        return riscv64_format(bits) if bits in _SHIFTS else None

    def image_offset(self, prog: Program) -> int | None:
        return vmcoreinfo_number(prog, "va_kernel_pa_offset")

    def direct_map(self, prog: Program) -> Piece | None:
        start = vmcoreinfo_number(prog, "PAGE_OFFSET")
        first = vmcoreinfo_number(prog, "phys_ram_base")
        if start is None or first is None:
            return None
        end = find_variable(prog, "max_pfn").value_() << _PAGE_SHIFT
        return Piece.read(start & _ALL, end - first, first)

    def paged(self, prog: Program, form: TableFormat) -> Iterator[tuple[int, int]]:
        for first, last in _PAGED:
            start = vmcoreinfo_number(prog, first)
            end = vmcoreinfo_number(prog, last)
            if start is not None and end is not None and start < end:
                yield start, end - start


def riscv64_format(bits: int) -> TableFormat:
    """Return the format of page tables (asm/pgtable-64.h, asm/pgtable-bits.h).

    :param bits: Bits of virtual addresses: 39, 48 or 57.
    """
    return TableFormat(
        shifts=_SHIFTS[bits],
        # The page frame number is in bits 10 to 53.
        frame=0,
        high=(1 << 54) - (1 << 10),
        high_shift=2,
        # An entry of any level that can be read, written or executed maps memory.
        largest=_SHIFTS[bits][0],
        huge=0b1110,
        protnone=1 << 5,  # _PAGE_PROT_NONE
        special=1 << 8,
        swap_type_shift=7,
        top_entries=512,
        # The kernel's entries follow.
        user_entries=256,
        kernel_entry=256,
    )
