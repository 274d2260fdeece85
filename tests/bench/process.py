# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run a process and see what it takes."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# What the kernel calls a process's peak is at least that of the process that started
# it, which the benchmarks themselves make large: a small one has to start it.
_STARTER = """
import json, os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
took = time.perf_counter() - start
cpu = usage.ru_utime + usage.ru_stime
os.write(int(sys.argv[1]), json.dumps((took, usage.ru_maxrss, cpu)).encode())
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


class Usage(NamedTuple):
    """What a process took."""

    seconds: float
    peak_kib: int
    cpu_seconds: float
    """In user mode and in the kernel: what others do on the machine counts little."""


def run_process(command: Sequence[object], text: str = "") -> Usage:
    """Run a command to its end, with *text* as its input."""
    words = [str(word) for word in command]
    reading, writing = os.pipe()
    with open(reading) as result:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _STARTER, str(writing), *words],
                input=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[writing],
                check=False,
            )
        finally:
            os.close(writing)
        if done.returncode:
            raise SystemExit(f"{command[0]} failed:\n{done.stdout[-2000:]}")
        return Usage(*json.loads(result.read()))


def run_in_turn(
    commands: Mapping[str, Sequence[object]], rounds: int
) -> dict[str, list[Usage]]:
    """Run all commands in turn; return what each run of each took."""
    used: dict[str, list[Usage]] = {name: [] for name in commands}
    for _, (name, command) in itertools.product(range(rounds), commands.items()):
        used[name].append(run_process(command))
    return used
