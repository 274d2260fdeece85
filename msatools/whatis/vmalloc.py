# SPDX-License-Identifier: LGPL-2.1-or-later

"""Areas of the kernel's vmalloc range (mm/vmalloc.c)."""

from collections.abc import Iterator

import drgn

from msatools.errors import UNREADABLE, DamagedDataError, MissingError
from msatools.kernel.functions import function_name
from msatools.kernel.losses import Loss
from msatools.locks.base.ranges import find_range
from msatools.memory.owners.vmalloc import MAX_NODES
from msatools.selfdesc.find import drgn_lookups, find_variable
from msatools.target.addresses import KERNEL_HALF
from msatools.target.model import Address
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import VmallocArea

_USES = {0x1: "ioremap", 0x2: "vmalloc", 0x4: "vmap", 0x8: "vmalloc_user"}
"""VM_IOREMAP, VM_ALLOC, VM_MAP and VM_USERMAP (include/linux/vmalloc.h)."""

_ENDS = "va_start", "va_end"

_NO_GUARD = 0x40
"""VM_NO_GUARD: the area does not end with a page at which nothing is mapped."""


def find_area(lookup: Lookup, address: int) -> VmallocArea | None:
    """Return the area that contains an address; ``None`` if there is none."""
    try:
        with drgn_lookups:
            area = _find(lookup, address)
            if not area:
                return None
            start, end, vm = lookup.structs.members(area, "vmap_area", *_ENDS, "vm")
            if vm < KERNEL_HALF:
                return _area(start, end - start, address, "vm_map_ram")
            flags, caller, pages, physical = lookup.structs.members(
                vm, "vm_struct", "flags", "caller", "nr_pages", "phys_addr"
            )
    except MissingError:
        return None
    except UNREADABLE as error:
        lookup.losses.lose(Loss.VMALLOC, f"cannot read an area of vmalloc: {error}")
        return None
    use = next((use for bit, use in _USES.items() if flags & bit), "reserved")
    name = function_name(lookup.prog, caller) if caller else None
    device = Address(physical) if use == "ioremap" and not pages else None
    guard = not flags & _NO_GUARD and address >= end - lookup.page_size
    return _area(start, end - start, address, use, name, device, guard)


def _find(lookup: Lookup, address: int) -> int:
    """Return the address of the ``struct vmap_area`` with an address; 0 if none has.

    :raises drgn.FaultError: if none is found, and a part of the trees cannot be read
    """
    lost: drgn.FaultError | None = None
    for root in _roots(lookup.prog):
        try:
            area = find_range(
                lookup.structs, root, "vmap_area", "rb_node", _ENDS, address
            )
        except UNREADABLE as error:
            lost = error
            continue
        if area:
            return area
    if lost is not None:
        raise lost
    return 0


def _roots(prog: drgn.Program) -> Iterator[int]:
    """Yield the address of the node at the root of each tree of areas in use."""
    try:
        nodes = find_variable(prog, "vmap_nodes")
    except MissingError:
        # Before Linux kernel commit d093602919ad ("mm: vmalloc: remove global
        # vmap_area_root rb-tree") (in v6.9).
        yield find_variable(prog, "vmap_area_root").rb_node.value_()
        return
    count = find_variable(prog, "nr_vmap_nodes").value_()
    if not 0 < count <= MAX_NODES:
        raise DamagedDataError(f"there cannot be {count:,} trees", nodes.value_())
    for i in range(count):
        yield nodes[i].busy.root.rb_node.value_()


def _area(
    start: int,
    size: int,
    address: int,
    use: str,
    caller: str | None = None,
    physical: Address | None = None,
    guard: bool = False,
) -> VmallocArea:
    return VmallocArea(
        start=Address(start),
        bytes=size,
        use=use,
        caller=caller,
        offset=address - start,
        guard=guard,
        physical=physical,
    )
