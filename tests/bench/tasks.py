# SPDX-License-Identifier: LGPL-2.1-or-later

"""How fast 40,000 tasks are read, beside drgn's own ways, on one dump in one run.

drgn is as it comes, with debug info, and asked for a part of the tasks only: it takes
the same time for each. What either learns of the kernel once is not counted.
"""

import random
import statistics
import sys
from collections.abc import Callable
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
from drgn import Object, Program, Type, offsetof
from drgn.helpers.linux.pid import for_each_task

from fixtures import lab
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.tasks import table
from msatools.tasks.sampler import TaskState, collect_now
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader, TaskTable
from tests.bench.process import run_in_turn
from tests.bench.timing import beside, medians

KERNELS = ("6.1", "6.12")
PEER_TASKS = 2_000
PEER_STACKS = 250
_USER = 1 << 63


class Tasks:
    """All tasks of a dump, as msatools reads them."""

    def __init__(self, path: Path) -> None:
        self.prog = open_target(TargetSpec(path=str(path), types="btf")).prog
        self.reader, self.losses = Reader(self.prog), LossLog()
        self.tasks = TaskReader(self.reader)
        self.clocks: Clocks = read_clocks(self.reader, self.losses)
        self.table: TaskTable = self.read()
        self.now: TaskState = self.tell()

    def read(self) -> TaskTable:
        return self.tasks.read_all(self.losses)

    def tell(self) -> TaskState:
        collector = StackCollector(self.reader, self.losses)
        return collect_now(collector, self.prog, self.table, self.clocks)

    def with_stacks(self) -> list[int]:
        """The rows of tasks that sleep, of which each has a stack."""
        rows: list[int] = np.flatnonzero(self.now.stacks.index).tolist()
        return rows


class Peer:
    """drgn, as it comes."""

    def __init__(self, path: Path, vmlinux: Path) -> None:
        self.prog = Program()
        self.prog.set_core_dump(str(path))
        self.prog.load_debug_info([str(vmlinux)])

    def members(self, tasks: TaskTable) -> list[Callable[[Object], object]]:
        """What gives each column that msatools reads, but the address."""
        type_ = self.prog.type("struct task_struct")
        return [
            _getter(next(path for path in paths if _has(type_, path)))
            for column, (_, paths) in table._COLUMNS.items()
            if tasks.has(column)
        ]

    def read(self, members: list[Callable[[Object], object]]) -> None:
        for task in islice(for_each_task(self.prog), PEER_TASKS):
            for member in members:
                member(task)

    def task(self, address: int) -> Object:
        return Object(self.prog, "struct task_struct *", value=address)

    def unwind(self, tasks: list[Object]) -> None:
        for task in tasks:
            self.prog.stack_trace(task)

    def frames(self, task: Object) -> tuple[int, ...]:
        """A stack without inlined calls, up to user mode."""
        trace = [it for it in self.prog.stack_trace(task) if not it.is_inline]
        return tuple(it.pc for it in takewhile(lambda it: it.pc >= _USER, trace))


def _has(type_: Type, path: str) -> bool:
    try:
        offsetof(type_, path)
    except LookupError:
        return False
    return True


def _getter(path: str) -> Callable[[Object], object]:
    names = path.split(".")

    def get(task: Object) -> object:
        for name in names:
            task = getattr(task, name)
        return task.string_() if names == ["comm"] else task.value_()

    return get


def compare(rounds: int) -> None:
    """Time both in turn, on each kernel, and print medians and ratios."""
    for kernel in KERNELS:
        run = lab.build(f"manytasks-{kernel}")
        assert run.elf
        compare_one(run.release, run.elf, run.vmlinux, rounds)
        print()
        compare_processes(run.elf, run.workload["farm"]["pid"], rounds)
        print()


def compare_one(release: str, path: Path, vmlinux: Path, rounds: int) -> None:
    ours, peer = Tasks(path), Peer(path, vmlinux)
    rows = ours.with_stacks()
    chosen = random.sample(rows, PEER_STACKS)
    addresses = ours.table["address"]
    sample = [peer.task(int(addresses[row])) for row in chosen]
    members = peer.members(ours.table)
    count = len(ours.table)
    read, read_peer = "msatools' table", f"drgn's objects, of {PEER_TASKS:,} tasks"
    tell, tell_peer = "msatools' class and age", f"drgn's unwinder, {PEER_STACKS} of it"
    took = medians(
        {
            read: (ours.read, count),
            read_peer: (lambda: peer.read(members), PEER_TASKS),
            tell: (ours.tell, len(rows)),
            tell_peer: (lambda: peer.unwind(sample), PEER_STACKS),
        },
        rounds,
    )
    head = f"{count:,} TASKS, {release}"
    print(f"{head:44}{'us each':>10}{'ratio':>10}")
    for name, base in (
        (read, read),
        (read_peer, read),
        (tell, tell),
        (tell_peer, tell),
    ):
        if name != base:
            beside(base, name, took[base], took[name])
        ratio = "" if name == base else f"{took[name] / took[base]:.0f} x"
        print(f"{name:44}{1e6 * took[name]:10.1f}{ratio:>10}")
    same = sum(
        ours.now.stacks[row].addresses == peer.frames(task)
        for row, task in zip(chosen, sample, strict=True)
    )
    print(
        f"{len(members)} counters of a task; {len(rows):,} have stacks, "
        f"{len(ours.now.stacks.unique) - 1} different; drgn was asked for "
        f"{ours.now.stacks.asked}; {same} of {PEER_STACKS} are drgn's"
    )


def compare_processes(path: Path, pid: int, rounds: int) -> None:
    """Print what the whole command takes, for one process and for all."""
    prstat = [Path(sys.executable).with_name("msa-prstat"), "--types", "btf", path]
    commands = {"-p PID": [*prstat, "-p", pid], "-n 20": [*prstat, "-n", "20"]}
    used = run_in_turn(commands, rounds)
    print(f"{'WHOLE PROCESS':34}{'seconds':>10}{'peak MiB':>12}")
    peaks = []
    for name, usages in used.items():
        seconds = statistics.median(usage.seconds for usage in usages)
        peaks.append(statistics.median(usage.peak_kib for usage in usages))
        print(f"{f'msa-prstat {name}':34}{seconds:10.2f}{peaks[-1] / 1024:12.0f}")
    one, every = peaks
    print(f"{(every - one) / 40_000:.2f} KiB more for each of 40,000 tasks")
