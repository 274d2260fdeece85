# SPDX-License-Identifier: LGPL-2.1-or-later

"""Nodes and zones of physical memory that can be read."""

from collections.abc import Iterable, Iterator, Mapping

import drgn
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from msgspec import Struct

from msatools.errors import UNREADABLE
from msatools.kernel.losses import Loss
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.strings import read_string
from msatools.selfdesc.find import ask_each

DEVICE_ZONE = "Device"
"""Name of the zone of devices' memory, of which no page counts as present."""

_MAX_NAME = 64
"""Maximum bytes of a zone's name; the longest has 7."""


class Zone(Struct, frozen=True):
    """One populated zone."""

    object: drgn.Object
    """The ``struct zone``."""

    node: int
    number: int
    """Index of the zone in the node, as in page flags (enum zone_type)."""

    name: str
    start_pfn: int
    end_pfn: int
    """End of the spanned range, holes included."""

    present_pages: int


def online_nodes(prog: drgn.Program, losses: LossLog) -> list[drgn.Object]:
    """Find the ``struct pglist_data`` of each online node that can be read."""
    nodes = []
    try:
        for pgdat in ask_each(for_each_online_pgdat, prog):
            try:
                nodes.append(pgdat[0].read_())
            except UNREADABLE as error:
                losses.lose(Loss.NODES, f"cannot read a memory node: {error}")
    except UNREADABLE as error:
        losses.lose(Loss.NODES, f"cannot read the list of memory nodes: {error}")
    return nodes


def populated_zones(nodes: list[drgn.Object]) -> Iterator[Zone]:
    """Yield the zones that have memory."""
    for pgdat in nodes:
        for number, zone in enumerate(pgdat.node_zones):
            present = zone.present_pages.value_()
            if not present:
                continue
            start = zone.zone_start_pfn.value_()
            yield Zone(
                object=zone,
                node=pgdat.node_id.value_(),
                number=number,
                name=_name(zone),
                start_pfn=start,
                end_pfn=start + zone.spanned_pages.value_(),
                present_pages=present,
            )


def spanning(
    places: Iterable[tuple[int, int]],
    zones: Mapping[tuple[int, int], Zone],
    start_pfn: int,
    end_pfn: int,
) -> list[Zone]:
    """
    Return the zones that a range of pfns overlaps.

    :param places: Node and zone number from the flags of their struct pages. In holes
        at the end of memory they may be those of a distant zone, or of no zone.
    """
    candidates = (zones[place] for place in sorted(places) if place in zones)
    return [z for z in candidates if z.start_pfn < end_pfn and z.end_pfn > start_pfn]


def _name(zone: drgn.Object) -> str:
    try:
        return read_string(Reader(zone.prog_), zone.name.value_(), _MAX_NAME)
    except UNREADABLE:
        return "?"
