# SPDX-License-Identifier: LGPL-2.1-or-later

"""``--by section``: what is in each memory section."""

from dataclasses import dataclass, field

import numpy as np

from msatools.kernel.zones import spanning
from msatools.memory.by.groups import PageGroup
from msatools.memory.pages.classify import Block
from msatools.memory.pages.counting import Counts, class_counts, named
from msatools.memory.pages.memmap import MemmapRange, pages_per_section
from msatools.memory.pages.zonekeys import node_and_zone, node_zone_keys
from msatools.memory.scan.context import ScanContext


@dataclass(frozen=True)
class SectionGroup(PageGroup):
    """The pages of one memory section."""

    node: int | None
    zones: tuple[str, ...]


@dataclass
class BySection:
    """Pages by section and class. A block lies within one section."""

    each: int
    """Pages a section."""

    counts: dict[int, Counts] = field(default_factory=dict)
    keys: dict[int, set[int]] = field(default_factory=dict)
    """Nodes and zones that struct pages name, as in ``node_zone_keys()``."""

    def observe(self, block: Block) -> None:
        keys = node_zone_keys(block)
        found = {keys} if isinstance(keys, int) else set(np.unique(keys).tolist())
        counts = class_counts(block.codes, len(block))[0]
        self._add(block.pfn // self.each, counts, found)

    def merge(self, later: "BySection") -> None:
        for section, counts in later.counts.items():
            self._add(section, counts, later.keys[section])

    def _add(self, section: int, counts: Counts, keys: set[int]) -> None:
        if section in self.counts:
            self.counts[section] += counts
            self.keys[section] |= keys
        else:
            self.counts[section], self.keys[section] = counts, set(keys)


class SectionView:
    """Groups by section, in the order of their pfns: a machine has many alike."""

    def __init__(self, scene: ScanContext) -> None:
        self.observer = BySection(pages_per_section(scene.prog))
        self._scene = scene
        self._ranges: dict[int, list[MemmapRange]] = {}
        for part in scene.ranges:
            self._ranges.setdefault(part.section, []).append(part)

    def groups(self) -> tuple[SectionGroup, ...]:
        return tuple(map(self._group, sorted(self.observer.counts)))

    def _group(self, section: int) -> SectionGroup:
        counts = self.observer.counts[section]
        first, last = self._ranges[section][0], self._ranges[section][-1]
        places = (
            node_and_zone(key, self._scene.layout)
            for key in self.observer.keys[section]
        )
        zones = spanning(
            [place for place in places if place is not None],
            self._scene.zones,
            first.pfn,
            last.pfn + last.pages,
        )
        return SectionGroup(
            key=str(section),
            name=f"pfn {first.pfn:#x}-{last.pfn + last.pages - 1:#x}",
            pages=int(counts.sum()),
            classes=named(counts),
            node=zones[0].node if zones else None,
            zones=tuple(dict.fromkeys(zone.name for zone in zones)),
        )
