# SPDX-License-Identifier: LGPL-2.1-or-later

"""What it takes to start: types from the kernel itself, and from debug info.

Each process opens a dump, asks for a type's size and lists all tasks, then ends.
"""

import statistics
import sys

from fixtures import lab
from tests.bench.process import run_in_turn

KERNELS = ("6.1", "6.12")
WORK = """
import sys
from msatools.program import TargetSpec, open_target
from drgn.helpers.linux.pid import for_each_task
path, vmlinux = sys.argv[1:]
prog = open_target(
    TargetSpec(path=path, vmlinux=vmlinux or None, types="auto" if vmlinux else "btf")
).prog
prog.type("struct page").size
print(sum(len(task.comm.string_()) > 0 for task in for_each_task(prog)))
"""


def compare(rounds: int) -> None:
    """Time both in turn, on each kernel, and print medians and ratios."""
    print(f"{'START-UP, FIRST LIST OF TASKS':34}{'seconds':>10}{'peak MiB':>12}")
    for kernel in KERNELS:
        run = lab.build(f"memory-{kernel}")
        commands = {
            source: [sys.executable, "-c", WORK, run.elf, vmlinux]
            for source, vmlinux in (("DWARF", run.vmlinux), ("BTF", ""))
        }
        used = run_in_turn(commands, rounds)
        seconds = {name: [each.seconds for each in used[name]] for name in used}
        peaks = {name: [each.peak_kib for each in used[name]] for name in used}
        for source in commands:
            took, peak = statistics.median(seconds[source]), max(peaks[source])
            print(f"{kernel + ', ' + source:34}{took:10.2f}{peak / 1024:12.0f}")
        times = [statistics.median(seconds[source]) for source in ("BTF", "DWARF")]
        most = [max(peaks[source]) for source in ("BTF", "DWARF")]
        print(
            f"{kernel}: BTF takes {times[0] / times[1]:.2f} of DWARF's time, "
            f"{100 * most[0] / most[1]:.0f} % of its memory"
        )
