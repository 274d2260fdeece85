# SPDX-License-Identifier: LGPL-2.1-or-later

"""Whole processes, start to end."""

import itertools
import statistics
import sys
from pathlib import Path

from fixtures.lab import host
from tests.bench.process import Usage, run_process


def compare(elf: Path, vmlinux: Path, rounds: int) -> None:
    """Time msa-memstat and crash in turn, and print medians, peaks and the ratio."""
    host.require(["crash"])
    memstat = Path(sys.executable).with_name("msa-memstat")
    commands = {
        "msa-memstat": ([memstat, "-s", vmlinux, elf], ""),
        "crash kmem -i": ([host.find("crash"), "-s", vmlinux, elf], "kmem -i\nquit\n"),
    }
    used: dict[str, list[Usage]] = {name: [] for name in commands}
    for _, (name, (command, text)) in itertools.product(
        range(rounds), commands.items()
    ):
        used[name].append(run_process(command, text))
    print(f"{'WHOLE PROCESS':34}{'seconds':>10}{'peak MiB':>12}")
    seconds = {
        name: statistics.median(usage.seconds for usage in usages)
        for name, usages in used.items()
    }
    for name, usages in used.items():
        peak = max(usage.peak_kib for usage in usages)
        print(f"{name:34}{seconds[name]:10.2f}{peak / 1024:12.0f}")
    ours, theirs = seconds.values()
    print(f"msa-memstat takes 1/{theirs / ours:.1f} of the time of crash kmem -i")
