# SPDX-License-Identifier: LGPL-2.1-or-later

"""How fast msatools is, beside its peers, each on one dump in one run.

Timings of a shared machine mean little, so each round times every contender in
turn, and what counts are the ratios of the medians. The rows in which a peer is ahead
are printed first.
"""

import argparse
import contextlib
import io
import resource
import sys
from pathlib import Path

from fixtures import lab
from tests.bench import (
    classify,
    cpus,
    first_answer,
    fleet,
    kdumppages,
    live,
    locks,
    memory_files,
    pages,
    processes,
    queries,
    roots,
    startup,
    tasks,
    verdicts,
    views,
    workers,
    zombies,
)
from tests.bench.timing import print_behind


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--scenario", default="bench-6.1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--drgn-tools",
        type=Path,
        metavar="DIRECTORY",
        help="the source of drgn-tools, to be compared with msa-locks",
    )
    args = parser.parse_args()
    run = lab.build(args.scenario)
    report = io.StringIO()
    try:
        with contextlib.redirect_stdout(report):
            _compare_all(run, args)
    finally:
        print_behind()
        print()
        print(report.getvalue(), end="")
    return 0


def _compare_all(run: lab.Run, args: argparse.Namespace) -> None:
    """Run each benchmark; all of what they print is shown at the end."""
    assert run.elf is not None
    first_answer.compare(args.rounds)
    print()
    pages.compare(run.elf, run.vmlinux, run.release, args.rounds)
    print()
    classify.compare(args.rounds)
    print()
    views.compare(run.elf, run.vmlinux, run.release, args.rounds)
    print()
    workers.compare(args.scenario, args.rounds)
    print()
    kdumppages.compare(run, args.rounds)
    print()
    memory_files.compare(args.rounds)
    print()
    processes.compare(run.elf, run.vmlinux, args.rounds)
    print()
    startup.compare(args.rounds)
    print()
    tasks.compare(args.rounds)
    print()
    verdicts.compare()
    print()
    roots.compare()
    print()
    locks.compare(args.rounds, args.drgn_tools)
    print()
    zombies.compare(args.rounds)
    print()
    cpus.compare(args.rounds)
    print()
    queries.compare(args.rounds)
    print()
    fleet.compare()
    print()
    live.compare()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
