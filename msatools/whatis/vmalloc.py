# SPDX-License-Identifier: LGPL-2.1-or-later

"""Areas of the kernel's vmalloc range (mm/vmalloc.c)."""

import drgn
from drgn.helpers.linux.mm import find_vmap_area

from msatools.kernel.functions import function_name
from msatools.kernel.losses import Loss
from msatools.target.addresses import KERNEL_HALF
from msatools.target.model import Address
from msatools.whatis.lookup import Lookup
from msatools.whatis.model import VmallocArea

_USES = {0x1: "ioremap", 0x2: "vmalloc", 0x4: "vmap", 0x8: "vmalloc_user"}
"""VM_IOREMAP, VM_ALLOC, VM_MAP and VM_USERMAP (include/linux/vmalloc.h)."""

_NO_GUARD = 0x40
"""VM_NO_GUARD: the area does not end with a page at which nothing is mapped."""


def find_area(lookup: Lookup, address: int) -> VmallocArea | None:
    """Return the area that contains an address; ``None`` if there is none."""
    try:
        area = find_vmap_area(lookup.prog, address)
        if not area:
            return None
        start, end, vm = (
            int(getattr(area, name).value_()) for name in ("va_start", "va_end", "vm")
        )
        if vm < KERNEL_HALF:
            return _area(start, end - start, address, "vm_map_ram")
        flags, caller, pages, physical = lookup.structs.members(
            vm, "vm_struct", "flags", "caller", "nr_pages", "phys_addr"
        )
    except (LookupError, AttributeError):
        return None
    except drgn.FaultError as error:
        lookup.losses.lose(Loss.VMALLOC, f"an area of vmalloc is lost: {error}")
        return None
    use = next((use for bit, use in _USES.items() if flags & bit), "reserved")
    name = function_name(lookup.prog, caller) if caller else None
    device = Address(physical) if use == "ioremap" and not pages else None
    guard = not flags & _NO_GUARD and address >= end - lookup.page_size
    return _area(start, end - start, address, use, name, device, guard)


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
