# SPDX-License-Identifier: LGPL-2.1-or-later

"""How a kernel's page tables are made: for all that walk them.

x86-64 (arch/x86/include/asm/pgtable_types.h and pgtable_64.h): a table is a page, and
has entries of 8 bytes.
"""

from dataclasses import dataclass

from drgn import Architecture, Program

from msatools.selfdesc.vmcoreinfo import vmcoreinfo_number

PAGE_SHIFT = 12
ENTRIES = 512
"""Of a table."""

PRESENT = 1 << 0
HUGE = 1 << 7
"""In a table above the lowest: maps memory itself, and names no table."""

_FRAME = 0x000F_FFFF_FFFF_F000
_SHIFTS = (39, 30, 21, PAGE_SHIFT)


@dataclass(frozen=True)
class TableFormat:
    """The page tables of one kernel."""

    shifts: tuple[int, ...] = _SHIFTS
    """How many bits of an address each level leaves to the next, the top one first."""

    frame: int = _FRAME
    """The bits of an entry that are the physical address of a page."""

    @property
    def levels(self) -> int:
        """Return how many tables lead to a page."""
        return len(self.shifts)


def table_format(prog: Program) -> TableFormat | None:
    """Return how a kernel's page tables are made; ``None`` if that is not known."""
    platform = prog.platform
    if platform is None or platform.arch != Architecture.X86_64:
        return None
    # With 57 bits of virtual addresses (CONFIG_X86_5LEVEL, in v4.14).
    top = (48,) if vmcoreinfo_number(prog, "pgtable_l5_enabled") else ()
    # With encrypted memory a bit of the address says so.
    encrypted = vmcoreinfo_number(prog, "sme_mask") or 0
    return TableFormat((*top, *_SHIFTS), _FRAME & ~encrypted)
