# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's functions by name and by address, each looked up once per program.

With a vmlinux, drgn searches all symbols at each lookup, which takes 0.5 ms.
"""

import drgn

from msatools.errors import MissingError
from msatools.selfdesc.find import find_symbol


def has_function(prog: drgn.Program, name: str) -> bool:
    """Return whether the kernel has a function of that name."""
    return _look_up(prog, name) is not None


def function_name(prog: drgn.Program, address: int) -> str:
    """Return the name of the symbol that contains an address; the address in hex if
    not found."""
    return _look_up(prog, address) or hex(address)


def _look_up(prog: drgn.Program, key: str | int) -> str | None:
    # Names only: a Symbol holds a reference to the program, whose cache this is.
    known: dict[str | int, str | None] = prog.cache.setdefault("msatools.functions", {})
    if key not in known:
        try:
            known[key] = find_symbol(prog, key).name.partition(".")[0]
        except MissingError:
            known[key] = None
    return known[key]
