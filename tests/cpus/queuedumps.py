# SPDX-License-Identifier: LGPL-2.1-or-later

"""The run queues and processors of a dump, and the guest's record of them."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from drgn import Object, Program
from drgn.helpers.linux.percpu import per_cpu

from fixtures import lab
from msatools.cpus.cpus import doing
from msatools.cpus.model import Processor, RunnableTask, RunQueue
from msatools.cpus.processors import read_processors
from msatools.cpus.runqueues import read_run_queues
from msatools.cpus.times import TickSched, read_tick_sched
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.percpu import PerCpu, read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.table import TaskReader
from msatools.tasks.text import KernelText
from tests.cpus.guests import Guest
from tests.support.dumps import open_dump


@dataclass
class Seen(Guest):
    """The run queues and processors of one dump."""

    prog: Program
    percpu: PerCpu
    clocks: Clocks
    ticks: TickSched
    queues: tuple[RunQueue, ...]
    processors: tuple[Processor, ...]
    reads: tuple[int, int]
    """Number of reads for the run queues, and for the processors."""

    losses: LossLog
    """Losses of these reads only."""

    @cached_property
    def by_cpu(self) -> dict[int, RunQueue]:
        return {queue.cpu: queue for queue in self.queues}

    def cpu(self, role: str) -> int:
        """Return the CPU of a role."""
        return self.roles[role]

    def queue(self, role: str) -> RunQueue:
        return self.by_cpu[self.cpu(role)]

    def rq(self, cpu: int) -> Object:
        return per_cpu(self.prog["runqueues"], cpu)

    def doing(self, cpu: int) -> str | None:
        return doing(self.prog, self._text, cpu, self.losses)

    @cached_property
    def _text(self) -> KernelText:
        return KernelText(Reader(self.prog), self.losses)

    def again(self) -> "Seen":
        """Read again, after the memory was damaged."""
        return look_at(self.prog, self.run)


def all_of(queue: RunQueue) -> list[RunnableTask]:
    """Return the running task and the waiting ones."""
    return [*([] if queue.current is None else [queue.current]), *queue.waiting]


def look_at(prog: Program, run: lab.Run, crash_cpu: int | None = None) -> Seen:
    reader, aside, losses = Reader(prog), LossLog(), LossLog()
    percpu = read_percpu(Reader(prog), aside)
    clocks = read_clocks(reader, aside)
    tasks = TaskReader(reader).read_all(aside)
    ticks = read_tick_sched(reader, percpu, losses)
    start = reader.reads
    queues = read_run_queues(
        reader, percpu, clocks, ticks, losses, tasks=tasks, crash_cpu=crash_cpu
    )
    middle = reader.reads
    processors = read_processors(reader, percpu, ticks, losses)
    reads = middle - start, reader.reads - middle
    return Seen(run, prog, percpu, clocks, ticks, queues, processors, reads, losses)


@lru_cache(maxsize=4)
def seen(name: str, types: str = "btf") -> Seen:
    """Read a dump; the last ones are cached."""
    return look_at(open_dump(name, types), lab.build(name))
