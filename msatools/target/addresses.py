# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The lowest addresses of the kernel.

They are used to follow pointers, to classify program counters and to search memory for
pointers.
"""

from typing import Final

import drgn

from msatools.selfdesc.vmcoreinfo import vmcoreinfo
from msatools.target.arch import arch_of

KERNEL_HALF: Final = 1 << 63
"""
Start of the kernel's half of the address space: bit 63 of its addresses is set, and
that of user addresses is not, on every 64-bit architecture and with any number of page
table levels.
"""

_KERNEL_START = "msatools.kernel start"
"""Key of the program's cache."""


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
