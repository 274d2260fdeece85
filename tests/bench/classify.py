# SPDX-License-Identifier: LGPL-2.1-or-later

"""How near the scan of an ELF dump comes to streaming its memmap once.

There are two limits, both of one core. One reads the memmap's bytes from the file,
which is in memory, into one small buffer; so a scan of a dump has to begin. The other
sums up an array of them: that has no system calls and copies nothing.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.memory.classes import PageClass
from msatools.memory.compiled import library
from msatools.memory.memmap import read_chunks
from msatools.memory.scan import cores, scan
from msatools.memory.sums import ScanResult
from msatools.model import values
from msatools.native import SWITCH
from tests.bench.pages import Kernel, Stream, open_kernel
from tests.bench.process import run_process
from tests.bench.timing import beside, medians
from tests.bench.workers import in_turn, repeated
from tests.bench.workers import scan_with as scan_parts_with

SCENARIOS = ("bench-6.1", "dense-6.1")
TIB_PAGES = 1 << 28
MACHINES_TIB = (1, 12)

MEMORY = "summing it up in memory"
STREAM = "streaming read of the file"
READS = "drgn's reads of it"
NUMPY = "scan by numpy"
COMPILED = "scan, compiled"
READ_ALL = "scan, compiled, free blocks too"
"""As with ``--strict``: what is inside free blocks is read as well."""


@dataclass(frozen=True)
class Rates:
    """What was measured on one dump."""

    pages: int
    free_pages: int
    page_s: dict[str, float]
    """Seconds of CPU for one page."""

    held_bytes: int
    """What a scan keeps until its end, owners' claims included."""

    peak_bytes: int
    """Of msa-memstat with one worker, as a process."""

    faster: float
    """A scan by one worker a core than one by a single one, by the clock."""


def compare(rounds: int) -> None:
    """Time all on a dump with much free memory, and on one with hardly any."""
    print(f"CLASSIFY, one core, {rounds} rounds, medians; % of each limit")
    print(f"{'':32}{'Mpages/s':>9}{'GB/s':>7}{'file':>8}{'memory':>8}")
    found = {name: compare_on(name, rounds) for name in SCENARIOS}
    print()
    project(found)


def compare_on(scenario: str, rounds: int) -> Rates:
    run = lab.build(scenario)
    assert run.elf is not None
    kernel = open_kernel(run.elf, run.vmlinux)
    rates = measure(kernel, run.vmlinux, rounds)
    for ours in {COMPILED, READ_ALL} & rates.page_s.keys():
        seconds = rates.page_s[ours], rates.page_s[STREAM]
        beside(f"{ours}, {scenario}", STREAM, *seconds)
    free = 100 * rates.free_pages / rates.pages
    print(f"{scenario}, {rates.pages:,} pages, {free:.0f} % free")
    for name, seconds in rates.page_s.items():
        print(
            f"  {name:30}{1e-6 / seconds:9.1f}"
            f"{1e-9 * kernel.layout.size / seconds:7.1f}"
            f"{100 * rates.page_s[STREAM] / seconds:6.0f} %"
            f"{100 * rates.page_s[MEMORY] / seconds:6.0f} %"
        )
    return rates


def measure(kernel: Kernel, vmlinux: Path, rounds: int) -> Rates:
    memstat = Path(sys.executable).with_name("msa-memstat")
    works: dict[str, Callable[[], object]] = {
        MEMORY: array_of_all(kernel).sum,
        STREAM: Stream(kernel).read,
        READS: partial(read_all, kernel),
        NUMPY: scan_with(kernel, "no"),
    }
    if library() is not None:
        works[COMPILED] = scan_with(kernel, "yes")
        works[READ_ALL] = scan_with(kernel, "yes", read_all=True)
    result = list(works.values())[-1]()
    assert isinstance(result, ScanResult)
    contenders = {name: (work, kernel.pages) for name, work in works.items()}
    return Rates(
        pages=kernel.pages,
        free_pages=int(result.totals()[PageClass.FREE_BUDDY]),
        page_s=medians(contenders, rounds),
        held_bytes=held_bytes(result, kernel),
        peak_bytes=run_process([memstat, "-j", 1, "-s", vmlinux, kernel.path]).peak_kib
        << 10,
        faster=faster(kernel, rounds),
    )


def array_of_all(kernel: Kernel) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    chunks = read_chunks(kernel.reader, kernel.layout, kernel.ranges)
    return np.frombuffer(b"".join(chunk.data for chunk in chunks), np.uint64)


def read_all(kernel: Kernel) -> None:
    for _ in read_chunks(kernel.reader, kernel.layout, kernel.ranges):
        pass


def scan_with(
    kernel: Kernel, native: str, *, read_all: bool = False
) -> Callable[[], ScanResult]:
    """Make a scan with numpy or the part in C; a reader keeps to its first one."""
    reader = Reader(kernel.prog)

    def run() -> ScanResult:
        with mock.patch.dict(os.environ, {SWITCH: native}):
            return scan(
                reader, kernel.layout, kernel.ranges, kernel.owned, read_all=read_all
            )

    return run


def faster(kernel: Kernel, rounds: int) -> float:
    ranges = repeated(kernel)
    works = (partial(scan_parts_with, kernel, ranges, each) for each in (1, cores()))
    one, several = in_turn(*works, rounds)
    return one.wall_s / several.wall_s


def held_bytes(result: ScanResult, kernel: Kernel) -> int:
    """Sum up what grows with the machine's memory."""
    arrays = [kernel.owned.pfns, kernel.owned.codes, *result.cache.sum()]
    for columns in values(result.candidates).values():
        arrays += columns
    return sum(array.nbytes for array in arrays)


def project(found: dict[str, Rates]) -> None:
    """Tell what larger machines would take, with pages as those of the dumps."""
    print(
        f"{'PROJECTION':14}{'memory':>8}{'pages':>9}{'memmap':>10}{'limit':>9}"
        f"{'numpy':>9}{'compiled':>10}{f'{cores()} cores':>9}{'needs':>10}"
    )
    for name, rates in found.items():
        for tib in MACHINES_TIB:
            pages = tib * TIB_PAGES
            seconds = {what: pages * each for what, each in rates.page_s.items()}
            best = seconds.get(COMPILED, seconds[NUMPY])
            more = rates.held_bytes * (pages / rates.pages - 1)
            needs = rates.peak_bytes + more
            print(
                f"{name:14}{tib:4} TiB{1e-6 * pages:7.0f} M{tib * 16:6} GiB"
                f"{seconds[STREAM]:7.1f} s{seconds[NUMPY]:7.1f} s{best:8.1f} s"
                f"{best / rates.faster:7.1f} s{needs / (1 << 20):6.0f} MiB"
            )
    print("Needs: the peak here, and more of what grows with the machine's memory.")
