# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's functions by name and by address, each looked up once a program.

With a vmlinux, drgn searches all symbols each time: half a millisecond.
"""

import drgn


def has_function(prog: drgn.Program, name: str) -> bool:
    """Tell whether the kernel has a function of that name."""
    return _look_up(prog, name) is not None


def function_name(prog: drgn.Program, address: int) -> str:
    """Name the function or variable that an address lies in; the address if none."""
    return _look_up(prog, address) or hex(address)


def _look_up(prog: drgn.Program, key: str | int) -> str | None:
    # A symbol would keep the program, whose cache this is, for ever.
    known: dict[str | int, str | None] = prog.cache.setdefault("msatools.functions", {})
    if key not in known:
        try:
            known[key] = prog.symbol(key).name.partition(".")[0]
        except LookupError:
            known[key] = None
    return known[key]
