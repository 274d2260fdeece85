# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's variables by name, for whoever needs one that may not be there."""

import drgn


def find_variable(prog: drgn.Program, name: str) -> drgn.Object:
    """Return a variable of the kernel.

    DWARF may have a variable that the compiler optimised out, or a declaration without
    a definition. drgn makes an absent object of it, which raises only when it is used.

    :raises LookupError: if the kernel has no such variable, or it is absent
    """
    found = prog[name]
    if found.absent_:
        raise LookupError(f"{name} has no place in this kernel")
    return found
