# SPDX-License-Identifier: LGPL-2.1-or-later

"""Memory sections: as a list (``--sections``) and as a break-down."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from msatools.kernel.zones import Zone, spanning
from msatools.memory.by.groups import PageGroup, Section
from msatools.memory.pages.classify import Block
from msatools.memory.pages.counting import Counts, class_counts, named
from msatools.memory.pages.memmap import MemmapRange, pages_per_section
from msatools.memory.pages.zonekeys import node_and_zone, node_zone_keys
from msatools.memory.scan.context import ScanContext
from msatools.target.model import Address


@dataclass(frozen=True)
class SectionGroup(PageGroup):
    """The pages of one memory section."""

    node: int | None
    zones: tuple[str, ...]


@dataclass
class SectionZones:
    """The nodes and zones that struct pages of each section name."""

    each: int
    """Pages a section. A block lies within one section."""

    keys: dict[int, set[int]] = field(default_factory=dict)
    """By section, as of ``node_zone_keys()``."""

    def observe(self, block: Block) -> None:
        keys = node_zone_keys(block)
        found = {keys} if isinstance(keys, int) else set(np.unique(keys).tolist())
        self.keys.setdefault(block.pfn // self.each, set()).update(found)

    def merge(self, later: "SectionZones") -> None:
        for section, keys in later.keys.items():
            self.keys.setdefault(section, set()).update(keys)


@dataclass
class BySection(SectionZones):
    """Pages by section and class, and their nodes and zones."""

    counts: dict[int, Counts] = field(default_factory=dict)

    def observe(self, block: Block) -> None:
        super().observe(block)
        self._add(block.pfn // self.each, class_counts(block.codes, len(block))[0])

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
    """Groups by section, in the order of their pfns: a machine has many alike."""

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
            zones=tuple(dict.fromkeys(zone.name for zone in zones)),
        )


def list_sections(
    context: ScanContext, ranges: Iterable[MemmapRange], seen: SectionZones
) -> tuple[Section, ...]:
    """
    List the memory sections.

    :param ranges: All of the memmap, offline sections as well.
    :param seen: What the scan met of those that are not offline.
    """
    return tuple(
        _section(nr, parts, _zones(seen.keys.get(nr, ()), parts, context), context)
        for nr, parts in _by_section(ranges).items()
    )


def _section(
    nr: int, parts: Sequence[MemmapRange], zones: Sequence[Zone], context: ScanContext
) -> Section:
    first, last = parts[0], parts[-1]
    return Section(
        nr=nr,
        state=first.state,
        early=first.early,
        pfn=first.pfn,
        pages=sum(part.pages for part in parts),
        memmap=Address(first.address),
        memmap_end=Address(last.address + (last.pages - 1) * context.layout.size),
        node=zones[0].node if zones else None,
        zones=tuple(dict.fromkeys(zone.name for zone in zones)),
    )


def _by_section(ranges: Iterable[MemmapRange]) -> dict[int, list[MemmapRange]]:
    found: dict[int, list[MemmapRange]] = {}
    for part in ranges:
        found.setdefault(part.section, []).append(part)
    return found


def _zones(
    keys: Iterable[int], parts: Sequence[MemmapRange], context: ScanContext
) -> Sequence[Zone]:
    """Return the zones that struct pages of a section name and that span it."""
    places = (node_and_zone(key, context.layout) for key in keys)
    known = {place for place in places if place is not None}
    first, last = parts[0], parts[-1]
    return spanning(known, context.zones, first.pfn, last.pfn + last.pages)
