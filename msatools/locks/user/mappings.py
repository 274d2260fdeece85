# SPDX-License-Identifier: LGPL-2.1-or-later

"""The ``struct vm_area_struct`` of address spaces.

drgn's helpers for it have no bounds: they do not end where the data is damaged.
"""

from collections.abc import Iterator

from msatools.errors import DamagedDataError
from msatools.kernel.report import LossLog
from msatools.kernel.xarray import maple_entries, maple_load
from msatools.locks.base.ranges import find_range
from msatools.locks.base.struct_reader import Layout

_MAX_MAPPINGS = 1 << 20
"""Sixteen times the default limit of one address space (vm.max_map_count)."""


def find_mapping(layout: Layout, mm: int, address: int) -> int:
    """Find the ``struct vm_area_struct`` that contains an address of user memory.

    :param mm: Address of the ``struct mm_struct``.
    :return: Its address; 0 if nothing is mapped there.
    :raises drgn.FaultError: if something on the way is damaged
    """
    if layout.has("mm_struct", "mm_mt"):
        # d4af56c5c7c6 ("mm: start tracking VMAs with maple tree") (in v6.1)
        tree = mm + layout.offset("mm_struct", "mm_mt")
        return maple_load(layout.reader, tree, address)
    node = layout.member(mm, "mm_struct", "mm_rb.rb_node")
    ends = "vm_start", "vm_end"
    return find_range(layout, node, "vm_area_struct", "vm_rb", ends, address)


def mappings_of(layout: Layout, mm: int, losses: LossLog) -> Iterator[int]:
    """Yield the addresses of all ``struct vm_area_struct`` of an address space.

    :raises UNREADABLE: if the list of an older kernel is damaged; damage of a tree
        is counted
    """
    if layout.has("mm_struct", "mm_mt"):
        tree = mm + layout.offset("mm_struct", "mm_mt")
        found = maple_entries(layout.reader, tree, losses, "the tree of mappings")
        yield from (entry for _, _, entry in found)
        return
    # 763ecb035029 ("mm: remove the vma linked list") (in v6.1)
    seen: set[int] = set()
    mapping = layout.member(mm, "mm_struct", "mmap")
    while mapping:
        if mapping in seen or len(seen) >= _MAX_MAPPINGS:
            raise DamagedDataError("a loop of mappings", mapping)
        seen.add(mapping)
        yield mapping
        mapping = layout.member(mapping, "vm_area_struct", "vm_next")
