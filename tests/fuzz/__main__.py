# SPDX-License-Identifier: LGPL-2.1-or-later

"""``make fuzz``: run cases, and keep those that fail."""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.cases import CORES, LAYERS, make_case
from tests.fuzz.dumps import dump, formats_of
from tests.fuzz.judge import GOOD
from tests.fuzz.run import run_case, smaller, warm_up, write_dump

SMALLER_S = 120.0


class Result(NamedTuple):
    """The outcome of one case."""

    seed: str
    layer: str
    outcome: str
    text: str


def main() -> int:
    """Run cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="number of cases")
    parser.add_argument("--seed", default="1", help="of all cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", help="one case alone, as SEED:NUMBER")
    parser.add_argument("--layer", choices=tuple(LAYERS), action="append")
    parser.add_argument(
        "--lab", action="append", help="ELF dumps of the lab, in place of demo cores"
    )
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failed"))
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    layers, cores = tuple(args.layer or LAYERS), tuple(args.lab or CORES)
    first = args.first
    seeds = [f"{args.seed}:{number}" for number in range(first, first + args.n)]
    if args.case:
        seeds = [args.case]
    counts: Counter[tuple[str, str]] = Counter()
    failed = []
    began = time.monotonic()
    with suppress(KeyboardInterrupt):
        for result in results(seeds, layers, args.keep, args.j, cores):
            counts[result.layer, result.outcome] += 1
            if result.outcome not in GOOD:
                failed.append(result)
                print(f"{result.outcome} {result.seed} {result.text}", flush=True)
            if args.case:
                print(result)
    print_counts(counts)
    took_s = time.monotonic() - began
    print(f"{counts.total()} cases, {len(failed)} bad, {took_s:.0f} s")
    return 1 if failed else 0


def results(
    seeds: list[str],
    layers: tuple[str, ...],
    keep: Path,
    jobs: int,
    cores: tuple[str, ...] = CORES,
) -> Iterator[Result]:
    """Run cases in several processes, and yield their results as they come."""
    # What is done here need not be done in each process.
    warm_up()
    for core in cores:
        for format in formats_of(core):
            dump(core, format)
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("fork"))
    try:
        run = partial(run_seed, layers=layers, keep=keep, cores=cores)
        for future in as_completed([pool.submit(run, seed) for seed in seeds]):
            yield future.result()
    finally:
        # After Ctrl-C only what runs is waited for.
        pool.shutdown(cancel_futures=True)


def run_seed(
    seed: str, layers: tuple[str, ...], keep: Path | None, cores: tuple[str, ...]
) -> Result:
    """Run one case. If it fails, make it smaller, and keep its dump."""
    case = make_case(seed, layers, cores)
    with tempfile.TemporaryDirectory(prefix="msa-fuzz-") as directory:
        outcome, run = run_case(case, Path(directory))
        if outcome in GOOD or keep is None:
            return Result(seed, case.layer, outcome, run.err[-300:].strip())
        end = time.monotonic() + SMALLER_S
        case = smaller(case, outcome, Path(directory), lambda: time.monotonic() > end)
    keep.mkdir(exist_ok=True)
    path = keep / f"{seed.replace(':', '-')}.vmcore"
    write_dump(case, path)
    places = ", ".join(hex(change.offset) for change in case.changes[:5])
    lab = "" if cores == CORES else f" LAB='{' '.join(cores)}'"
    text = (
        f"{case.layer} of {case.dump.core} {case.dump.format} at {places}: "
        f"msa-{case.command} {path} --types btf {' '.join(case.arguments)}: "
        f"{run.status} {run.err[-300:].strip()}\n"
        f"    again: make fuzz CASE={seed}{lab}"
    )
    return Result(seed, case.layer, outcome, text)


def print_counts(counts: Counter[tuple[str, str]]) -> None:
    """Print a table of layers and outcomes."""
    outcomes = [*GOOD, *sorted({outcome for _, outcome in counts} - {*GOOD})]
    print(f"{'':10}" + "".join(f"{outcome:>10}" for outcome in outcomes))
    for layer in LAYERS:
        row = (counts[layer, outcome] for outcome in outcomes)
        print(f"{layer:10}" + "".join(f"{count:10,}" for count in row))


if __name__ == "__main__":
    sys.exit(main())
