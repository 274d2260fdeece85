# SPDX-License-Identifier: LGPL-2.1-or-later

"""arm64 (Documentation/arch/arm64/memory.rst; arch/arm64/include/asm/memory.h)."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from drgn import Program

from msatools.errors import DamagedDataError, MissingError
from msatools.selfdesc.find import find_constant, find_symbol, find_variable
from msatools.selfdesc.vmcoreinfo import (
    hex_number,
    number,
    vmcoreinfo,
    vmcoreinfo_number,
)
from msatools.target.arch.model import KERNEL_HALF_BITS, Arch, Piece
from msatools.target.paging import TableFormat

_ALL = (1 << 64) - 1
_LEAST_BITS = {12: 48, 14: 47, 16: 48}
"""VA_BITS_MIN by the shift of a page: a kernel built for 52 bits runs with so many if
the CPU supports no more."""

# Arm Architecture Reference Manual, VMSAv8-64 descriptors: above the lowest level, an
# entry with this bit points to a table, and one without it maps memory.
_TABLE = 1 << 1
_SPECIAL = 1 << 56


_CALLS = (
    (0xFC00_0000, 0x9400_0000),  # bl
    (0xFFFF_FC1F, 0xD63F_0000),  # blr
    (0xFEFF_F800, 0xD63F_0800),  # blraa, blrab, blraaz, blrabz
)
"""Masks and values of the instructions that set x30."""


class SoftwareBits(NamedTuple):
    """Bits of entries that Linux defines, and that differ between versions."""

    protnone: int
    """PTE_PROT_NONE, PMD_PRESENT_INVALID: the entry maps a page, but is not valid."""

    swap_type_shift: int


# Since "arm64/mm: Move PTE_PRESENT_INVALID to overlay PTE_NG" (in v6.10)
SOFTWARE = SoftwareBits(1 << 11, 6)
# Since Linux kernel commit 570ef363509b ("arm64/pgtable: support
# __HAVE_ARCH_PTE_SWP_EXCLUSIVE") (in v5.19)
SOFTWARE_5_19 = SoftwareBits(1 << 58 | 1 << 59, 3)
SOFTWARE_OLD = SoftwareBits(1 << 58 | 1 << 59, 2)


class Arm64(Arch):
    """arm64, with pages of 4, 16 or 64 KiB and addresses of up to 52 bits."""

    # arch/arm64/kernel/vmlinux.lds.S
    image = (
        ("_stext", "_etext"),
        ("__start_rodata", "__end_rodata"),
        ("_sdata", "_edata"),
        ("__bss_start", "__bss_stop"),
    )
    has_frame_records = True
    user_registers = ("sp", "x29")
    longest_call = 4
    saved_registers = tuple(f"thread.cpu_context.{name}" for name in ("sp", "fp", "pc"))

    def address_bits(self, vmcoreinfo: Mapping[str, str]) -> int:
        # Since v5.12: a kernel built for 52 bits may run with less.
        control = vmcoreinfo.get("NUMBER(TCR_EL1_T1SZ)")
        bits = 0 if control is None else 64 - number(control)
        bits = bits or _built_bits(vmcoreinfo) or KERNEL_HALF_BITS
        if not 0 < bits < 64:
            raise DamagedDataError(f"addresses of {bits} bits")
        return bits

    def code_start(self, vmcoreinfo: Mapping[str, str]) -> int:
        # The upper half: _PAGE_END(VA_BITS_MIN), where modules begin.
        shift = number(vmcoreinfo.get("PAGESIZE", "4096")).bit_length() - 1
        least = min(_built_bits(vmcoreinfo) or 48, _LEAST_BITS.get(shift, 48))
        return (1 << 64) - (1 << least - 1)

    def ends_with_call(self, code: bytes) -> bool:
        word = int.from_bytes(code[-4:], "little") if len(code) >= 4 else 0
        return any(word & mask == call for mask, call in _CALLS)

    def image_range(self, prog: Program) -> tuple[int, int]:
        try:
            start, end = (find_symbol(prog, name).address for name in ("_text", "_end"))
        except MissingError:
            return 0, 0
        if end < start:
            # drgn may not relocate a symbol of debug info that is past all sections.
            end += hex_number(vmcoreinfo(prog).get("KERNELOFFSET", "0"))
        return (start, end) if start < end else (0, 0)

    def table_format(self, prog: Program) -> TableFormat | None:
        lines = vmcoreinfo(prog)
        built, size = _built_bits(lines), lines.get("PAGESIZE")
        if built is None or size is None:
            return None
        page_shift = int(size).bit_length() - 1
        bits = self.address_bits(lines)
        return arm64_format(page_shift, bits, built, _software_bits(prog))

    def image_offset(self, prog: Program) -> int | None:
        return vmcoreinfo_number(prog, "kimage_voffset")

    def direct_map(self, prog: Program) -> Piece | None:
        built = _built_bits(vmcoreinfo(prog))
        zero = vmcoreinfo_number(prog, "PHYS_OFFSET")
        if built is None or zero is None:
            return None
        shift = find_variable(prog, "PAGE_SHIFT").value_()
        first = find_variable(prog, "min_low_pfn").value_() << shift
        end = find_variable(prog, "max_pfn").value_() << shift
        # __phys_to_virt()
        start = first - zero - (1 << built) & _ALL
        return Piece.read(start, end - first, first)

    def paged(self, prog: Program, form: TableFormat) -> Iterator[tuple[int, int]]:
        # Since Linux kernel commit 2369f171d5c5 ("arm64: crash_core: Export MODULES,
        # VMALLOC, and VMEMMAP ranges") (in v6.0).
        for first, last in (
            ("MODULES_VADDR", "MODULES_END"),
            ("VMALLOC_START", "VMALLOC_END"),
        ):
            start = vmcoreinfo_number(prog, first)
            end = vmcoreinfo_number(prog, last)
            if start is not None and end is not None and start < end:
                yield start, end - start


def _built_bits(vmcoreinfo: Mapping[str, str]) -> int | None:
    """Return the bits of virtual addresses that a kernel was built for.

    :raises ValueError: if there cannot be as many
    """
    text = vmcoreinfo.get("NUMBER(VA_BITS)")
    if text is None:
        return None
    bits = int(text)
    if not 0 < bits < 64:
        raise DamagedDataError(f"addresses of {bits} bits")
    return bits


def _software_bits(prog: Program) -> SoftwareBits:
    """Tell the version by other changes in it, as these bits are in no symbol."""
    try:
        # Until Linux kernel commit 5691753d73a2 ("mm: convert huge_zero_page to
        # huge_zero_folio") (in v6.10).
        find_variable(prog, "huge_zero_page")
    except MissingError:
        return SOFTWARE
    try:
        find_constant(prog, "PG_anon_exclusive")
    except MissingError:
        return SOFTWARE_OLD
    return SOFTWARE_5_19


def arm64_format(
    page_shift: int, bits: int, built: int, software: SoftwareBits = SOFTWARE
) -> TableFormat:
    """
    Return the format of page tables.

    arch/arm64/include/asm/pgtable-hwdef.h and pgtable-prot.h.

    :param bits: Bits of virtual addresses that are in use.
    :param built: Bits that the kernel was built for.
    """
    step = page_shift - 3
    shifts = tuple(range(page_shift, bits, step))[::-1]
    frame = (1 << 48) - (1 << page_shift)
    high, high_shift = 0, 0
    if page_shift == 16:
        # FEAT_LPA: bits 51 to 48 of the address; 0 if not in use.
        high, high_shift = 0xF << 12, 36
    elif bits > 48:
        # FEAT_LPA2: bits 51 and 50; else these are of the shareability.
        frame = (1 << 50) - (1 << page_shift)
        high, high_shift = 0b11 << 8, 42
    # The top-level table has room for what the kernel was built for (PTRS_PER_PGD).
    top = 1 << min(step, max(built, bits) - shifts[0])
    return TableFormat(
        shifts=shifts,
        frame=frame,
        high=high,
        high_shift=high_shift,
        # With 4 KiB 1 GiB, or 512 GiB by FEAT_LPA2; with others an entry of the level
        # above the lowest, or also of the one above that.
        largest=shifts[0],
        huge=_TABLE,
        flip=_TABLE,
        protnone=software.protnone,
        special=_SPECIAL,
        swap_type_shift=software.swap_type_shift,
        top_entries=top,
        # Tables of the kernel and of processes are apart (TTBR1 and TTBR0).
        user_entries=top,
        kernel_entry=0,
    )
