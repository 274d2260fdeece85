# SPDX-License-Identifier: LGPL-2.1-or-later

"""Measure reads of tasks: ``python -m tests.tasks.probe DUMP [PID]``.

Reads one process or all, with a marker for :mod:`tests.support.strace` before each
part.
"""

import sys
import time

from msatools.kernel.clocks import read_clocks
from msatools.kernel.pids import find_tasks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.tasks.accounting import (
    microstates,
    read_delays,
    read_memory,
    read_processes,
)
from msatools.tasks.identity import read_cgroups, read_identities
from msatools.tasks.sampler import collect_now
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader, TaskTable
from tests.support.strace import MARKER

PARTS = {
    "processes": read_processes,
    "identities": read_identities,
    "memory": read_memory,
    "cgroups": read_cgroups,
    "delays": read_delays,
}


def main(path: str, pid: int | None) -> None:
    prog = open_target(TargetSpec(path=path, types="btf")).prog
    start = time.perf_counter()
    reader, losses = Reader(prog), LossLog()
    tasks = read_tasks(reader, pid, losses)
    mark("clocks")
    clocks = read_clocks(reader, losses)
    mark("stacks")
    collector = StackCollector(reader, losses)
    mark("now")
    now = collect_now(collector, prog, tasks, clocks)
    kept: list[object] = []
    for name, read in PARTS.items():
        mark(name)
        kept.append(read(reader, tasks, losses))
    mark("microstates")
    kept.append(microstates(tasks, clocks))
    took = time.perf_counter() - start
    assert not losses.lost, losses.notes
    print(f"{len(tasks)} tasks, {len(now.stacks.unique)} stacks, {1e3 * took:.1f} ms")


def read_tasks(reader: Reader, pid: int | None, losses: LossLog) -> TaskTable:
    mark("tasks")
    tasks = TaskReader(reader)
    if pid is None:
        return tasks.read_all(losses)
    found = find_tasks(reader, [pid], losses)
    return tasks.read_processes(list(found.values()), losses)


def mark(part: str) -> None:
    print(f"{MARKER}{part}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
