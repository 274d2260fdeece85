# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-cpus takes for each CPU, beside drgn's own commands, and how that grows.

``%crash runq`` and ``irq`` tell a part of what msa-cpus tells: the tasks on each run
queue, their clocks, and the interrupts by CPU. drgn is as it comes, with debug info.
What either takes to start, to open the dump and to learn of the kernel once is not
counted.
"""

import contextlib
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from drgn import Program
from drgn.commands import run_command

from fixtures import lab
from fixtures.lab.possiblecpus import MANY_ONLINE, ONLINE, POSSIBLE
from msatools.cpus.cpus import Cpus, CpusOptions
from msatools.kernel.report import quietly
from msatools.program import TargetSpec, open_target
from tests.bench.timing import Contender, medians

KERNELS = ("6.1", "6.12")
ALL = "msa-cpus"
OURS = {
    ALL: CpusOptions(),
    "msa-cpus -i": CpusOptions(irqs=True),
    "msa-cpus, and all tasks": CpusOptions(tasks=True),
}
THEIRS = ("runq", "runq -g", "runq -t", "runq -m", "irq -s")
TOGETHER = ("runq", "irq -s")
"""What it takes at least to learn what waits for each CPU, and what interrupts it."""


@dataclass(frozen=True)
class Cost:
    """What one dump took: seconds, by the name of the contender."""

    release: str
    cpus: int
    seconds: dict[str, float]
    reads: int
    """Of msa-cpus."""

    def of_each(self, name: str) -> str:
        """Tell the microseconds for each CPU."""
        return f"{1e6 * self.seconds[name] / self.cpus:.0f}"

    @property
    def together(self) -> float:
        return sum(self.seconds[crash(command)] for command in TOGETHER)


def crash(command: str) -> str:
    return f"drgn %crash {command}"


@dataclass(frozen=True)
class Dump:
    """One dump, opened by both."""

    run: lab.Run
    sessions: dict[str, Cpus]
    works: dict[str, Callable[[], object]]
    """By the name of the contender, those of drgn's too."""


def compare(rounds: int) -> None:
    """Time all in turn on all dumps, and print what a CPU costs, and how that grows."""
    for kernel in KERNELS:
        names = [f"possiblecpus{possible}" for possible in POSSIBLE]
        names.append(f"onlinecpus{MANY_ONLINE}")
        dumps = [open_dump(lab.build(f"{name}-{kernel}")) for name in names]
        *costs, busy = measure(dumps, rounds)
        print_costs(costs, busy)
        print()
        print_growth(costs)
        print()


def open_dump(run: lab.Run) -> Dump:
    """Open a dump, and have each contender learn of its kernel."""
    assert run.elf
    peer = Program()
    peer.set_core_dump(str(run.elf))
    peer.load_debug_info([str(run.vmlinux)])
    opened = open_target(TargetSpec(path=str(run.elf), types="btf"))
    sessions = {
        name: Cpus(opened.prog, opened.target, options)
        for name, options in OURS.items()
    }
    works: dict[str, Callable[[], object]] = {
        **{name: partial(each.report, quietly) for name, each in sessions.items()},
        **{crash(command): partial(run_crash, peer, command) for command in THEIRS},
    }
    for work in works.values():
        work()
    return Dump(run, sessions, works)


def measure(dumps: list[Dump], rounds: int) -> list[Cost]:
    """Time all contenders on all dumps in turn: what each dump took."""
    contenders: dict[str, Contender] = {
        f"{dump.run.name} {name}": (work, 1)
        for dump in dumps
        for name, work in dump.works.items()
    }
    took = medians(contenders, rounds)
    costs = []
    for dump in dumps:
        seconds = {name: took[f"{dump.run.name} {name}"] for name in dump.works}
        counted = dump.sessions[ALL].report(quietly).coverage
        costs.append(Cost(dump.run.release, counted["cpus"], seconds, counted["reads"]))
    return costs


def run_crash(prog: Program, command: str) -> None:
    """Run one of drgn's commands and throw away what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        run_command(prog, f"crash {command}")


def print_costs(costs: list[Cost], busy: Cost) -> None:
    """Print microseconds for each CPU, a column a dump."""
    every = [*costs, busy]
    online = [f"{ONLINE} online"] * len(costs) + ["all online"]
    print(f"{f'A CPU COSTS, {busy.release}':38}{_columns(online)}")
    print(f"{'us for each of so many possible':38}{_columns(c.cpus for c in every)}")
    for name in busy.seconds:
        print(f"{name:38}{_columns(cost.of_each(name) for cost in every)}")
    ratios = [f"{cost.together / cost.seconds[ALL]:.1f} x" for cost in every]
    head = f"{' and '.join(TOGETHER)} take, to msa-cpus"
    print(f"{head:38}{_columns(ratios)}")
    print(f"{'reads of msa-cpus':38}{_columns(cost.reads for cost in every)}")


def print_growth(costs: list[Cost]) -> None:
    """Print what one more CPU takes, between each two dumps: the same if linear."""
    steps = [f"{few.cpus} to {many.cpus}" for few, many in pairwise(costs)]
    print(f"{'us for one CPU more':38}{_columns([*steps, 'grows'])}")
    first, last = costs[0], costs[-1]
    for name in (ALL, *map(crash, TOGETHER)):
        more = [
            1e6 * (many.seconds[name] - few.seconds[name]) / (many.cpus - few.cpus)
            for few, many in pairwise(costs)
        ]
        grows = f"{last.seconds[name] / first.seconds[name]:.1f} x"
        print(f"{name:38}{_columns([*(f'{each:.0f}' for each in more), grows])}")
    print(
        f"so many more CPUs there are: {last.cpus / first.cpus:.1f} x; reads of "
        f"msa-cpus: {last.reads / first.reads:.1f} x"
    )


def _columns(values: Iterable[object]) -> str:
    return "".join(f"{value!s:>12}" for value in values)
