# SPDX-License-Identifier: LGPL-2.1-or-later

"""What memstat's table costs beside the bare scan, and what each ``--by`` adds."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from msatools.memory.breakdowns import VIEWS
from msatools.memory.memstat import collect_memstat
from msatools.program import TargetSpec, open_target
from tests.bench.pages import open_kernel, run_scan
from tests.bench.timing import medians

SCAN = "bare scan"
TABLE = "the table"

OFTEN = 10
"""Times the rounds for these two: what is between them is little beside the noise."""


def compare(path: Path, vmlinux: Path, release: str, rounds: int) -> None:
    """Time one report of each kind in turn, all by one worker."""
    kernel = open_kernel(path, vmlinux)
    opened = open_target(TargetSpec(path=str(path), vmlinux=str(vmlinux)))
    collect = partial(collect_memstat, opened.prog, target=opened.target, workers=1)
    works: dict[str, Callable[[], object]] = {
        SCAN: partial(run_scan, kernel),
        TABLE: collect,
        "--sections": partial(collect, sections=True),
        "--unattributed": partial(collect, unattributed=True),
        "--frag": partial(collect, frag=True),
        "--map": partial(collect, memory_map=True),
    }
    for name in ("node", *VIEWS):
        works[f"--by {name}"] = partial(collect, by=(name,))
    works["all of them"] = partial(collect, by=tuple(VIEWS))
    contenders = {name: (work, 1) for name, work in works.items()}
    often = {name: contenders.pop(name) for name in (SCAN, TABLE)}
    seconds = medians(often, rounds * OFTEN) | medians(contenders, rounds)
    print(
        f"VIEWS, {release}, {kernel.pages:,} pages, medians of {rounds} rounds, "
        f"{rounds * OFTEN} for the first two"
    )
    print(f"{'':16}{'CPU':>10}{'of the scan':>14}{'adds':>11}")
    for name, taken in seconds.items():
        adds = ""
        if name not in (SCAN, TABLE):
            adds = f"{1e3 * (taken - seconds[TABLE]):+8.1f} ms"
        print(f"{name:16}{taken:8.3f} s{taken / seconds[SCAN]:12.2f} x{adds:>11}")
