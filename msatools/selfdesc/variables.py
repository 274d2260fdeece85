# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lookup of the kernel's variables by name, which may not exist."""

import drgn

from msatools.selfdesc.lookups import lookups


def find_variable(prog: drgn.Program, name: str) -> drgn.Object:
    """Return a variable of the kernel.

    DWARF may have a variable that the compiler optimised out, or a declaration without
    a definition. For these drgn returns an absent object, which raises only when used.

    :raises LookupError: if the kernel has no such variable, or it is absent
    """
    try:
        found = prog[name]
        if found.absent_:
            raise LookupError(f"{name} has no place in this kernel")
    except LookupError:
        lookups(prog).variables_missing.add(name)
        raise
    return found
