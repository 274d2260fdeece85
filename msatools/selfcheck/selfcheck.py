# SPDX-License-Identifier: LGPL-2.1-or-later

"""Run the checks of one command on a kernel, up to three times if it is running."""

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import drgn

import msatools
from msatools.cpus.cpus import CpusOptions, collect_cpus
from msatools.cpus.model import CpusReport
from msatools.errors import LOST, UNREADABLE, MissingError
from msatools.kernel.clocks import read_clocks
from msatools.kernel.percpu import PerCpu, kept_mask, read_percpu
from msatools.kernel.reader import Reader, is_left_out
from msatools.kernel.report import (
    LossLog,
    Progress,
    R,
    Report,
    Session,
    noting_refusals,
)
from msatools.locks.locks import collect_locks
from msatools.locks.report import LocksReport
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.program.arch import table_format
from msatools.program.model import Target
from msatools.prstat.model import PrstatReport
from msatools.prstat.prstat import collect_prstat
from msatools.prstat.select import Options
from msatools.selfcheck.model import (
    Comparison,
    KernelFacts,
    SelfCheckReport,
    Software,
    judge,
)
from msatools.selfdesc.find import find_symbol, find_variable, lookups
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader, TaskTable
from msatools.whatis.lookup import Lookup
from msatools.zombies.model import ZombiesReport
from msatools.zombies.zombies import collect_zombies

# --- One reading of a kernel: the reports of all commands, and its tasks.


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
        """Losses of the reads that checks make beside the reports."""

        self._reports: list[Report] = []

    @cached_property
    def memstat(self) -> MemstatReport:
        """The report of msa-memstat, with those of :data:`BY` that it can make."""
        has_tables = table_format(self.prog) is not None
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
        """The readers of msa-whatis."""
        return Lookup(self.reader, read_clocks(self.reader, self.losses), self.losses)

    @cached_property
    def percpu(self) -> PerCpu:
        """The offsets of the per-CPU variables."""
        return read_percpu(self.reader, self.losses)

    def collected(self, collect: Callable[[], R]) -> R:
        """Return a report, and keep it for :attr:`coverage`.

        :param collect: Makes the report of one command.
        :raises ReportLost: if data for the report are missing or unreadable
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


# --- Properties of the kernel and of this machine that decide how it is read.


_FEATURES = {
    "memcg": "root_mem_cgroup",
    "hugetlb": "hstates",
    "ksm": "ksm_pages_shared",
    "swap": "nr_swapfiles",
    "cpusets": "top_cpuset",
    "psi": "psi_system",
    "lockdep": "lock_classes",
    "page_owner": "page_owner_inited",
    "realtime": "rt_spin_lock",
}
"""Maps a part of the kernel to a symbol that exists if it was built with that part."""


def software() -> Software:
    """Return the versions of msatools, drgn and Python."""
    return Software(
        msatools=msatools.__version__,
        drgn=drgn.__version__,
        python=platform.python_version(),
    )


def kernel_facts(reports: ReportSet) -> KernelFacts:
    """Return the facts of a kernel; call it last, as it lists all lookups."""
    form = table_format(reports.prog)
    known = lookups(reports.prog)
    collector = StackCollector(reports.reader, reports.losses)
    return KernelFacts(
        paging_levels=None if form is None else form.levels,
        unwinder="own" if collector.is_fast else "drgn",
        cpus_possible=_count(reports, "possible"),
        cpus_online=_count(reports, "online"),
        nodes_possible=_nodes(reports.prog),
        features={
            name: _has(reports.prog, symbol) for name, symbol in _FEATURES.items()
        },
        variables_missing=tuple(sorted(known.variables_missing)),
        members_missing=tuple(
            sorted(
                f"{type_}.{newest}"
                for (type_, newest), found in known.members.items()
                if found is None
            )
        ),
        members_older={
            f"{type_}.{newest}": found
            for (type_, newest), found in sorted(known.members.items())
            if found not in (None, newest)
        },
    )


def _count(reports: ReportSet, name: str) -> int | None:
    cpus = kept_mask(reports.reader, name, reports.losses)
    return None if cpus is None else len(cpus)


def _nodes(prog: drgn.Program) -> int | None:
    try:
        return int(find_variable(prog, "nr_node_ids").value_())
    except MissingError:
        return 1
    except UNREADABLE:
        return None


def _has(prog: drgn.Program, symbol: str) -> bool:
    try:
        find_symbol(prog, symbol)
    except MissingError:
        return False
    return True


# --- Runs the checks of one command: the session of --self-check.


Check = Callable[[ReportSet], Iterator[Comparison]]
"""Compares numbers; raises MissingError if the kernel does not have what is compared,
FaultError if that cannot be read."""

_MAX_READINGS = 3
"""How often a running kernel is read if numbers differ."""


class SelfChecks(Session[SelfCheckReport]):
    """A run of the checks of one command on one kernel."""

    def __init__(
        self,
        command: str,
        checks: Sequence[Check],
        prog: drgn.Program,
        target: Target,
    ) -> None:
        """
        :param command: Name of the command, for the report.
        :param checks: Its checks, at least one.
        """
        self._command = command
        self._checks = checks
        self._prog = prog
        self._target = target

    def report(self, progress: Progress) -> SelfCheckReport:
        """Check the numbers; read a running kernel again if some differ."""
        most = _MAX_READINGS if self._target.live else 1
        readings: dict[str, list[Comparison]] = {}
        for _ in range(most):
            reports = ReportSet(self._prog, self._target)
            with noting_refusals(self._prog, reports.losses):
                for comparison in self._compare(reports, progress):
                    readings.setdefault(comparison.name, []).append(comparison)
            checks = tuple(map(judge, readings.values()))
            if all(check.verdict in ("ok", "not-applicable") for check in checks):
                break
        return SelfCheckReport(
            target=self._target,
            taken_at_ns=reports.taken_at_ns,
            interval_ns=None,
            kernel=kernel_facts(reports),
            coverage=reports.coverage,
            notes=tuple(reports.losses.notes.values()),
            command=self._command,
            checks=checks,
            readings=max(map(len, readings.values())),
            software=software(),
        )

    def _compare(self, reports: ReportSet, progress: Progress) -> Iterator[Comparison]:
        for done, check in enumerate(self._checks):
            progress(done, len(self._checks))
            yield from _made(check, reports)
        progress(len(self._checks), len(self._checks))


def _made(check: Check, reports: ReportSet) -> Iterator[Comparison]:
    """Yield a check's comparisons, or one with the reason why it could not be made."""
    name = f"{check.__module__.rpartition('.')[2]}.{check.__name__}".replace("_", "-")
    what = (check.__doc__ or "").split("\n")[0].rstrip(".")
    try:
        yield from check(reports)
    except ReportLost as error:
        yield Comparison(name=name, left=what, right="", lost=str(error))
    except UNREADABLE as error:
        left_out = "the dump leaves it out" if is_left_out(error) else None
        yield Comparison(
            name=name, left=what, right="", lost=str(error), absent=left_out
        )
    except MissingError as error:
        yield Comparison(name=name, left=what, right="", absent=str(error))
