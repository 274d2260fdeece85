# SPDX-License-Identifier: LGPL-2.1-or-later

"""Where the virtual memory map is: the address of struct page number 0."""

import drgn

from msatools.selfdesc.variables import find_variable


def vmemmap_base(prog: drgn.Program) -> int:
    """
    Find the address that the struct page of pfn 0 has or would have.

    x86-64 keeps it in a variable; elsewhere drgn works it out from the table of
    memory sections, which a truncated dump may have lost.

    :raises LookupError: if the kernel has no virtual memory map
    :raises drgn.FaultError: if the dump lacks what tells
    """
    try:
        base: int = find_variable(prog, "vmemmap_base").value_()
    except LookupError:
        base = find_variable(prog, "vmemmap").value_()
    return base
