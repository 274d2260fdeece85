# SPDX-License-Identifier: LGPL-2.1-or-later

"""
The memmap scanned in parts, by one process or several.

The parts are the same however many workers there are, and are added up in pfn order:
so the result is the same, too.
"""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import drgn

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
"""At least, but for the last part: what comes back of it costs little beside it."""

_MAX_PARTS = 512
"""At most, or a few more: each costs the parent some work, and the workers' caches."""

_PAGES_EACH = 1 << 19
"""That a worker pays for (2 GiB): to fork and end one takes some 5 ms, and to scan this
4 ms in an ELF dump, 20 to 40 in a kdump."""


@dataclass(frozen=True)
class Scanned:
    """The result of a scan, and how it came about."""

    result: ScanResult
    redone: int
    """Parts that a worker left undone."""


@dataclass(frozen=True)
class _Seen:
    """The result of one part."""

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
    return max(1, min(pages // _PAGES_EACH, cores()))


def can_share(prog: drgn.Program) -> bool:
    """Return whether forked processes can share the program: not over QMP."""
    live, local = drgn.ProgramFlags.IS_LIVE, drgn.ProgramFlags.IS_LOCAL
    return not prog.flags & live or bool(prog.flags & local)


def cut(ranges: Sequence[MemmapRange]) -> list[Part]:
    """Cut the memmap into parts of about the same number of struct pages."""
    pages = sum(item.pages for item in ranges)
    each = max(_PART_PAGES, -(-pages // _MAX_PARTS))
    parts: list[Part] = []
    held = each
    for item in ranges:
        if held >= each:
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

    :param workers: How many processes may do so at the same time. They are forked, and
        read by their copies of the program: see :func:`can_share`.
    """
    parts = cut(ranges)
    shown = _Shown(parts, progress)

    def scan_one(
        number: int,
        lookers: Sequence[Observer],
        within: Progress | None,
        found: ScanResult | None = None,
    ) -> ScanResult:
        part = parts[number]
        return scan(reader, layout, part, owned, within, lookers, finals, found)

    if workers > 1:
        prepare(reader, layout)
        return _share_out(scan_one, reader, observers, shown, workers)
    result = ScanResult()
    for number in range(len(parts)):
        scan_one(number, observers, shown.within, result)
        shown.add(number)
    return Scanned(result, 0)


def _share_out(
    scan_one: Callable[[int, Sequence[Observer], None], ScanResult],
    reader: Reader,
    observers: Sequence[Observer],
    shown: "_Shown",
    workers: int,
) -> Scanned:
    fresh = copy.deepcopy(list(observers))
    result = ScanResult()

    def work(number: int) -> _Seen:
        lookers = copy.deepcopy(fresh)
        reads, size = reader.reads, reader.bytes
        found = scan_one(number, lookers, None)
        found.join()
        seen = _Seen(found, lookers, reader.reads - reads, reader.bytes - size)
        # They are added when the result is taken, whoever did the work.
        reader.reads, reader.bytes = reads, size
        return seen

    def take(seen: _Seen) -> None:
        result.merge(seen.result)
        for observer, later in zip(observers, seen.observers, strict=True):
            observer.merge(later)
        reader.reads += seen.reads
        reader.bytes += seen.bytes

    count = len(shown.pages)
    redone = do_in_order(
        work,
        count,
        min(workers, count),
        take,
        shown.add,
        begin=lambda: open_again(reader.prog),
    )
    return Scanned(result, redone)


class _Shown:
    """Progress of the scan over all parts."""

    def __init__(self, parts: list[Part], progress: Progress | None) -> None:
        self.pages = [sum(item.pages for item in part) for part in parts]
        """Of each part."""

        self.total = sum(self.pages)
        self.within = progress and self._within
        """The progress callback for the part that comes next."""

        self._progress = progress
        self._done = 0

    def add(self, number: int) -> None:
        """Show that a part is done."""
        self._done += self.pages[number]
        if self._progress is not None:
            self._progress(self._done, self.total)

    def _within(self, done: int, total: int) -> None:
        assert self._progress is not None
        self._progress(self._done + done, self.total)
