# SPDX-License-Identifier: LGPL-2.1-or-later

"""
How fast memstat is, beside its peers, on one dump in one run.

Timings of a shared machine mean little, so each round times every contender in
turn, and what counts are the ratios of the medians.
"""

import argparse
import contextlib
import io
import itertools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drgn import Program
from drgn.commands import run_command
from drgn.helpers.linux.mm import (
    PageReserved,
    PageSlab,
    PageSwapBacked,
    PageTail,
    compound_head,
    for_each_page,
)

from fixtures import lab
from fixtures.lab import host
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.memory.layout import PageLayout, page_layout
from msatools.memory.memmap import CHUNK_BYTES, MemmapRange, memmap_ranges
from msatools.memory.owners import collect_owners
from msatools.memory.scan import OwnedPages, scan
from msatools.target import TargetSpec, open_target
from tests.bench import startup
from tests.bench.process import run_process
from tests.elf import file_offset, load_segments

HELPER_PAGES = 20_000
KMEM_PAGES = 5_000


@dataclass
class Kernel:
    """The dump under test, opened."""

    prog: Program
    path: Path
    reader: Reader
    layout: PageLayout
    ranges: list[MemmapRange]
    owned: OwnedPages

    @property
    def pages(self) -> int:
        return sum(part.pages for part in self.ranges)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--scenario", default="bench-6.1")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    run = lab.build(args.scenario)
    assert run.elf is not None
    kernel = open_kernel(run.elf, run.vmlinux)
    print(f"{run.release}, {kernel.pages:,} pages, {args.rounds} rounds, medians\n")
    per_page = time_pages(kernel, args.rounds)
    print_pages(kernel, per_page)
    print()
    time_processes(run.elf, run.vmlinux, args.rounds)
    print()
    startup.compare(args.rounds)
    return 0


def open_kernel(path: Path, vmlinux: Path) -> Kernel:
    prog = open_target(TargetSpec(path=str(path), vmlinux=str(vmlinux))).prog
    reader, findings = Reader(prog), Findings()
    layout = page_layout(prog)
    ranges = memmap_ranges(reader, layout, findings)
    return Kernel(
        prog=prog,
        path=path,
        reader=reader,
        layout=layout,
        ranges=ranges,
        owned=collect_owners(reader, layout, ranges, findings).pages(),
    )


def time_pages(kernel: Kernel, rounds: int) -> dict[str, float]:
    """Time all that goes page by page; the median seconds for one page of each."""
    stream = Stream(kernel)
    contenders: dict[str, tuple[Callable[[], None], int]] = {
        "msa-memstat's scan": (lambda: run_scan(kernel), kernel.pages),
        "streaming read of the memmap": (stream.read, kernel.pages),
        "drgn's helpers, same questions": (lambda: helpers(kernel.prog), HELPER_PAGES),
        "drgn's PageSlab(), PageTail()": (
            lambda: two_helpers(kernel.prog),
            HELPER_PAGES,
        ),
        "drgn %crash kmem -p": (lambda: crash_kmem_p(kernel.prog), KMEM_PAGES),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _, (name, (work, pages)) in itertools.product(
        range(rounds), contenders.items()
    ):
        start = time.perf_counter()
        work()
        seconds[name].append((time.perf_counter() - start) / pages)
    return {name: statistics.median(times) for name, times in seconds.items()}


def run_scan(kernel: Kernel) -> None:
    scan(kernel.reader, kernel.layout, kernel.ranges, kernel.owned)


def helpers(prog: Program) -> None:
    """Ask of each page what the scan asks, one page after the other."""
    for page in itertools.islice(for_each_page(prog), HELPER_PAGES):
        head = compound_head(page)
        PageReserved(page)
        PageSlab(head)
        PageSwapBacked(head)
        head.mapping.value_()
        head._mapcount.counter.value_()  # or the page's type
        head._refcount.counter.value_()


def two_helpers(prog: Program) -> None:
    """Ask two questions only."""
    for page in itertools.islice(for_each_page(prog), HELPER_PAGES):
        PageSlab(page)
        PageTail(page)


def crash_kmem_p(prog: Program) -> None:
    """Let drgn's crash command print pages until enough have come."""
    with (
        contextlib.redirect_stdout(LimitedOutput(KMEM_PAGES)),
        contextlib.suppress(BrokenPipeError),
    ):
        run_command(prog, "crash kmem -p")


class LimitedOutput(io.TextIOBase):
    """Standard output that closes after a number of lines."""

    def __init__(self, lines: int) -> None:
        self._left = lines

    def write(self, text: str) -> int:
        self._left -= text.count("\n")
        if self._left < 0:
            raise BrokenPipeError
        return len(text)


class Stream:
    """Reads the bytes of all struct pages from the file, into one buffer."""

    def __init__(self, kernel: Kernel) -> None:
        self._fd = os.open(kernel.path, os.O_RDONLY)
        self._extents = file_extents(kernel)

    def read(self) -> None:
        buffer = bytearray(CHUNK_BYTES)
        for offset, size in self._extents:
            view = memoryview(buffer)[:size]
            os.preadv(self._fd, [view], offset)


def file_extents(kernel: Kernel) -> list[tuple[int, int]]:
    """Find where in the ELF dump the memmap lies, in pieces of a read's size."""
    segments = load_segments(kernel.path)
    extents = []
    for part in kernel.ranges:
        for at in range(0, part.pages * kernel.layout.size, CHUNK_BYTES):
            size = min(CHUNK_BYTES, part.pages * kernel.layout.size - at)
            # The boot memmap is mapped by pages of 2 MiB.
            offset = file_offset(kernel.prog, segments, part.address + at)
            extents.append((offset, size))
    return extents


def print_pages(kernel: Kernel, per_page: dict[str, float]) -> None:
    ours = per_page["msa-memstat's scan"]
    before = kernel.reader.reads
    run_scan(kernel)
    reads = kernel.reader.reads - before
    sections = len({part.section for part in kernel.ranges})
    print(f"{'PAGE BY PAGE':34}{'Mpages/s':>10}{'scan is':>12}")
    for name, seconds in per_page.items():
        ratio = (
            f"{seconds / ours:.1f} x" if seconds > ours else f"1/{ours / seconds:.1f}"
        )
        if seconds == ours:
            ratio = ""
        print(f"{name:34}{1e-6 / seconds:10.3f}{ratio:>12}")
    stream = per_page["streaming read of the memmap"]
    print(f"scan: {100 * stream / ours:.0f} % of the streaming read")
    print(f"scan: {reads} reads, {reads / sections:.2f} a section of {sections}")


def time_processes(elf: Path, vmlinux: Path, rounds: int) -> None:
    """Time whole processes, start to end."""
    host.require(["crash"])
    memstat = Path(sys.executable).with_name("msa-memstat")
    commands = {
        "msa-memstat": ([memstat, "-s", vmlinux, elf], ""),
        "crash kmem -i": ([host.find("crash"), "-s", vmlinux, elf], "kmem -i\nquit\n"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peak: dict[str, int] = dict.fromkeys(commands, 0)
    for _, (name, (command, text)) in itertools.product(
        range(rounds), commands.items()
    ):
        start = time.perf_counter()
        peak[name] = max(peak[name], run_process(command, text))
        seconds[name].append(time.perf_counter() - start)
    print(f"{'WHOLE PROCESS':34}{'seconds':>10}{'peak MiB':>12}")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:34}{median:10.2f}{peak[name] / 1024:12.0f}")
    ours, theirs = (statistics.median(seconds[name]) for name in commands)
    print(f"msa-memstat takes 1/{theirs / ours:.1f} of the time of crash kmem -i")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
