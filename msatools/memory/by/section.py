# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory sections: as a list (``--sections``) and as a break-down."""

from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from msatools.kernel.reader import distinct
from msatools.kernel.zones import DEVICE_ZONE, Zone, spanning
from msatools.memory.by.groups import PageGroup, Section
from msatools.memory.pages.classify import Block
from msatools.memory.pages.counting import Counts, class_counts, named
from msatools.memory.pages.memmap import MemmapRange, pages_per_section
from msatools.memory.pages.zonekeys import node_and_zone, node_zone_keys
from msatools.memory.scan.context import ScanContext
from msatools.target.model import Address


class SectionGroup(PageGroup, frozen=True):
    """The pages of one memory section."""

    node: int | None
    zones: tuple[str, ...]


class SectionZones(Struct):
    """Collects the nodes and zones of each section, as recorded in struct pages."""

    section_pages: int
    """Pages of a section. A block lies within one section."""

    keys: dict[int, set[int]] = field(default_factory=dict)
    """Keys of ``node_zone_keys()`` by section number."""

    def observe(self, block: Block) -> None:
        keys = node_zone_keys(block)
        unique = {keys} if isinstance(keys, int) else set(distinct(keys).tolist())
        self.keys.setdefault(block.pfn // self.section_pages, set()).update(unique)

    def merge(self, later: "SectionZones") -> None:
        for section, keys in later.keys.items():
            self.keys.setdefault(section, set()).update(keys)


class BySection(SectionZones):
    """Counts pages by section and class, and collects their nodes and zones."""

    counts: dict[int, Counts] = field(default_factory=dict)

    def observe(self, block: Block) -> None:
        super().observe(block)
        self._add(
            block.pfn // self.section_pages, class_counts(block.codes, len(block))[0]
        )

    def merge(self, later: SectionZones) -> None:
        super().merge(later)
        assert isinstance(later, BySection)
        for section, counts in later.counts.items():
            self._add(section, counts)

    def _add(self, section: int, counts: Counts) -> None:
        if section in self.counts:
            self.counts[section] += counts
        else:
            self.counts[section] = counts


class SectionView:
    """Groups by section, in pfn order: many sections are alike."""

    def __init__(self, context: ScanContext) -> None:
        self.observer = BySection(pages_per_section(context.prog))
        self._context = context
        self._parts = _by_section(context.ranges)

    def groups(self) -> tuple[SectionGroup, ...]:
        return tuple(map(self._group, sorted(self.observer.counts)))

    def _group(self, section: int) -> SectionGroup:
        counts = self.observer.counts[section]
        parts = self._parts[section]
        last = parts[-1]
        zones = _zones(self.observer.keys[section], parts, self._context)
        return SectionGroup(
            key=str(section),
            name=f"pfn {parts[0].pfn:#x}-{last.pfn + last.pages - 1:#x}",
            pages=int(counts.sum()),
            classes=named(counts),
            node=zones[0].node if zones else None,
            zones=_names(self.observer.keys[section], zones, self._context),
        )


def list_sections(
    context: ScanContext, ranges: Iterable[MemmapRange], seen: SectionZones
) -> tuple[Section, ...]:
    """
    List the memory sections.

    :param ranges: All of the memmap, offline sections as well.
    :param seen: Nodes and zones of the sections that were scanned.
    """
    return tuple(
        _section(nr, parts, seen.keys.get(nr, ()), context)
        for nr, parts in _by_section(ranges).items()
    )


def _section(
    nr: int, parts: Sequence[MemmapRange], keys: Iterable[int], context: ScanContext
) -> Section:
    first, last = parts[0], parts[-1]
    zones = _zones(keys, parts, context)
    return Section(
        nr=nr,
        state=first.state,
        early=first.early,
        pfn=first.pfn,
        pages=sum(part.pages for part in parts),
        memmap=Address(first.address),
        memmap_end=Address(last.address + (last.pages - 1) * context.layout.size),
        node=zones[0].node if zones else None,
        zones=_names(keys, zones, context),
    )


def _names(
    keys: Iterable[int], zones: Sequence[Zone], context: ScanContext
) -> tuple[str, ...]:
    """Return the names of zones, and that of devices, of which no page is present."""
    names = dict.fromkeys(zone.name for zone in zones)
    pairs = (node_and_zone(key, context.layout) for key in keys)
    device = context.layout.device_zone
    if any(pair is not None and pair[1] == device for pair in pairs):
        names[DEVICE_ZONE] = None
    return tuple(names)


def _by_section(ranges: Iterable[MemmapRange]) -> dict[int, list[MemmapRange]]:
    sections: dict[int, list[MemmapRange]] = {}
    for part in ranges:
        sections.setdefault(part.section, []).append(part)
    return sections


def _zones(
    keys: Iterable[int], parts: Sequence[MemmapRange], context: ScanContext
) -> Sequence[Zone]:
    """Return the zones recorded in a section's struct pages that also span it."""
    pairs = (node_and_zone(key, context.layout) for key in keys)
    known = {pair for pair in pairs if pair is not None}
    first, last = parts[0], parts[-1]
    return spanning(known, context.zones, first.pfn, last.pfn + last.pages)
