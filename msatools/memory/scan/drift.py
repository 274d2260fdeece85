# SPDX-License-Identifier: LGPL-2.1-or-later

"""
How much a running kernel changed its pages while their struct pages were read.

Two things tell. The kernel counts the pages that it hands out and takes back; those
counts are exact, but also have pages that were taken and given back unseen. And some of
the struct pages are read again, after the last: what has changed was counted as
something that it no longer was when the scan ended.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.kernel.vmstat import PAGES_FREED, pages_allocated, vm_events
from msatools.memory.pages.classes import PageClass
from msatools.memory.pages.classify import Block, FarHead, classify, where
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange
from msatools.memory.scan.model import ScanChanges

RUN_PAGES = 512
"""Pages read again in one piece: those of a huge page of x86-64."""

_RUNS = 32
"""In all 1 MiB of struct pages, which is little beside 64 MiB for 4 GiB of memory."""


@dataclass
class DriftSample:
    """Struct pages as the scan saw them, to be held against what they become."""

    starts: npt.NDArray[np.uint64]
    """The first pfn of each run, ascending."""

    seen: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """By first pfn: the address of its struct page, and the run's struct pages."""

    def observe(self, block: Block) -> None:
        # Keys of the array's own type, or all of it is converted at each call.
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
    """Choose runs at random, each as likely as any other."""
    ends = np.cumsum([0, *(part.pages // RUN_PAGES for part in ranges)])
    runs = int(ends[-1])
    chosen = np.array(sorted(random.sample(range(runs), min(_RUNS, runs))), np.int64)
    parts = np.searchsorted(ends, chosen, side="right") - 1
    firsts = np.array([part.pfn for part in ranges], np.uint64)
    within = (chosen - ends[parts]).astype(np.uint64)
    return DriftSample(firsts[parts] + within * np.uint64(RUN_PAGES))


class Watch:
    """Watches a running kernel during a scan; begins when it is made."""

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
        """To look on while the scan goes on."""
        self._before = self._passed()

    def end(self) -> ScanChanges:
        """Return what has changed, once the scan is done."""
        after = self._passed()
        pages = changed = folios = 0
        for pfn, (address, data) in self.sample.seen.items():
            try:
                now = self._reader.read(address, len(data))
            except drgn.FaultError:
                # It was taken away meanwhile.
                continue
            pages += len(data) // self._layout.size
            if now == data:
                # As most are, and to classify them takes longer than to read them.
                continue
            found = changed_pages(data, now, pfn, address, self._layout)
            changed += len(found)
            folios += len(np.unique(found))
        return ScanChanges(
            allocated_pages=_difference(self._before, after, 0),
            freed_pages=_difference(self._before, after, 1),
            reread_pages=pages,
            changed_pages=changed,
            changed_folios=folios,
            about_folios=round(folios * self._pages / pages) if pages else None,
        )

    def _passed(self) -> tuple[int, int] | None:
        """Count pages allocated and freed since boot, if this kernel does."""
        prog = self._reader.prog
        try:
            allocated = pages_allocated(prog)
            names = (*allocated, PAGES_FREED)
            counts = vm_events(self._reader, names, self._losses)
        except (LookupError, drgn.FaultError):
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
    Find the pages of a run that are of another class, owner or folio than they were.

    :param before: The run's struct pages; *pfn* and *address* are of the first.
    :return: For each such page the number, in the run, of the first page of its folio;
        negative or too large if outside. It is the new folio, if the page is part of
        one, else the one that it was part of, or the page itself.
    """
    then, now = (
        classify(data, pfn, address, layout, _elsewhere) for data in (before, after)
    )
    had, has = _heads(then), _heads(now)
    changed = (then.codes != now.codes) | (had != has) | (_used(then) != _used(now))
    changed |= np.isin(now.codes, _MAPPED) & (then.mapping != now.mapping)
    folios = np.where(has != np.arange(len(now)), has, had)
    found: npt.NDArray[np.intp] = folios[where(changed)]
    return found


_MAPPED = (PageClass.ANON, PageClass.KSM, PageClass.FILE, PageClass.SHMEM)
"""Classes whose pages say in ``mapping`` whose they are; others keep anything there."""


def _heads(block: Block) -> npt.NDArray[np.intp]:
    heads = np.arange(len(block))
    heads[block.tails] = block.tail_heads
    return heads


def _used(block: Block) -> npt.NDArray[np.bool_]:
    """Return which pages are referenced; tails never are."""
    return block.counts >= np.uint64(1 << 32)


def _elsewhere(address: int) -> FarHead:
    """Return a stand-in: heads outside of a run are not read, their place is enough."""
    return FarHead(PageClass.UNATTRIBUTED, 0)
