# SPDX-License-Identifier: LGPL-2.1-or-later

"""Other memory laid over that of a dump, as if it had been lost or damaged."""

from collections.abc import Callable

from drgn import Program

from msatools.target.linear import forget_direct_map


def lay_over(
    prog: Program,
    address: int,
    size: int,
    read: Callable[[int, int, int, bool], bytes],
    physical: bool = False,
) -> None:
    """Have *read* give what lies at an address, for readers that there are, too."""
    prog.add_memory_segment(address, size, read, physical)
    forget_direct_map(prog)
