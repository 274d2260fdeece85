# SPDX-License-Identifier: LGPL-2.1-or-later

"""How much swap there is (mm/swapfile.c)."""

import drgn
from msgspec import Struct

from msatools.errors import LOST
from msatools.selfdesc.find import drgn_lookups, find_variable


class Swap(Struct, frozen=True):
    """All swap devices and files; ``None`` if unknown, or without CONFIG_SWAP."""

    pages: int | None
    free_pages: int | None


def read_swap(prog: drgn.Program) -> Swap:
    """Read the sizes that /proc/meminfo shows."""
    return Swap(_variable(prog, "total_swap_pages"), _variable(prog, "nr_swap_pages"))


def _variable(prog: drgn.Program, name: str) -> int | None:
    try:
        with drgn_lookups:
            found = find_variable(prog, name)
            # nr_swap_pages is an atomic_long_t.
            is_atomic = found.type_.kind == drgn.TypeKind.TYPEDEF
            return int((found.counter if is_atomic else found).value_())
    except LOST:
        return None
