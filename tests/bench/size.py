# SPDX-License-Identifier: LGPL-2.1-or-later

"""How long commands take on guests that are large: in memory, or threads.

Not a part of ``make bench``: each guest takes minutes and gigabytes. One, or all:
``python -m tests.bench.size memory threads``. With ``--live`` the guest with many
threads is started once more, and read over QMP while it runs.

Times are minima of CPU time, of rounds in which all take turns.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fixtures import lab
from fixtures.demo import DEMOS
from tests.bench.process import Usage, run_process

MEMORY, THREADS = "hugememory-6.1", "manythreads-6.12"
KDUMP = "kdump-filtered"
"""makedumpfile's level 31, as distributions have it."""

COMMANDS = (
    "memstat",
    "prstat -L",
    "prstat -n 20",
    "locks",
    "zombies",
    "cpus",
    "report",
)
OF_TASKS = {
    "prstat -L": 15.0,
    "prstat -L -n 20": 6.0,
    "locks": 6.0,
    "zombies": 6.0,
    "report": 12.0,
}
"""What is to be measured of many threads, and the microseconds that each may take."""

MOST_KIB = 1.0
"""What a thread may take of memory."""

SMALL = DEMOS["6.12"].core
"""A dump of a hundred tasks: what it takes to start is not counted."""


class Took(NamedTuple):
    """What some rounds of a command took."""

    seconds: float
    cpu_seconds: float
    peak_mib: float

    @classmethod
    def of(cls, usages: Sequence[Usage]) -> "Took":
        return cls(
            min(usage.seconds for usage in usages),
            min(usage.cpu_seconds for usage in usages),
            max(usage.peak_kib for usage in usages) / 1024,
        )


def command(words: str, *target: object, cores: int | None = None) -> list[object]:
    """Return the command line of an installed command, on so many cores."""
    name, *options = words.split()
    pinned = [] if cores is None else ["taskset", "-c", f"0-{cores - 1}"]
    program = Path(sys.executable).with_name(f"msa-{name}")
    return [*pinned, program, *options, *target]


def in_turn(commands: Mapping[str, Sequence[object]], rounds: int) -> dict[str, Took]:
    """Run all in turn, once more than counts."""
    used: dict[str, list[Usage]] = {name: [] for name in commands}
    for nth, (name, words) in itertools.product(range(rounds + 1), commands.items()):
        usage = run_process(words)
        if nth:
            used[name].append(usage)
    return {name: Took.of(usages) for name, usages in used.items()}


def reads(words: str, dump: Path) -> tuple[int, int]:
    """Return the reads of a dump that a command counts, and their bytes."""
    line = map(str, command(f"{words} --json", dump))
    done = subprocess.run([*line], capture_output=True, check=True)
    coverage = json.loads(done.stdout)["coverage"]
    return coverage["reads"], coverage["bytes_read"]


def compare_dump(head: str, dumps: Mapping[str, Path], rounds: int) -> None:
    """Print what each command takes on each dump of one guest, by one core and two."""
    commands = {
        f"{words}|{form}|{cores}": command(words, dump, cores=cores)
        for words in COMMANDS
        for form, dump in dumps.items()
        for cores in (1, 2)
    }
    took = in_turn(commands, rounds)
    print(f"{head}, {rounds} rounds, minima")
    titles = ("1 core", "CPU", "2 cores", "CPU", "peak MiB", "reads", "MiB read")
    print(f"{'':26}" + "".join(f"{title:>10}" for title in titles))
    for words, (form, dump) in itertools.product(COMMANDS, dumps.items()):
        one, two = (took[f"{words}|{form}|{cores}"] for cores in (1, 2))
        count, size = reads(words, dump)
        peak = max(one.peak_mib, two.peak_mib)
        print(
            f"{f'msa-{words}, {form}':26}{one.seconds:8.2f} s{one.cpu_seconds:8.2f} s"
            f"{two.seconds:8.2f} s{two.cpu_seconds:8.2f} s{peak:10.0f}{count:10,}"
            f"{size / 2**20:10.1f}"
        )


def compare_memory(rounds: int) -> None:
    run = lab.build(MEMORY)
    assert run.elf
    head = f"256 GIB OF MEMORY, {run.release}"
    compare_dump(head, {"elf": run.elf, "kdump": run.dump(KDUMP)}, rounds)


def compare_threads(rounds: int) -> None:
    run = lab.build(THREADS)
    assert run.elf
    small = {f"{words}|small": command(words, SMALL) for words in OF_TASKS}
    large = {words: command(words, run.elf) for words in OF_TASKS}
    took = in_turn({**small, **large}, rounds)
    count = _threads(run.elf)
    print(f"{count:,} THREADS, {run.release}, {rounds} rounds, minima of CPU time")
    titles = ("CPU", "us a task", "at most", "peak MiB", "KiB a task")
    print(f"{'':22}" + "".join(f"{title:>12}" for title in titles))
    for words, most in OF_TASKS.items():
        started, all_of_it = took[f"{words}|small"], took[words]
        each = 1e6 * (all_of_it.cpu_seconds - started.cpu_seconds) / count
        kib = 1024 * (all_of_it.peak_mib - started.peak_mib) / count
        cpu = f"{all_of_it.cpu_seconds:10.2f} s"
        print(
            f"{f'msa-{words}':22}{cpu}{each:12.1f}{most:12.0f}"
            f"{all_of_it.peak_mib:12.0f}{kib:12.2f}"
        )
    print(f"a thread may take {MOST_KIB:.0f} KiB; {SMALL.name}'s share is not counted")


def _threads(dump: Path) -> int:
    line = map(str, command("prstat --json -n 1", dump))
    done = subprocess.run([*line], capture_output=True, check=True)
    return int(json.loads(done.stdout)["totals"]["threads"])


def compare_live() -> None:
    """Print what the first answer takes over QMP, of a guest with many threads."""
    with lab.live(THREADS) as guest:
        words = {words: command(words, "--qemu", guest.qmp) for words in OF_TASKS}
        took = in_turn(words, 1)
        print(f"100,000 THREADS OF A GUEST THAT RUNS, OVER QMP, {guest.release}")
    print(f"{'':22}{'seconds':>12}{'CPU':>12}{'peak MiB':>12}")
    for name, one in took.items():
        print(
            f"{f'msa-{name}':22}{one.seconds:10.2f} s{one.cpu_seconds:10.2f} s"
            f"{one.peak_mib:12.0f}"
        )


PARTS = {"memory": compare_memory, "threads": compare_threads}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.size", description=__doc__
    )
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--live", action="store_true")
    args = parser.parse_args()
    if unknown := {*args.parts} - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    for part in args.parts or PARTS:
        PARTS[part](args.rounds)
        print()
    if args.live:
        compare_live()


if __name__ == "__main__":
    main()
