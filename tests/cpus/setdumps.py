# SPDX-License-Identifier: LGPL-2.1-or-later

"""The processor sets of a dump, and the guest's record of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from drgn import Program

from fixtures import lab
from msatools.cpus.masks import CpuMasks, RootDomains, read_masks, read_root_domains
from msatools.cpus.model import CpuSet, SetKind, SetTasks
from msatools.cpus.placement import place
from msatools.cpus.sets import Cpusets, read_cpusets, read_sets
from msatools.kernel.percpu import Cpus, read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.identity import KernelNames, read_cgroups
from msatools.tasks.table import TaskReader, TaskTable
from tests.cpus.guests import Guest
from tests.cpus.madecpus import cpuset
from tests.support.dumps import open_dump


@dataclass
class Seen(Guest):
    """The processor sets of one dump."""

    prog: Program
    reader: Reader
    losses: LossLog
    domains: RootDomains
    masks: CpuMasks
    cpusets: Cpusets
    tasks: TaskTable
    sets: tuple[CpuSet, ...]
    """The sets with their tasks."""

    def one(self, name: str) -> CpuSet:
        (found,) = [cpuset for cpuset in self.sets if cpuset.name == name]
        return found

    def tasks_of(self, name: str) -> SetTasks:
        tasks = self.one(name).tasks
        assert tasks is not None
        return tasks


def look_at(prog: Program, run: lab.Run) -> Seen:
    reader, losses = Reader(prog), LossLog()
    domains = read_root_domains(reader, read_percpu(Reader(prog), losses), losses)
    masks = read_masks(reader, domains, losses)
    sets = read_sets(reader, domains, masks, losses)
    tasks = TaskReader(reader).read_all(losses)
    KernelNames(reader).fill(tasks, losses)
    cgroups = read_cgroups(reader, tasks, losses)
    return Seen(
        run=run,
        prog=prog,
        reader=reader,
        losses=losses,
        domains=domains,
        masks=masks,
        cpusets=read_cpusets(reader, losses),
        tasks=tasks,
        sets=place(reader, sets, tasks, cgroups, masks, losses),
    )


@lru_cache(maxsize=4)
def seen(name: str, types: str = "btf") -> Seen:
    """Read a dump; the last ones are cached."""
    return look_at(open_dump(name, types), lab.build(name))


def set_of(name: str, kind: SetKind, cpus: Cpus, **fields: object) -> CpuSet:
    """Make a set with these values and defaults."""
    unknown = {"source": "", "root_domain": None, "balanced": None}
    nothing = {"irqs_routed": (), "irqs_allowed": ()}
    return cpuset(name, cpus, kind=kind, **(unknown | nothing | fields))


def masks_of(possible: Iterable[int], online: Iterable[int]) -> CpuMasks:
    """Make masks of possible and online CPUs."""
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
