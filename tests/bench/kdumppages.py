# SPDX-License-Identifier: LGPL-2.1-or-later

"""How fast the memmap of a compressed dump is read, beside libkdumpfile.

Alone: ``python -m tests.bench.kdumppages memory-6.12``.
"""

import sys

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.memory.classes import page_layout
from msatools.memory.memmap import CHUNK_BYTES, BulkReader, memmap_ranges
from msatools.program import TargetSpec, open_target
from tests.bench.timing import beside, minima

FORMATS = ("kdump-zlib", "kdump-lzo", "kdump-snappy", "kdump-zstd", "kdump-raw")

_PAGE = 4096


def compare(run: lab.Run, rounds: int) -> None:
    """Time both in turn on each format, and print speeds and ratios."""
    print(f"{run.release}, its memmap from kdumps, {rounds} rounds, minima of CPU time")
    print(f"{'FORMAT':16}{'libkdumpfile':>14}{'in bulk':>14}{'ratio':>8}")
    for format in FORMATS:
        theirs, ours = _time(run, format, rounds)
        beside(f"the memmap of {format}", "libkdumpfile", ours, theirs)
        print(
            f"{format:16}{_PAGE / theirs / 1e9:9.2f} GB/s{_PAGE / ours / 1e9:9.2f} GB/s"
            f"{theirs / ours:6.2f} x"
        )


def _time(run: lab.Run, format: str, rounds: int) -> tuple[float, float]:
    """Give the seconds for one page of the dump, by libkdumpfile and in bulk."""
    spec = TargetSpec(path=str(run.dump(format)), vmlinux=str(run.vmlinux))
    reader = Reader(open_target(spec).prog)
    layout = page_layout(reader.prog)
    pieces = [
        (at, min(CHUNK_BYTES, part.address_end(layout.size) - at))
        for part in memmap_ranges(reader, layout, LossLog())
        for at in range(part.address, part.address_end(layout.size), CHUNK_BYTES)
    ]
    pages = sum(size for _, size in pieces) // _PAGE
    bulk = BulkReader.of(reader)
    if not bulk.in_bulk:
        raise SystemExit(f"{format} is not read in bulk: no compiler?")

    def read_all(one: Reader | BulkReader) -> None:
        for at, size in pieces:
            one.read_around_gaps(at, size, _PAGE)

    took = minima(
        {
            "libkdumpfile": (lambda: read_all(reader), pages),
            "in bulk": (lambda: read_all(bulk), pages),
        },
        rounds,
    )
    return took["libkdumpfile"], took["in bulk"]


if __name__ == "__main__":
    compare(lab.build(sys.argv[1]), rounds=7)
