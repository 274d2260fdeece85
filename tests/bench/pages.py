# SPDX-License-Identifier: LGPL-2.1-or-later

"""How fast memstat goes through the memmap, beside its peers, page by page."""

import contextlib
import io
import itertools
import os
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

from msatools.kernel.reader import PAGE, Reader
from msatools.kernel.report import LossLog
from msatools.memory.classes import PageLayout, page_layout
from msatools.memory.memmap import CHUNK_BYTES, MemmapRange, memmap_ranges
from msatools.memory.owners import OwnedPages, collect_owners
from msatools.memory.scan import scan
from msatools.program import TargetSpec, open_target
from tests.bench.timing import beside, medians
from tests.support.elf import file_offset, load_segments

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


def compare(path: Path, vmlinux: Path, release: str, rounds: int) -> None:
    """Time all in turn, and print speeds and ratios."""
    kernel = open_kernel(path, vmlinux)
    print(f"{release}, {kernel.pages:,} pages, {rounds} rounds, medians\n")
    print_pages(kernel, time_pages(kernel, rounds))


def open_kernel(path: Path, vmlinux: Path) -> Kernel:
    prog = open_target(TargetSpec(path=str(path), vmlinux=str(vmlinux))).prog
    reader, losses = Reader(prog), LossLog()
    layout = page_layout(prog)
    ranges = memmap_ranges(reader, layout, losses)
    return Kernel(
        prog=prog,
        path=path,
        reader=reader,
        layout=layout,
        ranges=ranges,
        owned=collect_owners(reader, layout, ranges, losses).pages(),
    )


def time_pages(kernel: Kernel, rounds: int) -> dict[str, float]:
    """Time all that goes page by page; the median seconds for one page of each."""
    stream = Stream(kernel)
    return medians(
        {
            "msa-memstat's scan": (lambda: run_scan(kernel), kernel.pages),
            "streaming read of the memmap": (stream.read, kernel.pages),
            "drgn's helpers, same questions": (
                lambda: helpers(kernel.prog),
                HELPER_PAGES,
            ),
            "drgn's PageSlab(), PageTail()": (
                lambda: two_helpers(kernel.prog),
                HELPER_PAGES,
            ),
            "drgn %crash kmem -p": (lambda: crash_kmem_p(kernel.prog), KMEM_PAGES),
        },
        rounds,
    )


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
            # Usually it is mapped by pages of 2 MiB. Where huge pages of hugetlb have
            # given back struct pages (HVO), it is by pages of 4 KiB, in any order.
            offsets = [
                file_offset(kernel.prog, segments, part.address + at + page)
                for page in range(0, size, PAGE)
            ]
            first = 0
            for index in range(1, len(offsets) + 1):
                if index == len(offsets) or offsets[index] != offsets[index - 1] + PAGE:
                    length = min((index - first) * PAGE, size - first * PAGE)
                    extents.append((offsets[first], length))
                    first = index
    return extents


def print_pages(kernel: Kernel, per_page: dict[str, float]) -> None:
    ours = per_page["msa-memstat's scan"]
    before = kernel.reader.reads
    run_scan(kernel)
    reads = kernel.reader.reads - before
    sections = len({part.section for part in kernel.ranges})
    print(f"{'PAGE BY PAGE':34}{'Mpages/s':>10}{'scan is':>12}")
    for name, seconds in per_page.items():
        if seconds != ours:
            beside("msa-memstat's scan", name, ours, seconds)
        ratio = (
            f"{seconds / ours:.1f} x" if seconds > ours else f"1/{ours / seconds:.1f}"
        )
        if seconds == ours:
            ratio = ""
        print(f"{name:34}{1e-6 / seconds:10.3f}{ratio:>12}")
    stream = per_page["streaming read of the memmap"]
    print(f"scan: {100 * stream / ours:.0f} % of the streaming read")
    print(f"scan: {reads} reads, {reads / sections:.2f} a section of {sections}")
