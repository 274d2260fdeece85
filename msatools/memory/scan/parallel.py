# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Scans the memmap in parts, by one process or several.

The parts do not depend on the number of workers, and are added up in pfn order. So the
result does not depend on it either.
"""

import copy
import os
from collections.abc import Callable, Sequence

import drgn
from msgspec import Struct

from msatools.kernel.reader import Reader
from msatools.kernel.session import Progress
from msatools.memory.owners.owners import OwnedPages
from msatools.memory.pages.layout import PageLayout
from msatools.memory.pages.memmap import MemmapRange
from msatools.memory.pages.observer import Observer
from msatools.memory.scan.result import ScanResult
from msatools.memory.scan.scan import prepare, scan
from msatools.memory.scan.sums import Finals
from msatools.memory.scan.workers import do_in_order
from msatools.target.kcore import open_again

Part = list[MemmapRange]

_PART_PAGES = 1 << 17
"""Minimum pages of a part, except the last: sending its result then costs little."""

_MAX_PARTS = 512
"""Approximate maximum number of parts: each costs the parent and the caches."""

_PAGES_PER_WORKER = 1 << 19
"""Pages from which on a worker pays off (2 GiB): fork and exit take some 5 ms, the scan
of these pages 4 ms in an ELF dump and 20 to 40 ms in a kdump."""


class Scanned(Struct, frozen=True):
    """The result of a scan, and the number of parts that were redone."""

    result: ScanResult
    redone: int
    """Parts that the parent scanned because workers ended early."""


class _PartResult(Struct, frozen=True):
    """The result of one part, with the observers' sums and the reads."""

    result: ScanResult
    observers: list[Observer]
    reads: int
    bytes: int


def cores() -> int:
    """Count the CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def workers_by_default(prog: drgn.Program, ranges: Sequence[MemmapRange]) -> int:
    """Return the default number of workers: on a live kernel, one."""
    if prog.flags & drgn.ProgramFlags.IS_LIVE:
        return 1
    pages = sum(item.pages for item in ranges)
    return max(1, min(pages // _PAGES_PER_WORKER, cores()))


def can_share(prog: drgn.Program) -> bool:
    """Return whether forked processes can share the program: not over QMP."""
    live, local = drgn.ProgramFlags.IS_LIVE, drgn.ProgramFlags.IS_LOCAL
    return not prog.flags & live or bool(prog.flags & local)


def cut(ranges: Sequence[MemmapRange]) -> list[Part]:
    """Cut the memmap into parts of about the same number of struct pages."""
    pages = sum(item.pages for item in ranges)
    part_pages = max(_PART_PAGES, -(-pages // _MAX_PARTS))
    parts: list[Part] = []
    held = part_pages
    for item in ranges:
        if held >= part_pages:
            parts.append([])
            held = 0
        parts[-1].append(item)
        held += item.pages
    return parts


def scan_parts(
    reader: Reader,
    layout: PageLayout,
    ranges: Sequence[MemmapRange],
    owned: OwnedPages,
    progress: Progress | None = None,
    observers: Sequence[Observer] = (),
    finals: Finals | None = None,
    workers: int = 1,
) -> Scanned:
    """
    Classify every struct page of the ranges: see :func:`scan`.

    :param workers: Maximum number of processes. They are forked, and read through their
        copies of the program: see :func:`can_share`.
    """
    parts = cut(ranges)
    overall = _OverallProgress(parts, progress)

    def scan_one(
        number: int,
        part_observers: Sequence[Observer],
        within: Progress | None,
        result: ScanResult | None = None,
    ) -> ScanResult:
        part = parts[number]
        return scan(reader, layout, part, owned, within, part_observers, finals, result)

    if workers > 1:
        prepare(reader, layout)
        return _share_out(scan_one, reader, observers, overall, workers)
    result = ScanResult()
    for number in range(len(parts)):
        scan_one(number, observers, overall.within, result)
        overall.add(number)
    return Scanned(result, 0)


def _share_out(
    scan_one: Callable[[int, Sequence[Observer], None], ScanResult],
    reader: Reader,
    observers: Sequence[Observer],
    overall: "_OverallProgress",
    workers: int,
) -> Scanned:
    fresh = copy.deepcopy(list(observers))
    result = ScanResult()

    def work(number: int) -> _PartResult:
        part_observers = copy.deepcopy(fresh)
        reads, size = reader.reads, reader.bytes
        scanned = scan_one(number, part_observers, None)
        scanned.join()
        part = _PartResult(
            scanned, part_observers, reader.reads - reads, reader.bytes - size
        )
        # take() adds the reads, also of parts that this process did itself.
        reader.reads, reader.bytes = reads, size
        return part

    def take(part: _PartResult) -> None:
        result.merge(part.result)
        for observer, later in zip(observers, part.observers, strict=True):
            observer.merge(later)
        reader.reads += part.reads
        reader.bytes += part.bytes

    count = len(overall.pages)
    redone = do_in_order(
        work,
        count,
        min(workers, count),
        take,
        overall.add,
        begin=lambda: open_again(reader.prog),
    )
    return Scanned(result, redone)


class _OverallProgress:
    """Reports the progress of the scan over all parts."""

    def __init__(self, parts: list[Part], progress: Progress | None) -> None:
        self.pages = [sum(item.pages for item in part) for part in parts]
        """Pages of each part."""

        self.total = sum(self.pages)
        self.within = progress and self._within
        """Progress callback for the next part."""

        self._progress = progress
        self._done = 0

    def add(self, number: int) -> None:
        """Report that a part is done."""
        self._done += self.pages[number]
        if self._progress is not None:
            self._progress(self._done, self.total)

    def _within(self, done: int, total: int) -> None:
        assert self._progress is not None
        self._progress(self._done + done, self.total)
