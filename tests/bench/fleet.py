# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-fleet costs besides the reports: for each dump, and by the workers."""

import resource
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from distributed import Client

from fixtures.demo import DEMOS
from msatools.fleet import run
from msatools.fleet.run import Report, Run
from msatools.fleet.single import Bounds, report_dump
from msatools.fleet.store import Results
from tests.bench.process import run_process
from tests.bench.timing import beside
from tests.fleet.dumps import START, copy_dump
from tests.fleet.made import nothing

SMALL = (100, 1000, 10_000)
"""Numbers of files on which nothing is done."""

DUMPS = 24
BOUNDS = Bounds(memory_bytes=2 << 30, seconds=600)


def compare() -> None:
    """Print the cost of a dump on which nothing is done, and the gain of a worker."""
    folder = Path(tempfile.mkdtemp(prefix="msa-fleet"))
    try:
        _scheduling(folder)
        _workers(folder)
    finally:
        shutil.rmtree(folder)


def _scheduling(folder: Path) -> None:
    print("msa-fleet: time a dump besides its report (client, scheduler, 2 workers)")
    with run.local(2, BOUNDS) as client:
        for count in SMALL:
            paths = [str(folder / f"{count}-{number}.core") for number in range(count)]
            for path in paths:
                Path(path).touch()
            results = Results(str(folder / f"results-{count}"))
            results.create()
            before_s = _cpu_s()
            wall_s = _run(client, results, paths, nothing)
            cpu_ms = 1e3 * (_cpu_s() - before_s) / count
            print(
                f"  {count:6,} dumps: {1e3 * wall_s / count:5.1f} ms each, of which "
                f"{cpu_ms:.1f} ms are CPU time of client and scheduler"
            )


def _cpu_s(whose: int = resource.RUSAGE_SELF) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def _workers(folder: Path) -> None:
    paths = [
        str(copy_dump(DEMOS["6.12"].core, folder / f"{n}.kdump", f"h{n}", START))
        for n in range(DUMPS)
    ]
    print(f"msa-fleet: {DUMPS} dumps by the number of workers")
    took_s, used_s = {}, {}
    loop_s = _loop(paths)
    for workers in (1, 2):
        results = Results(str(folder / f"workers-{workers}"))
        results.create()
        report = partial(report_dump, bounds=BOUNDS)
        before_s = _cpu_s() + _cpu_s(resource.RUSAGE_CHILDREN)
        with run.local(workers, BOUNDS) as client:
            took_s[workers] = _run(client, results, paths, report)
        # Workers count once they have ended.
        used_s[workers] = _cpu_s() + _cpu_s(resource.RUSAGE_CHILDREN) - before_s
        print(f"  {workers}: {took_s[workers]:.1f} s, {used_s[workers]:.1f} s of CPU")
    beside("msa-fleet, 1 worker", "msa-report of each dump", used_s[1], loop_s)
    print(f"  msa-report of each, one after the other: {loop_s:.1f} s of CPU")
    print(f"  2 are {took_s[1] / took_s[2]:.2f} times as fast as 1")
    # Where others have the CPUs, the work that there is says more than the time.
    print(f"  2 have {used_s[2] / used_s[1]:.2f} times the work of 1, for which they")
    print(f"  would be {2 * used_s[1] / used_s[2]:.2f} times as fast on idle CPUs")


def _loop(paths: list[str]) -> float:
    """Run msa-report of each dump; return the CPU seconds of all."""
    command = Path(sys.executable).with_name("msa-report")
    return sum(run_process([command, "--json", path]).cpu_seconds for path in paths)


def _run(client: Client, results: Results, paths: list[str], report: Report) -> float:
    start_s = time.monotonic()
    Run(client, results, report, set()).run(paths)
    return time.monotonic() - start_s


if __name__ == "__main__":
    compare()
