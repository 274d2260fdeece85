# SPDX-License-Identifier: LGPL-2.1-or-later

"""Red-black trees of ranges of addresses, searched for the one with an address.

drgn's rb_find() does not end in a damaged tree that leads back to itself.
"""

from msatools.errors import DamagedDataError
from msatools.locks.base.struct_reader import Layout

_MAX_DEPTH = 128
"""More than the depth of any red-black tree that fits into memory."""


def find_range(
    layout: Layout, node: int, type_name: str, link: str, ends: tuple[str, str], at: int
) -> int:
    """Find the structure whose range contains an address.

    :param node: Address of the ``struct rb_node`` at the root; 0 for an empty tree.
    :param type_name: Tag of the structures.
    :param link: Their member of type ``struct rb_node``.
    :param ends: Their members with the first address, and with the one after the last.
    :return: Its address; 0 if there is none.
    :raises UNREADABLE: if a part cannot be read, or the tree has a loop
    """
    links = f"{link}.rb_left", f"{link}.rb_right"
    for _ in range(_MAX_DEPTH):
        if not node:
            return 0
        found = node - layout.offset(type_name, link)
        start, end, left, right = layout.members(found, type_name, *ends, *links)
        if start <= at < end:
            return found
        node = left if at < start else right
    raise DamagedDataError(f"a loop of {type_name}", node)
