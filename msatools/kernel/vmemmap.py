# SPDX-License-Identifier: LGPL-2.1-or-later

"""Address of the virtual memory map."""

from contextlib import suppress

import drgn

from msatools.errors import MissingError
from msatools.selfdesc.find import find_variable


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
