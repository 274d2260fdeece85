# SPDX-License-Identifier: LGPL-2.1-or-later

"""What workers bring to the scan of the memmap, on a dump in each format.

A wait for the other workers is part of what a scan takes, so this is wall time; on a
machine that does other things as well, the CPU time beside it says more. The memmap is
gone through as often as it takes to be that of a larger machine.
"""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fixtures import lab
from msatools.memory.memmap import MemmapRange
from msatools.memory.scan import cores, cut, scan_parts
from tests.bench.pages import Kernel, open_kernel

FORMATS = ("elf", "kdump-zlib", "kdump-lzo", "kdump-snappy", "kdump-zstd", "kdump-raw")
ENOUGH_S = 1.0
MAX_TIMES = 64


@dataclass(frozen=True)
class Took:
    """What one scan took of the machine."""

    wall_s: float
    cpu_s: float
    """Of all its processes."""


def compare(scenario: str, rounds: int, formats: tuple[str, ...] = FORMATS) -> None:
    """Time the scan with one worker and with one a core in turn, in each format."""
    run = lab.build(scenario)
    many = max(2, cores())
    print(f"WORKERS, {run.release}, {rounds} rounds, medians, {cores()} cores")
    print(
        f"{'format':14}{'Mpages':>8}{'parts':>7}{'1 worker':>11}{f'{many} workers':>11}"
        f"{'faster':>9}{'more CPU':>10}"
    )
    for format in formats:
        path = run.elf if format == "elf" else run.dump(format)
        assert path is not None
        kernel = open_kernel(path, run.vmlinux)
        ranges = repeated(kernel)
        one, several = in_turn(
            partial(scan_with, kernel, ranges, 1),
            partial(scan_with, kernel, ranges, many),
            rounds,
        )
        pages = sum(part.pages for part in ranges)
        print(
            f"{format:14}{1e-6 * pages:8.1f}{len(cut(ranges)):7}{one.wall_s:9.3f} s"
            f"{several.wall_s:9.3f} s{one.wall_s / several.wall_s:7.2f} x"
            f"{100 * (several.cpu_s / one.cpu_s - 1):+8.1f} %"
        )


def repeated(kernel: Kernel) -> list[MemmapRange]:
    """Repeat the memmap until one worker has enough to do."""
    took = measured(lambda: scan_with(kernel, kernel.ranges, 1))
    times = min(MAX_TIMES, max(1, round(ENOUGH_S / took.cpu_s)))
    return kernel.ranges * times


def scan_with(kernel: Kernel, ranges: list[MemmapRange], workers: int) -> None:
    scan_parts(kernel.reader, kernel.layout, ranges, kernel.owned, workers=workers)


def in_turn(
    one: Callable[[], None], several: Callable[[], None], rounds: int
) -> tuple[Took, Took]:
    pairs = [(measured(one), measured(several)) for _ in range(rounds)]
    first, second = zip(*pairs, strict=True)
    return median(first), median(second)


def median(took: tuple[Took, ...]) -> Took:
    return Took(
        statistics.median(one.wall_s for one in took),
        statistics.median(one.cpu_s for one in took),
    )


def measured(work: Callable[[], None]) -> Took:
    wall, cpu = time.perf_counter(), cpu_seconds()
    work()
    return Took(time.perf_counter() - wall, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """Tell the CPU time of this process and of those of its workers that ended."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    theirs = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime
