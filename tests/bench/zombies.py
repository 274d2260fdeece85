# SPDX-License-Identifier: LGPL-2.1-or-later

"""How fast 20,000 zombies are told, beside drgn's bare walk over all tasks.

What either takes to start and to open the dump is not counted. In guests that run, what
one of them costs is told beside ps, which tells the same.
"""

import json
import statistics
from pathlib import Path

from drgn import Program
from drgn.helpers.linux.pid import for_each_task

from fixtures import lab
from fixtures.lab.inside import RESULTS
from msatools.kernel.report import quietly
from msatools.program import TargetSpec, open_target
from msatools.zombies.model import ZombiesOptions
from msatools.zombies.zombies import Zombies
from tests.bench.timing import beside, medians

KERNELS = ("6.1", "6.12")
IN_A_ROW = 20
"""Reports of one PID: the first finds the caches full of the report of all."""


def compare(rounds: int) -> None:
    """Time the walk, the report of all and that of one PID in turn, on each kernel."""
    for kernel in KERNELS:
        run = lab.build(f"manytasks-{kernel}")
        assert run.elf
        compare_one(run, run.elf, rounds)
        print()
    for kernel in KERNELS:
        compare_with_ps(lab.build(f"zombiecost-{kernel}"))
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
            report: (lambda: every.report(quietly), 1),
            task: (lambda: [one.report(quietly) for _ in range(IN_A_ROW)], IN_A_ROW),
        },
        rounds,
    )
    tasks = every.report(quietly).coverage["tasks"]
    head = f"20,000 ZOMBIES OF {tasks:,} TASKS, {run.release}"
    print(f"{head:56}{'ms':>10}{'ratio':>12}")
    beside(f"{report}, {run.release}", walk, took[report], took[walk])
    print(f"{walk:56}{1e3 * took[walk]:10.1f}")
    print(f"{report:56}{1e3 * took[report]:10.1f}{took[report] / took[walk]:10.2f} x")
    print(
        f"{task:56}{1e3 * took[task]:10.1f}   1/{took[report] / took[task]:.0f} of all"
    )


def compare_with_ps(run: lab.Run) -> None:
    """Print what one zombie of 20,000 cost inside of a guest, once it was built."""
    facts = json.loads((run.directory / RESULTS).read_text())
    ps, quick, msa = facts["ps"], facts["quick"], facts["msa"]
    print(f"ONE OF {facts['zombies']:,} ZOMBIES IN A LIVE GUEST, {run.release}")
    print(
        f"system calls of ps: {ps['calls']:,}, "
        f"kernel reads of msa-zombies -p: {msa['reads']:,}"
    )
    print(
        f"(system calls of ps -q, which looks at no other process: {quick['calls']:,})"
    )
    report = "msa-zombies -p, a report"
    rows = {
        f"ps --pid ({ps['version'].removeprefix('ps from ')})": ps["seconds"],
        "ps -q": quick["seconds"],
        "msa-zombies -p, from its start to its end": msa["seconds"],
        f"{report}, the first": msa["report_seconds"][:1],
        f"{report} after it": msa["report_seconds"][1:],
    }
    ours, *_ = reversed(rows)
    for peer in list(rows)[:2]:
        times = (statistics.median(rows[row]) for row in (ours, peer))
        beside(ours, peer, *times)
    for row, seconds in rows.items():
        print(f"{row:56}{1e3 * statistics.median(seconds):10.1f} ms")
