# SPDX-License-Identifier: LGPL-2.1-or-later

"""x86-64 (Documentation/arch/x86/x86_64/mm.rst)."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from drgn import Program

from msatools.errors import LOST
from msatools.selfdesc.find import find_variable
from msatools.selfdesc.vmcoreinfo import number, vmcoreinfo_number
from msatools.target.arch.model import Arch, Piece
from msatools.target.paging import TableFormat

START_KERNEL_MAP: Final = 0xFFFF_FFFF_8000_0000
"""
Start of the mapping of the kernel's image (__START_KERNEL_map).

All code lies above, including modules: the kernel code model uses the last 2 GiB.
"""

_PAGE_SHIFT = 12
_SHIFTS = (39, 30, 21, _PAGE_SHIFT)
_FRAME = 0x000F_FFFF_FFFF_F000

_VMALLOC_TIB = {4: 32, 5: 12800}
"""Size of the vmalloc area by number of levels (VMALLOC_SIZE_TB_L4 and _L5)."""

_MODULES = 0xFFFF_FFFF_A000_0000
_MODULES_END = 0xFFFF_FFFF_FF00_0000


class X86(Arch):
    """x86-64."""

    # arch/x86/kernel/vmlinux.lds.S: the init sections between them are freed after
    # boot.
    image = (
        ("_stext", "_etext"),
        ("__start_rodata", "__end_rodata"),
        ("_sdata", "__init_begin"),
        ("__bss_start", "__bss_stop"),
    )
    saved_registers = ("thread.sp",)
    user_registers = ("rsp", "rbp")
    longest_call = 7

    def ends_with_call(self, code: bytes) -> bool:
        return ends_with_call(code)

    def address_bits(self, vmcoreinfo: Mapping[str, str]) -> int:
        return 56 if number(vmcoreinfo.get("NUMBER(pgtable_l5_enabled)", "0")) else 47

    def code_start(self, vmcoreinfo: Mapping[str, str]) -> int:
        return START_KERNEL_MAP

    def image_range(self, prog: Program) -> tuple[int, int]:
        return START_KERNEL_MAP, 1 << 64

    def table_format(self, prog: Program) -> TableFormat:
        # With 57 bits of virtual addresses (CONFIG_X86_5LEVEL, in v4.14).
        top = (48,) if vmcoreinfo_number(prog, "pgtable_l5_enabled") else ()
        # With memory encryption (SME), a bit of the address marks encrypted pages.
        encrypted = vmcoreinfo_number(prog, "sme_mask") or 0
        return x86_format((*top, *_SHIFTS), encrypted)

    def image_offset(self, prog: Program) -> int | None:
        base = vmcoreinfo_number(prog, "phys_base")
        return None if base is None else START_KERNEL_MAP - base

    def direct_map(self, prog: Program) -> Piece:
        # Without CONFIG_DYNAMIC_MEMORY_LAYOUT it is a constant.
        start = find_variable(prog, "page_offset_base").value_()
        size = find_variable(prog, "max_pfn").value_() << _PAGE_SHIFT
        return Piece.read(start, size, 0)

    def paged(self, prog: Program, form: TableFormat) -> Iterator[tuple[int, int]]:
        yield _MODULES, _MODULES_END - _MODULES
        with suppress(*LOST):
            # Without CONFIG_DYNAMIC_MEMORY_LAYOUT it is a constant.
            size = (_VMALLOC_TIB[form.levels] << 40) - 1
            yield find_variable(prog, "vmalloc_base").value_(), size


def x86_format(shifts: tuple[int, ...] = _SHIFTS, encrypted: int = 0) -> TableFormat:
    """
    Return the format of page tables, by default with four levels.

    arch/x86/include/asm/pgtable_types.h and pgtable_64.h.

    :param encrypted: The bit of an entry that marks encrypted pages.
    """
    return TableFormat(
        shifts=shifts,
        frame=_FRAME & ~encrypted,
        largest=30,
        huge=1 << 7,  # _PAGE_PSE
        protnone=1 << 8,  # _PAGE_PROTNONE
        special=1 << 9,
        hardware=1 << 5 | 1 << 6,
        swap_type_shift=59,
        top_entries=512,
        # The kernel's entries follow.
        user_entries=256,
        kernel_entry=256,
        # Linux kernel commit 6b28baca9b1f ("x86/speculation/l1tf: Protect PROT_NONE
        # PTEs against speculation") (in v4.19)
        inverts=True,
    )


def ends_with_call(code: bytes) -> bool:
    """Return whether the last instruction of some x86-64 code may be a call.

    That is ``call rel32`` (E8), or an indirect ``call`` (FF /2) whose length matches
    its addressing mode.
    """
    if len(code) >= 5 and code[-5] == 0xE8:
        return True
    return any(
        len(code) >= length
        and code[-length] == 0xFF
        and code[1 - length] >> 3 & 0b111 == 2
        and _length(code[1 - length], code[2 - length] if length > 2 else 0) == length
        for length in (2, 3, 4, 6, 7)
    )


def _length(mod_rm: int, sib: int) -> int:
    """Return the length of an instruction with a one-byte opcode, without prefixes."""
    mode, memory = mod_rm >> 6, mod_rm & 0b111
    if mode == 0b11:
        return 2
    has_sib = memory == 0b100
    if mode == 0b00:
        has_disp32 = memory == 0b101 or (has_sib and sib & 0b111 == 0b101)
        return 2 + has_sib + (4 if has_disp32 else 0)
    return 2 + has_sib + (1 if mode == 0b01 else 4)
