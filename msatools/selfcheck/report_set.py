# SPDX-License-Identifier: LGPL-2.1-or-later

"""One reading of a kernel: the reports of all commands, and its tasks."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property

import drgn

from msatools.cpus.cpus import collect_cpus
from msatools.cpus.model import CpusReport
from msatools.cpus.options import CpusOptions
from msatools.errors import LOST
from msatools.kernel.clocks import read_clocks
from msatools.kernel.percpu import PerCpu, read_percpu
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog, Report
from msatools.kernel.session import R
from msatools.locks.locks import collect_locks
from msatools.locks.report import LocksReport
from msatools.memory.by.usertables import UserTables
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.prstat.model import PrstatReport
from msatools.prstat.options import Options
from msatools.prstat.prstat import collect_prstat
from msatools.target.model import Target
from msatools.tasks.table import TaskReader, TaskTable
from msatools.whatis.lookup import Lookup
from msatools.zombies.model import ZombiesReport
from msatools.zombies.zombies import collect_zombies

BY = ("process", "cgroup", "slab", "file")
"""The breakdowns of memstat that are checked."""


class ReportLost(Exception):
    """A command has no report of this kernel; the argument says why."""


class ReportSet:
    """The reports of all commands, each made once, when a check first needs it."""

    def __init__(self, prog: drgn.Program, target: Target) -> None:
        self.prog = prog
        self.target = target
        self.reader = Reader(prog)
        self.losses = LossLog()
        """Losses of what is read beside the reports."""

        self._reports: list[Report] = []

    @cached_property
    def memstat(self) -> MemstatReport:
        """The report of msa-memstat, with those of :data:`BY` that it can make."""
        has_tables = UserTables.supported(self.prog)
        by = [each for each in BY if has_tables or each != "process"]
        return self.collected(
            lambda: collect_memstat(self.prog, target=self.target, by=by)
        )

    @cached_property
    def prstat(self) -> PrstatReport:
        """The report of msa-prstat on all threads, with stacks and the load."""
        options = Options(per_thread=True, stacks=True, load=True)
        return self.collected(
            lambda: collect_prstat(self.prog, target=self.target, options=options)
        )

    @cached_property
    def locks(self) -> LocksReport:
        """The report of msa-locks."""
        return self.collected(lambda: collect_locks(self.prog, target=self.target))

    @cached_property
    def zombies(self) -> ZombiesReport:
        """The report of msa-zombies."""
        return self.collected(lambda: collect_zombies(self.prog, target=self.target))

    @cached_property
    def cpus(self) -> CpusReport:
        """The report of msa-cpus, with interrupts, throttled tasks and stalls."""
        options = CpusOptions(irqs=True, tasks=True, stalls=True)
        return self.collected(
            lambda: collect_cpus(self.prog, target=self.target, options=options)
        )

    @cached_property
    def tasks(self) -> TaskTable:
        """All threads but the idle tasks."""
        return TaskReader(self.reader).read_all(self.losses)

    @cached_property
    def whatis(self) -> Lookup:
        """What msa-whatis reads of tasks."""
        return Lookup(self.reader, read_clocks(self.reader, self.losses), self.losses)

    @cached_property
    def percpu(self) -> PerCpu:
        """The offsets of the per-CPU variables."""
        return read_percpu(self.reader, self.losses)

    def collected(self, collect: Callable[[], R]) -> R:
        """Return a report, and keep it for :attr:`coverage`.

        :param collect: Makes the report of one command.
        :raises ReportLost: if the kernel lacks what it needs, or that is unreadable
        """
        try:
            report = collect()
        except LOST as error:
            raise ReportLost(f"no report: {error}") from error
        self._reports.append(report)
        return report

    @property
    def taken_at_ns(self) -> int | None:
        """The kernel's time at the first report."""
        times = (report.taken_at_ns for report in self._reports)
        return next((time for time in times if time is not None), None)

    @property
    def coverage(self) -> Mapping[str, int]:
        """Reads, and losses of all reports together."""
        total = Counter({"reads": self.reader.reads, "bytes_read": self.reader.bytes})
        total += self.losses.lost
        for report in self._reports:
            total += _reads_and_losses(report)
        return {key: total[key] for key in sorted(total)}


def _reads_and_losses(report: Report) -> Counter[str]:
    log = LossLog(Counter(report.coverage))
    reads = {key: log.coverage[key] for key in ("reads", "bytes_read")}
    return Counter(reads) + log.lost
