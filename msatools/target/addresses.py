# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The lowest addresses of the kernel.

They are used to follow pointers, to classify program counters and to search memory for
pointers.
"""

from collections.abc import Mapping
from typing import Final

import drgn

from msatools.selfdesc.vmcoreinfo import vmcoreinfo

KERNEL_HALF: Final = 1 << 63
"""
Start of the kernel's half of the address space: bit 63 of its addresses is set, and
that of user addresses is not, on every 64-bit architecture and with any number of page
table levels.
"""

START_KERNEL_MAP: Final = 0xFFFF_FFFF_8000_0000
"""
Start of the mapping of the kernel's image on x86-64 (__START_KERNEL_map).

All code lies above, including modules: the kernel code model uses the last 2 GiB.
"""

_KERNEL_START = "msatools.kernel start"
"""Key of the program's cache."""


def kernel_start(prog: drgn.Program) -> int:
    """
    Return the lowest canonical address of this kernel.

    No memory is mapped between :data:`KERNEL_HALF` and this address. List poison lies
    there (POISON_POINTER_DELTA, 0xdead000000000000), so that pointers of unlinked
    entries do not count as addresses.

    x86-64: Documentation/arch/x86/x86_64/mm.rst; arm64: arch/arm64/include/asm/memory.h
    (PAGE_OFFSET). On other architectures :data:`KERNEL_HALF`.
    """
    found: int | None = prog.cache.get(_KERNEL_START)
    if found is None:
        arch = None if prog.platform is None else prog.platform.arch
        bits = address_bits(arch, vmcoreinfo(prog))
        found = prog.cache[_KERNEL_START] = (1 << 64) - (1 << bits)
    return found


def address_bits(arch: drgn.Architecture | None, vmcoreinfo: Mapping[str, str]) -> int:
    """
    Return the number of bits of a kernel address that are translated.

    :param vmcoreinfo: Lines of the kernel's VMCOREINFO note.
    """
    if arch == drgn.Architecture.X86_64:
        return 56 if int(vmcoreinfo.get("NUMBER(pgtable_l5_enabled)", "0")) else 47
    if arch == drgn.Architecture.AARCH64:
        # A kernel built for 52 bits runs with 48 if the CPU supports no more.
        control = vmcoreinfo.get("NUMBER(TCR_EL1_T1SZ)")
        if control is not None:
            return 64 - int(control, 0)
        return int(vmcoreinfo.get("NUMBER(VA_BITS)", "63"))
    return 63
