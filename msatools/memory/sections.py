# SPDX-License-Identifier: LGPL-2.1-or-later

"""The memory sections as a report lists them."""

from collections import defaultdict

import drgn
import numpy as np

from msatools.kernel.zones import Zone, spanning
from msatools.memory.model import Section
from msatools.memory.pages.classify import Block
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange, pages_per_section
from msatools.memory.pages.zonekeys import node_and_zone, node_zone_keys
from msatools.target.model import Address

_Zones = dict[tuple[int, int], Zone]
"""By node and zone number."""


class SectionZones:
    """Remembers which nodes and zones the pages of each pfn range are in."""

    def __init__(self) -> None:
        self.keys: dict[int, set[int]] = {}

    def observe(self, block: Block) -> None:
        keys = node_zone_keys(block)
        found = {keys} if isinstance(keys, int) else set(np.unique(keys).tolist())
        self.keys[block.pfn] = found

    def merge(self, later: "SectionZones") -> None:
        self.keys.update(later.keys)


def list_sections(
    prog: drgn.Program,
    ranges: list[MemmapRange],
    layout: PageLayout,
    seen: SectionZones,
    zones: _Zones,
) -> tuple[Section, ...]:
    """List the sections of the ranges, offline ones as well."""
    per_section = pages_per_section(prog)
    places: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for pfn, keys in seen.keys.items():
        found = (node_and_zone(key, layout) for key in keys)
        places[pfn // per_section] |= {place for place in found if place is not None}
    by_section: dict[int, list[MemmapRange]] = defaultdict(list)
    for part in ranges:
        by_section[part.section].append(part)
    return tuple(
        _section(nr, parts, places[nr], layout, zones)
        for nr, parts in by_section.items()
    )


def _section(
    nr: int,
    parts: list[MemmapRange],
    places: set[tuple[int, int]],
    layout: PageLayout,
    zones: _Zones,
) -> Section:
    first, last = parts[0], parts[-1]
    spanned = spanning(places, zones, first.pfn, last.pfn + last.pages)
    return Section(
        nr=nr,
        state=first.state,
        early=first.early,
        pfn=first.pfn,
        pages=sum(part.pages for part in parts),
        memmap=Address(first.address),
        memmap_end=Address(last.address + (last.pages - 1) * layout.size),
        node=spanned[0].node if spanned else None,
        zones=tuple(dict.fromkeys(zone.name for zone in spanned)),
    )
