# SPDX-License-Identifier: LGPL-2.1-or-later

"""The processor sets of one dump, and what the guest's kernel said of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from drgn import Program

from fixtures import lab
from msatools.cpus.cpusets import Cpusets, read_cpusets
from msatools.cpus.domains import RootDomains, read_root_domains
from msatools.cpus.masks import CpuMasks, read_masks
from msatools.cpus.model import CpuSet, SetKind
from msatools.cpus.placement import place
from msatools.cpus.sets import read_sets
from msatools.kernel.cpumasks import Cpus
from msatools.kernel.percpu import read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.tasks.cgroups import read_cgroups
from msatools.tasks.table import TaskReader, TaskTable
from msatools.values import cpu_list
from tests.support.dumps import open_dump

KERNELS = ("6.1", "6.12")
CPU = "sys/devices/system/cpu"
GROUPS = "sys/fs/cgroup"


@dataclass
class Seen:
    """All of one dump."""

    run: lab.Run
    prog: Program
    reader: Reader
    findings: Findings
    domains: RootDomains
    masks: CpuMasks
    cpusets: Cpusets
    tasks: TaskTable
    sets: tuple[CpuSet, ...]
    """With their tasks."""

    def truth(self, name: str) -> str:
        """Give a file of the guest."""
        return self.run.truth(name).decode().strip()

    def numbers(self, name: str) -> tuple[int, ...]:
        """Give the numbers of a file that is a list of them."""
        return numbers(self.truth(name))

    def has(self, name: str) -> bool:
        return name in self.run.truth_names()

    def one(self, name: str) -> CpuSet:
        (found,) = [one for one in self.sets if one.name == name]
        return found

    def pids(self, *names: str) -> set[int]:
        """Give the thread IDs of tasks that the guest made, by their names."""
        tasks: dict[str, Any] = self.run.workload["tasks"]
        return {tasks[name]["pid"] for name in names}

    @property
    def threads(self) -> dict[int, str]:
        """The directory of each thread that the guest saw."""
        pattern = r"(proc/\d+/task/(\d+))/status"
        found = (re.fullmatch(pattern, name) for name in self.run.truth_names())
        return {int(match[2]): match[1] for match in found if match}

    def status(self, pid: int, field: str) -> str:
        """Give a line of a thread's ``status``."""
        text = self.truth(f"{self.threads[pid]}/status")
        (line,) = [line for line in text.splitlines() if line.startswith(f"{field}:")]
        return line.partition(":")[2].strip()


def numbers(text: str) -> tuple[int, ...]:
    """Make numbers of a list as the kernel prints it."""
    return tuple(sorted(cpu_list(text))) if text else ()


def look_at(prog: Program, run: lab.Run) -> Seen:
    reader, findings = Reader(prog), Findings()
    domains = read_root_domains(reader, read_percpu(prog, findings), findings)
    masks = read_masks(reader, domains, findings)
    sets = read_sets(reader, domains, masks, findings)
    tasks = TaskReader(reader).read_all(findings)
    cgroups = read_cgroups(reader, tasks, findings)
    return Seen(
        run=run,
        prog=prog,
        reader=reader,
        findings=findings,
        domains=domains,
        masks=masks,
        cpusets=read_cpusets(reader, findings),
        tasks=tasks,
        sets=place(reader, sets, tasks, cgroups, masks, findings),
    )


@lru_cache(maxsize=4)
def seen(kernel: str, types: str = "btf") -> Seen:
    """Look at a dump of the cpus scenario; the last ones are kept."""
    name = f"cpus-{kernel}"
    return look_at(open_dump(name, types), lab.build(name))


def set_of(name: str, kind: SetKind, cpus: Cpus, **fields: object) -> CpuSet:
    """Make a set of which only that is known."""
    one = CpuSet(
        name=name,
        kind=kind,
        cpus=cpus,
        source="",
        asked=None,
        exclusive=None,
        nodes=(0,),
        reason=None,
        root_domain=None,
        balanced=None,
        irqs_routed=(),
        irqs_allowed=(),
        irqs_managed=0,
    )
    return replace(one, **fields)


def masks_of(possible: Iterable[int], online: Iterable[int]) -> CpuMasks:
    """Make masks of CPUs of which some are online."""
    on = tuple(online)
    return CpuMasks(
        possible=tuple(possible),
        present=tuple(possible),
        online=on,
        active=on,
        isolcpus=(),
        isolated=(),
        nohz_full=(),
        rcu_nocb=(),
        managed_irq=(),
        words={},
    )
