# SPDX-License-Identifier: LGPL-2.1-or-later

"""How fast 20,000 zombies are told, beside drgn's bare walk over all tasks.

What either takes to start and to open the dump is not counted.
"""

from pathlib import Path

from drgn import Program
from drgn.helpers.linux.pid import for_each_task

from fixtures import lab
from msatools.target import TargetSpec, open_target
from msatools.zombies.options import ZombiesOptions
from msatools.zombies.zombies import Zombies
from tests.bench.timing import medians

KERNELS = ("6.1", "6.12")


def compare(rounds: int) -> None:
    """Time the walk, the report of all and that of one PID in turn, on each kernel."""
    for kernel in KERNELS:
        run = lab.build(f"manytasks-{kernel}")
        assert run.elf
        compare_one(run, run.elf, rounds)
        print()


def compare_one(run: lab.Run, path: Path, rounds: int) -> None:
    peer = Program()
    peer.set_core_dump(str(path))
    peer.load_debug_info([str(run.vmlinux)])
    opened = open_target(TargetSpec(path=str(path), types="btf"))
    pid = run.workload["farm"]["zombies"][10_000]
    every = Zombies(opened.prog, opened.target, ZombiesOptions())
    one = Zombies(opened.prog, opened.target, ZombiesOptions(pids=(pid,)))
    walk, report, task = "drgn's for_each_task, bare", "msa-zombies", "msa-zombies -p"
    took = medians(
        {
            walk: (lambda: sum(1 for _ in for_each_task(peer)), 1),
            report: (lambda: every.report(_quiet), 1),
            task: (lambda: one.report(_quiet), 1),
        },
        rounds,
    )
    tasks = every.report(_quiet).coverage["tasks"]
    head = f"20,000 ZOMBIES OF {tasks:,} TASKS, {run.release}"
    print(f"{head:56}{'ms':>10}{'ratio':>12}")
    print(f"{walk:56}{1e3 * took[walk]:10.1f}")
    print(f"{report:56}{1e3 * took[report]:10.1f}{took[report] / took[walk]:10.2f} x")
    print(
        f"{task:56}{1e3 * took[task]:10.1f}   1/{took[report] / took[task]:.0f} of all"
    )


def _quiet(done: int, total: int) -> None:
    pass
