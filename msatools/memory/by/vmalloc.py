# SPDX-License-Identifier: LGPL-2.1-or-later

"""Counts pages of vmalloc areas, kernel stacks included, by caller."""

from collections import Counter

import numpy as np
from msgspec import Struct, field

from msatools.memory.by.groups import NO_OWNER, PageGroup, VmallocGroup, largest_first
from msatools.memory.by.tally import Tally, rank
from msatools.memory.owners.owners import pfns_of
from msatools.memory.owners.vmalloc import VmallocAreas, caller_modules, caller_names
from msatools.memory.pages.classify import Block, Words
from msatools.memory.scan.context import ScanContext


class AreaTally(Struct):
    """Counts pages by class and by the number of their area's caller, from 1 on."""

    pfns: Words
    """Pages of all areas, ascending."""

    callers: Words
    """Number of the caller, by page."""

    tally: Tally = field(default_factory=Tally)

    def observe(self, block: Block) -> None:
        callers = np.zeros(len(block), np.uint64)
        ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
        first, last = np.searchsorted(self.pfns, ends)
        callers[self.pfns[first:last] - np.uint64(block.pfn)] = self.callers[first:last]
        self.tally.add(callers, block.codes)

    def merge(self, later: "AreaTally") -> None:
        self.tally.merge(later.tally)


class VmallocView:
    """Functions by the pages of the areas that they allocated."""

    def __init__(self, context: ScanContext) -> None:
        areas = context.owners.areas
        self._names, numbers = _numbered(context, areas)
        self._modules = caller_modules(context.reader, areas, context.losses)
        self._areas = Counter(numbers)
        pfns = pfns_of(areas.pages, context.prog, context.layout)
        callers = np.array(numbers, np.uint64)[areas.rows]
        order = np.argsort(pfns, kind="stable")
        self.observer = AreaTally(pfns[order], callers[order])

    def groups(self) -> tuple[PageGroup, ...]:
        ranking = rank(self.observer.tally.sums(), len(self._names))
        groups: list[PageGroup] = []
        for owner in ranking.owners:
            pages, classes = owner.pages, owner.classes
            if not owner.word:
                groups.append(VmallocGroup(NO_OWNER, "in no area", pages, classes))
                continue
            name = self._names[owner.word - 1]
            areas = self._areas[owner.word]
            module = self._modules.get(name)
            shown = name if module is None else f"{name} [{module}]"
            groups.append(VmallocGroup(name, shown, pages, classes, areas, module))
        return largest_first(groups)


def _numbered(context: ScanContext, areas: VmallocAreas) -> tuple[list[str], list[int]]:
    """Number the callers' names from 1; return the names and each area's number."""
    names = caller_names(context.prog, areas)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names), 1)}
    return list(numbers), [numbers[name] for name in names]
