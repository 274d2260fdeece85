# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a question of a program costs, beside what it would read of /proc instead.

In a guest, where both are done on the kernel that runs, and of a dump, on this machine.
The guest is emulated: its ratios count, not its times.
"""

import json
import os
import statistics

import msatools
from fixtures import lab
from fixtures.lab.guest.asking import read_proc
from fixtures.lab.inside import RESULTS
from tests.bench.timing import Contender, beside, medians

KERNELS = ("6.1", "6.12")
SCENARIO = "tasks-6.12"
QUESTIONS = 200


def compare(rounds: int) -> None:
    """Print the times of a question, and of reading /proc of the same task."""
    for kernel in KERNELS:
        run = lab.build(f"querylive-{kernel}")
        facts = json.loads((run.directory / RESULTS).read_text())
        print(f"A QUESTION OF A PROGRAM, {run.release}, in a guest")
        times = facts["seconds"].items()
        _print({name: statistics.median(each) for name, each in times})
        print()
    run = lab.build(SCENARIO)
    print(f"A QUESTION OF A PROGRAM, {run.release}, read as a running kernel's is")
    asked = msatools.open(run.dump("elf" if run.elf else "vmcore"))
    # All is read anew, but not from /proc/kcore.
    asked.reader.is_live = True

    def ask_for_thread() -> None:
        for _ in range(QUESTIONS):
            asked.thread(1)

    def ask_for_process() -> None:
        for _ in range(QUESTIONS):
            asked.process(1)

    def ask_proc() -> None:
        pid = os.getpid()
        for _ in range(QUESTIONS):
            read_proc(pid)

    contenders: dict[str, Contender] = {
        "/proc": (ask_proc, QUESTIONS),
        "thread": (ask_for_thread, QUESTIONS),
        "process": (ask_for_process, QUESTIONS),
    }
    _print(medians(contenders, rounds))


def _print(seconds: dict[str, float]) -> None:
    for name, each in seconds.items():
        ratio = each / seconds["/proc"]
        if name != "/proc":
            beside(f"msatools.{name}()", "/proc", each, seconds["/proc"])
        print(f"{name:34}{1e6 * each:10.0f} us   {ratio:5.2f} x /proc")
