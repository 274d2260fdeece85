# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory of devices that has struct pages (mm/memremap.c, struct dev_pagemap).

Called for the ranges of the memmap: what is a device's is told by its pagemap, not by
a struct page, because the first ones of a namespace may never have been initialised.
"""

from itertools import pairwise
from typing import NamedTuple

import drgn

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.xarray import xarray_entries
from msatools.selfdesc.find import drgn_lookups, find_type, find_variable

_ALTMAP_VALID = 1
"""PGMAP_ALTMAP_VALID (include/linux/memremap.h)."""

_MOST = 1 << 12
"""Upper bound of the number of pagemaps, and of the ranges of one."""


class DeviceRange(NamedTuple):
    """Consecutive pages of a device."""

    pfn: int
    end: int
    first_set: int
    """First page whose struct page is initialised: the struct pages may lie on the
    device itself, and those that describe where they lie are left as they were
    (memmap_init_zone_device())."""


def device_ranges(reader: Reader, losses: LossLog) -> list[DeviceRange] | None:
    """Return the ranges of all devices, ascending; ``None`` if they are unknown."""
    prog = reader.prog
    try:
        with drgn_lookups:
            root = find_variable(prog, "pgmap_array").address_
            type_ = find_type(prog, "struct dev_pagemap")
    except MissingError:
        return None  # CONFIG_ZONE_DEVICE=n
    aside = LossLog()
    entries = xarray_entries(reader, root, aside, "the memory of devices")
    losses.add(aside)
    shift = int(find_variable(prog, "PAGE_SHIFT").value_())
    found: set[DeviceRange] = set()
    for address in list({entry for _, _, entry in entries})[:_MOST]:
        try:
            with drgn_lookups:
                pagemap = drgn.Object(prog, type_, address=address)
                found.update(_ranges(pagemap, shift))
        except MissingError:
            return None
        except UNREADABLE as error:
            losses.lose(Loss.SECTION_TABLE, f"cannot read memory of a device: {error}")
    if aside.lost:
        return None
    return sorted(found)


def _ranges(pagemap: drgn.Object, shift: int) -> list[DeviceRange]:
    """Return the ranges of one pagemap; only the first can describe itself."""
    altmap = pagemap.altmap
    has_altmap = int(pagemap.flags) & _ALTMAP_VALID
    found = []
    for number in range(min(int(pagemap.nr_range), _MOST)):
        area = pagemap.ranges[number] if number else pagemap.range
        first, end = int(area.start) >> shift, (int(area.end) + 1) >> shift
        if not first < end:
            continue
        first_set = first
        if has_altmap and not number:
            # vmem_altmap_offset()
            offset = int(altmap.reserve) + int(altmap.free)
            first_set = min(max(int(altmap.base_pfn) + offset, first), end)
        found.append(DeviceRange(first, end, first_set))
    return found


def pieces(
    first: int, count: int, devices: list[DeviceRange]
) -> list[tuple[int, int, DeviceRange | None]]:
    """Split a run of pages where devices begin, end, or begin to be initialised.

    :return: First page, number of pages, and the device of each piece.
    """
    end = first + count
    cuts = {first, end}
    for device in devices:
        if device.pfn < end and device.end > first:
            cuts.update(pfn for pfn in device if first < pfn < end)
    ordered = sorted(cuts)
    return [
        (at, after - at, next((d for d in devices if d.pfn <= at < d.end), None))
        for at, after in pairwise(ordered)
    ]
