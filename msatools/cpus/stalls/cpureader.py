# SPDX-License-Identifier: LGPL-2.1-or-later

"""What is read of all CPUs to find stalls, and is cheap."""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from msgspec import Struct

from msatools.cpus.model import RunQueue
from msatools.cpus.runqueues import tick_delay
from msatools.cpus.ticksched import TickSched
from msatools.kernel.clocks import Clocks
from msatools.kernel.cpumask import online_cpus
from msatools.kernel.percpu import PerCpu
from msatools.kernel.reader import Addresses, Reader
from msatools.kernel.report import LossLog
from msatools.kernel.structs import Members, read_structs
from msatools.target.model import Crash
from msatools.tasks.preemptcounts import PreemptCounts
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.text import KernelText

_QUEUES: Members = {"current": ("curr",), "idle": ("idle",)}


class CpuState(Struct, frozen=True):
    """What is known of the CPUs of a kernel before stalls are looked for."""

    percpu: PerCpu
    clocks: Clocks
    ticks: TickSched
    queues: tuple[RunQueue, ...]
    crash: Crash | None = None


class RunningTasks(Struct, frozen=True):
    """The tasks that CPUs run, in the order of ``PerCpu.cpus``."""

    addresses: Addresses
    table: TaskTable
    rows: Mapping[int, int]
    """Row in the table of the task of each CPU."""

    def of(self, cpu: int, column_: str) -> int:
        """Return a member of a CPU's task; 0 if it could not be read."""
        row = self.rows.get(cpu)
        return 0 if row is None else int(self.table[column_][row])


class CpuReader:
    """Reads what the parts of a search for stalls have in common, each once."""

    def __init__(self, reader: Reader, cpus: CpuState, losses: LossLog) -> None:
        self.reader = reader
        self.losses = losses
        self.percpu = cpus.percpu
        self.clocks = cpus.clocks
        self.ticks = cpus.ticks
        self.queues = {queue.cpu: queue for queue in cpus.queues}
        self.numbers: list[int] = cpus.percpu.cpus.tolist()
        self.rows = {cpu: row for row, cpu in enumerate(self.numbers)}
        self.online = frozenset(online_cpus(reader, losses))
        self.counts = PreemptCounts(
            reader, cpus.percpu, lambda: self.running.addresses, losses
        )

    def name(self, address: int) -> str | None:
        """Return the function at an address."""
        found = self.text.name(address)
        return None if found is None else found.partition(".")[0]

    @cached_property
    def text(self) -> KernelText:
        """Functions by address; made when first needed."""
        return self.reader.once(
            KernelText, lambda: KernelText(self.reader, self.losses)
        )

    def is_idle(self, cpu: int) -> bool:
        """Return whether a CPU runs its idle task."""
        queue = self.queues.get(cpu)
        current = queue.current if queue else None
        return current is not None and current.sched_class == "idle"

    def delay(self, cpu: int) -> int | None:
        """Return the delay of a CPU's timer interrupt."""
        if cpu not in self.online:
            return None
        return tick_delay(self.ticks, self.rows[cpu], self.queues[cpu].lag_ns)

    @cached_property
    def running(self) -> RunningTasks:
        """The tasks that CPUs run."""
        queues = read_structs(
            self.reader,
            "struct rq",
            _QUEUES,
            self.percpu.addresses("runqueues"),
            self.losses,
        )
        addresses = np.where(queues.readable, queues["current"], 0)
        task_reader = self.reader.once(TaskReader, lambda: TaskReader(self.reader))
        # Idle tasks are in no list of tasks, and have no PID.
        unique = sorted({*addresses.tolist()} - {0, *queues["idle"].tolist()})
        table = task_reader.read(unique, self.losses)
        known = {address: row for row, address in enumerate(table["address"].tolist())}
        rows = {
            cpu: known[address]
            for cpu, address in zip(self.numbers, addresses.tolist(), strict=True)
            if address in known
        }
        return RunningTasks(addresses, table, rows)
