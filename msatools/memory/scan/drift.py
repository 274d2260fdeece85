# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Measures how much a running kernel changed its pages during the scan.

There are two measures. The kernel counts the pages that it allocates and frees: these
counts are exact, but include pages that were allocated and freed again between. And a
sample of the struct pages is read again after the scan: a page that changed was counted
as something that it no longer was when the scan ended.
"""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.reader import Reader, distinct
from msatools.kernel.report import LossLog
from msatools.kernel.vmstat import PAGES_FREED, pages_allocated, vm_events
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import Block, FarHead, classify, where
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange
from msatools.memory.scan.model import ScanChanges

RUN_PAGES = 512
"""Pages of a run, which are read again at once: a huge page of x86-64."""

_RUNS = 32
"""Runs to read again: 1 MiB of struct pages in all; 4 GiB of memory has 64 MiB."""


class DriftSample(Struct):
    """A sample of struct pages as the scan read them."""

    starts: npt.NDArray[np.uint64]
    """First pfn of each run, ascending."""

    seen: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Address and data of each run's struct pages, by first pfn."""

    def observe(self, block: Block) -> None:
        # searchsorted() would convert the whole array if the types differed.
        ends = np.array((block.pfn, block.pfn + len(block)), np.uint64)
        first, last = np.searchsorted(self.starts, ends)
        size = block.layout.size
        for pfn in self.starts[first:last].tolist():
            begin = (pfn - block.pfn) * size
            data = bytes(block.data[begin : begin + RUN_PAGES * size])
            self.seen[pfn] = block.address + begin, data

    def merge(self, later: "DriftSample") -> None:
        self.seen.update(later.seen)


def sample_of(ranges: Sequence[MemmapRange]) -> DriftSample:
    """Choose runs at random with equal probability."""
    ends = np.cumsum([0, *(part.pages // RUN_PAGES for part in ranges)])
    runs = int(ends[-1])
    chosen = np.array(sorted(random.sample(range(runs), min(_RUNS, runs))), np.int64)
    parts = np.searchsorted(ends, chosen, side="right") - 1
    firsts = np.array([part.pfn for part in ranges], np.uint64)
    within = (chosen - ends[parts]).astype(np.uint64)
    return DriftSample(firsts[parts] + within * np.uint64(RUN_PAGES))


class Watch:
    """Measures the changes of a running kernel, from construction to :meth:`end`."""

    def __init__(
        self,
        reader: Reader,
        layout: PageLayout,
        ranges: Sequence[MemmapRange],
        losses: LossLog,
    ) -> None:
        self._reader = reader
        self._layout = layout
        self._pages = sum(part.pages for part in ranges)
        self._losses = losses
        self.sample = sample_of(ranges)
        """Observer to pass to the scan."""
        self._before = self._events()

    def end(self) -> ScanChanges:
        """Return the changes, after the scan."""
        after = self._events()
        pages = changed = folios = 0
        for pfn, (address, data) in self.sample.seen.items():
            try:
                now = self._reader.read(address, len(data))
            except UNREADABLE:
                # The memory was removed meanwhile.
                continue
            pages += len(data) // self._layout.size
            if now == data:
                # The usual case: classifying takes longer than reading.
                continue
            heads = changed_pages(data, now, pfn, address, self._layout)
            changed += len(heads)
            folios += len(distinct(heads))
        return ScanChanges(
            allocated_pages=_difference(self._before, after, 0),
            freed_pages=_difference(self._before, after, 1),
            reread_pages=pages,
            changed_pages=changed,
            changed_folios=folios,
            about_folios=round(folios * self._pages / pages) if pages else None,
        )

    def _events(self) -> tuple[int, int] | None:
        """Return pages allocated and freed since boot; ``None`` if not counted."""
        prog = self._reader.prog
        try:
            allocated = pages_allocated(prog)
            names = (*allocated, PAGES_FREED)
            counts = vm_events(self._reader, names, self._losses)
        except LOST:
            return None
        return sum(counts[name] for name in allocated), counts[PAGES_FREED]


def _difference(
    before: tuple[int, int] | None, after: tuple[int, int] | None, which: int
) -> int | None:
    if before is None or after is None:
        return None
    return after[which] - before[which]


def changed_pages(
    before: bytes, after: bytes, pfn: int, address: int, layout: PageLayout
) -> npt.NDArray[np.intp]:
    """
    Find the pages of a run whose class, owner or folio changed.

    :param before: The run's struct pages; *pfn* and *address* are those of the first.
    :return: Index in the run of the head of each changed page's folio; negative or too
        large if outside. It is the new folio if the page is in one, else the old one,
        or the page itself.
    """
    then, now = (
        classify(data, pfn, address, layout, _no_far_head) for data in (before, after)
    )
    had, has = _heads(then), _heads(now)
    changed = (then.codes != now.codes) | (had != has)
    changed |= _referenced(then) != _referenced(now)
    changed |= np.isin(now.codes, _MAPPED) & (then.mapping != now.mapping)
    folios = np.where(has != np.arange(len(now)), has, had)
    heads: npt.NDArray[np.intp] = folios[where(changed)]
    return heads


_MAPPED = (PageClass.ANON, PageClass.KSM, PageClass.FILE, PageClass.SHMEM)
"""Classes whose ``mapping`` identifies the owner; others keep other data there."""


def _heads(block: Block) -> npt.NDArray[np.intp]:
    heads = np.arange(len(block))
    heads[block.tails] = block.tail_heads
    return heads


def _referenced(block: Block) -> npt.NDArray[np.bool_]:
    """Return which pages have references; tails never have."""
    return block.counts >= np.uint64(1 << 32)


def _no_far_head(address: int) -> FarHead:
    """Return a placeholder: heads outside a run are compared only by index."""
    return FarHead(PageClass.UNATTRIBUTED, 0)
