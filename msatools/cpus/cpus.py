# SPDX-License-Identifier: LGPL-2.1-or-later

"""Collect reports of processor sets and per-CPU work of one kernel.

Also the options of a report, and the selection of the parts that they request.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile

import drgn
from drgn.helpers.linux.nodemask import for_each_online_node
from drgn.helpers.linux.percpu import per_cpu
from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.counters import CpuCounters, delta, read_counters
from msatools.cpus.diagnostics import Known, findings
from msatools.cpus.irqs import (
    IrqTable,
    irqs,
    no_intr_cpus,
    percpu_interrupts,
    read_irqs,
    route,
)
from msatools.cpus.irqs import delta as irqs_delta
from msatools.cpus.masks import CpuMasks, read_masks, read_root_domains
from msatools.cpus.model import (
    Cpu,
    CpuPlan,
    CpuSet,
    CpusReport,
    Processor,
    RunQueue,
    StackOfCpu,
    Stalls,
    Storm,
)
from msatools.cpus.placement import place
from msatools.cpus.plan import make_plan, tasks_on
from msatools.cpus.polls import PacketCounts, Polls, packets_delta
from msatools.cpus.processors import (
    Parts,
    cpu_rows,
    involuntary,
    moves,
    read_processors,
)
from msatools.cpus.runqueues import read_run_queues
from msatools.cpus.sets import partition_kind, read_sets, set_of_cpus, with_reason
from msatools.cpus.stall_reading import CpuState
from msatools.cpus.stalls import read_stalls
from msatools.cpus.storms import Storms
from msatools.cpus.times import read_tick_sched
from msatools.errors import LOST
from msatools.kernel.clocks import load_averages, read_clocks
from msatools.kernel.percpu import read_percpu, require_cpus
from msatools.kernel.report import KernelSession, Loss, LossLog, Progress, quietly
from msatools.program.description import describe
from msatools.program.linear import KERNEL_HALF
from msatools.program.model import Target, TargetError
from msatools.selfdesc.find import ask, ask_each, drgn_lookups, find_variable
from msatools.tasks.identity import KernelNames, comm_text, read_cgroups
from msatools.tasks.running_stacks import StackReader, frame_texts
from msatools.tasks.sampler import INTERRUPTS, running_frames
from msatools.tasks.table import TaskReader, TaskTable
from msatools.tasks.text import KernelText
from msatools.tasks.waits import is_thunk

# --- Options of msa-cpus.


class CpusOptions(Struct, frozen=True):
    """What msa-cpus reads and reports."""

    cpus: frozenset[int] | None = None
    """The CPUs to report; ``None`` for all possible ones."""

    sets: tuple[str, ...] | None = None
    """The sets whose CPUs to report; ``None`` for all."""

    irqs: bool = False
    """Report each interrupt."""

    tasks: bool = False
    """Read all tasks: pinned and straying ones by set, involuntary switches and
    migrations by CPU."""

    doing: bool = False
    """Report what each CPU did when a dump was made."""

    stalls: bool = False
    """Report stalls, with the evidence."""

    stacks: bool = False
    """Report the stack of each CPU, in a dump."""

    plan: frozenset[int] | None = None
    """The CPUs that a plan is to set apart; ``None`` for no plan."""

    whole: bool = False
    """Report everything, for a later selection by :func:`choose`."""


# --- Select the requested part of a report of all CPUs. Pure.


class NoSuchSetError(TargetError):
    """A requested set does not exist."""


def choose(report: CpusReport, options: CpusOptions) -> CpusReport:
    """
    Return the parts of a complete report that the options request.

    :raises NoSuchCpuError: if a requested CPU is not in the report
    :raises NoSuchSetError: if a requested set is not in the report
    """
    if not options.tasks and has_tasks(report):
        report = _without_tasks(report)
    numbers = [row.cpu for row in report.cpus]
    wanted = wanted_cpus(options, report.sets, numbers)
    is_all = wanted >= {*numbers}
    known = Known(
        cpus=report.cpus,
        sets=report.sets,
        queues=report.run_queues,
        irqs=report.irqs or (),
        in_interval=report.interval_ns is not None,
        asks_irqs=options.irqs,
        stalls=() if report.stalls is None else report.stalls.found,
        storms=report.storms or (),
    )
    return replace(
        report,
        cpus=tuple(row for row in report.cpus if row.cpu in wanted),
        sets=tuple(one for one in report.sets if is_all or wanted & {*one.cpus}),
        run_queues=tuple(
            queue
            if options.doing or queue.doing is None
            else replace(queue, doing=None)
            for queue in report.run_queues
            if queue.cpu in wanted
        ),
        findings=tuple(
            finding for finding in findings(known) if is_all or wanted & {*finding.cpus}
        ),
        irqs=report.irqs if options.irqs else None,
        vectors=report.vectors if options.irqs else None,
        softirqs=report.softirqs if options.irqs else None,
        stalls=_stalls_of(report.stalls, wanted, is_all) if options.stalls else None,
        stacks=_stacks_of(report.stacks, wanted) if options.stacks else None,
    )


def _stalls_of(
    stalls: Stalls | None, wanted: frozenset[int], is_all: bool
) -> Stalls | None:
    """Return the stalls of the requested CPUs, and those that they cause."""
    if stalls is None or is_all:
        return stalls
    return replace(
        stalls,
        found=tuple(
            stall for stall in stalls.found if wanted & {*stall.cpus, stall.culprit_cpu}
        ),
        cpus=tuple(held for held in stalls.cpus if held.cpu in wanted),
        calls=tuple(call for call in stalls.calls if wanted & {call.cpu, call.caller}),
        timers=tuple(timer for timer in stalls.timers if timer.cpu in wanted),
    )


def _stacks_of(
    stacks: Sequence[StackOfCpu] | None, wanted: frozenset[int]
) -> tuple[StackOfCpu, ...] | None:
    if stacks is None:
        return None
    return tuple(stack for stack in stacks if stack.cpu in wanted)


def has_tasks(report: CpusReport) -> bool:
    """Return whether the tasks of sets were read for a report."""
    return any(one.tasks is not None for one in report.sets)


def wanted_cpus(
    options: CpusOptions, sets: Sequence[CpuSet], numbers: Sequence[int]
) -> frozenset[int]:
    """
    Return the CPUs that both *cpus* and *sets* of the options select.

    :param numbers: Numbers of all possible CPUs.
    :raises NoSuchCpuError: if a requested CPU does not exist
    :raises NoSuchSetError: if a requested set does not exist
    """
    names = set_of_cpus(sets, numbers)
    wanted = frozenset(numbers)
    if options.cpus is not None:
        require_cpus(options.cpus, wanted)
        wanted = options.cpus
    if options.sets is not None:
        by_name = {one.name: {*one.cpus} for one in sets}
        unknown = [name for name in options.sets if name not in by_name]
        if unknown:
            raise NoSuchSetError(
                f"set {', '.join(unknown)}",
                "there is none of that name",
                f"choose from {', '.join(by_name)}",
            )
        chosen = {cpu for cpu, name in names.items() if name in options.sets}
        for name in options.sets:
            chosen |= by_name[name]
        wanted &= chosen
    return wanted


def _without_tasks(report: CpusReport) -> CpusReport:
    return replace(
        report,
        cpus=tuple(replace(row, icsw=None, migr=None) for row in report.cpus),
        sets=tuple(replace(one, tasks=None) for one in report.sets),
    )


# --- The collection of a report since boot, and of reports of intervals.


_COVERAGE = ("cpus", "cpus_unreadable", "irqs", "tasks", "reads", "bytes_read")
"""Keys that are always in the report's coverage."""

_STEPS = 4


def collect_cpus(
    prog: drgn.Program,
    *,
    target: Target | None = None,
    options: CpusOptions | None = None,
    progress: Progress | None = None,
) -> CpusReport:
    """
    Return the processor sets of a kernel, and what each CPU has done since boot.

    >>> report = collect_cpus(prog)
    >>> report.cpus[0].set, report.cpus[0].csw
    ('default', 812345)

    Nothing is written, and nothing but *prog* is read.

    :param prog: A Linux kernel with types, live or a dump.
    :param target: Description of the target; determined from *prog* if not given.
    :param progress: Called with the number of steps done, and of all steps.
    :raises NoSuchCpuError: if a requested CPU does not exist
    :raises NoSuchSetError: if a requested set does not exist
    :raises MissingError: if the types of CPUs are missing
    :raises drgn.FaultError: if the per-CPU data cannot be found in the dump
    :raises TargetError: if the program is not a kernel, or has no types
    """
    session = Cpus(prog, target or describe(prog), options or CpusOptions())
    return session.report(progress or quietly)


class _CpuSample(Struct, frozen=True):
    """The data of one sample; a report is made of one sample, an interval of two."""

    counters: CpuCounters
    irqs: IrqTable
    packets: Mapping[int, PacketCounts]
    tasks: TaskTable | None
    masks: CpuMasks
    sets: tuple[CpuSet, ...]
    processors: tuple[Processor, ...]
    queues: tuple[RunQueue, ...]
    stalls: Stalls


class Cpus(KernelSession[CpusReport, CpusOptions]):
    """A series of reports: see :class:`msatools.kernel.report.Session`."""

    def __init__(
        self, prog: drgn.Program, target: Target, options: CpusOptions
    ) -> None:
        super().__init__(prog, target, options)
        with self._learning():
            # Read once, so that its losses count once.
            self._percpu = read_percpu(self._reader, self._losses)
            self._kernel_names = KernelNames(self._reader)
            self._task_reader = TaskReader(self._reader) if options.tasks else None
            self._text = KernelText(self._reader, self._losses)
        self._before: _CpuSample | None = None

    def report(self, progress: Progress) -> CpusReport:
        """Report the CPUs' work since boot, and their state."""
        with self._reporting():
            sample = self._read_sample(progress)
            return self._report(sample, sample.counters, sample.irqs, sample.packets)

    def begin(self, progress: Progress) -> None:
        """Begin an interval: read all CPUs."""
        if self._before is None:
            # The first sample also looks up types, which is slow: counters read first
            # would have a longer interval than those read last.
            self._read_sample(progress)
        self._before = self._read_sample(progress)

    def advance(self, progress: Progress) -> CpusReport:
        """Report the CPUs' work in the interval, and their state."""
        before = self._before
        assert before is not None, "no interval has begun"
        with self._reporting():
            sample = self._before = self._read_sample(progress)
            grown = delta(before.counters, sample.counters, self._losses)
            came = irqs_delta(before.irqs, sample.irqs)
            packets = packets_delta(before.packets, sample.packets)
            return self._report(sample, grown, came, packets, before.tasks)

    def _read_sample(self, progress: Progress) -> _CpuSample:
        reader, percpu, found = self._reader, self._percpu, self._losses
        progress(0, _STEPS)
        tasks = self._task_reader.read_all(found) if self._task_reader else None
        if tasks is not None:
            self._kernel_names.fill(tasks, found)
        clocks = read_clocks(reader, found)
        progress(1, _STEPS)
        counters = read_counters(reader, percpu, clocks, found)
        interrupts = read_irqs(reader, percpu, found)
        packets = Polls(reader, percpu, found).counts()
        progress(2, _STEPS)
        domains = read_root_domains(reader, percpu, found)
        masks = read_masks(reader, domains, found)
        sets = read_sets(reader, domains, masks, found)
        sets = route(sets, interrupts, masks.online)
        sets = tuple(with_reason(each, masks.online) for each in sets)
        if tasks is not None:
            cgroups = read_cgroups(reader, tasks, found)
            sets = place(reader, sets, tasks, cgroups, masks, found)
        progress(3, _STEPS)
        ticks = read_tick_sched(reader, percpu, found)
        crash = self._target.crash
        queues = read_run_queues(
            *(reader, percpu, clocks, ticks, found),
            tasks=tasks,
            crash_cpu=crash.cpu if crash else None,
        )
        stalls = read_stalls(
            *(reader, CpuState(percpu, clocks, ticks, queues, crash), found),
            thorough=self._options.stalls or self._options.whole,
        )
        return _CpuSample(
            counters=counters,
            irqs=interrupts,
            packets=packets,
            tasks=tasks,
            masks=masks,
            sets=sets,
            processors=read_processors(reader, percpu, ticks, found),
            queues=tuple(with_host(queue, stalls) for queue in queues),
            stalls=stalls,
        )

    def _report(
        self,
        sample: _CpuSample,
        counters: CpuCounters,
        interrupts: IrqTable,
        packets: Mapping[int, PacketCounts],
        tasks_before: TaskTable | None = None,
    ) -> CpusReport:
        numbers = self._percpu.cpus.tolist()
        names = set_of_cpus(sample.sets, numbers)
        wanted = wanted_cpus(self._options, sample.sets, numbers)
        queues = self._with_doing(sample.queues, wanted)
        load, nodes = self._load(), self._nodes()
        names_irqs = self._options.irqs or self._options.whole
        counted = self._losses.coverage
        counted["cpus"] = len(numbers)
        counted["tasks"] = 0 if sample.tasks is None else len(sample.tasks)
        report = CpusReport(
            target=self._target,
            taken_at_ns=counters.taken_ns,
            interval_ns=counters.interval_ns,
            coverage=self._coverage(_COVERAGE),
            notes=tuple(self._losses.notes.values()),
            load=load,
            cpus=self._rows(sample, counters, interrupts, names, tasks_before),
            sets=sample.sets,
            run_queues=queues,
            findings=(),
            irqs=irqs(interrupts, self._text if names_irqs else None),
            vectors=(*counters.vector_rows(), *percpu_interrupts(interrupts)),
            softirqs=counters.softirq_rows(),
            nodes=nodes,
            stalls=sample.stalls,
            stacks=self._stacks({*sample.masks.online}, wanted),
        )
        now_ns = sample.counters.taken_ns
        storms = self._storms(report, now_ns, interrupts, packets)
        report = replace(report, storms=storms or None)
        if self._options.plan is not None:
            report = replace(report, plan=self._plan(report, sample))
        return report if self._options.whole else choose(report, self._options)

    def _storms(
        self,
        report: CpusReport,
        now_ns: int | None,
        interrupts: IrqTable,
        packets: Mapping[int, PacketCounts],
    ) -> tuple[Storm, ...]:
        if now_ns is None:
            return ()
        finder = Storms(self._reader, self._percpu, self._text, self._losses)
        span_ns = report.interval_ns or now_ns
        return finder.find(report, interrupts, packets, span_ns, now_ns)

    def _plan(self, report: CpusReport, sample: _CpuSample) -> CpuPlan:
        wanted, tasks = self._options.plan, sample.tasks
        assert wanted is not None
        assert tasks is not None, "a plan needs tasks"
        cgroups = read_cgroups(self._reader, tasks, self._losses)
        return make_plan(
            wanted,
            report.cpus,
            report.sets,
            report.irqs or (),
            frozenset(sample.irqs.irq[sample.irqs.movable].tolist()),
            tasks_on(wanted, report.cpus, tasks, cgroups, self._prog),
            partition_kind(self._prog),
        )

    def _rows(
        self,
        sample: _CpuSample,
        counters: CpuCounters,
        interrupts: IrqTable,
        names: Mapping[int, str],
        tasks_before: TaskTable | None,
    ) -> tuple[Cpu, ...]:
        tasks, cpus = sample.tasks, self._percpu.cpus
        return cpu_rows(
            Parts(
                cpus=cpus.tolist(),
                masks=sample.masks,
                no_intr=no_intr_cpus(interrupts, sample.masks.online),
                sets=names,
                counters=counters.rows(),
                processors=sample.processors,
                queues={queue.cpu: queue for queue in sample.queues},
                icsw=None if tasks is None else involuntary(tasks, cpus, tasks_before),
                migr=None if tasks is None else moves(tasks, cpus, tasks_before),
            )
        )

    def _with_doing(
        self, queues: tuple[RunQueue, ...], wanted: frozenset[int]
    ) -> tuple[RunQueue, ...]:
        """Add what the wanted CPUs were doing in a dump, if requested."""
        if not self._options.doing or self._target.live:
            return queues
        text = self._text
        return tuple(
            replace(queue, doing=doing(self._prog, text, queue.cpu, self._losses))
            if queue.cpu in wanted
            else queue
            for queue in queues
        )

    def _stacks(
        self, online: set[int], wanted: frozenset[int]
    ) -> tuple[StackOfCpu, ...] | None:
        """Return the stacks of the wanted CPUs; ``None`` if not requested, or live."""
        if not (self._options.stacks or self._options.whole) or self._target.live:
            return None
        stacks = StackReader(self._reader, self._text, self._losses)
        return tuple(
            self._stack(cpu, stacks)
            if cpu in online
            else StackOfCpu(cpu=cpu, pid=None, comm=None, frames=None)
            for cpu in sorted(wanted)
        )

    def _stack(self, cpu: int, stacks: StackReader) -> StackOfCpu:
        pid = comm = found = None
        try:
            task = current_task(self._prog, cpu)
            pid, comm = task.pid.value_(), task.comm.string_()
            found = stacks.read(task.value_()) or stacks.at_last_switch(task.value_())
        except LOST as error:
            self._losses.lose(Loss.CPUS, f"cannot read the stack of a CPU: {error}")
        return StackOfCpu(
            cpu=cpu,
            pid=pid,
            comm=None if comm is None else comm_text(comm),
            frames=frame_texts(found, self._text) if found else None,
        )

    def _load(self) -> tuple[float, ...] | None:
        load = load_averages(self._prog, self._losses)
        if load is None:
            self._losses.lose(Loss.LOAD)
        return load

    def _nodes(self) -> tuple[int, ...]:
        try:
            return tuple(ask_each(for_each_online_node, self._prog))
        except LOST as error:
            self._losses.lose(
                Loss.NODES, f"cannot determine which nodes are online: {error}"
            )
            return ()


def with_host(queue: RunQueue, stalls: Stalls) -> RunQueue:
    """Set ``lag_why`` of a CPU to its host if it is late although interrupts are on."""
    is_host = any(each.cpu == queue.cpu and each.why == "host" for each in stalls.cpus)
    if queue.lag_why != "interrupts off" or not is_host:
        return queue
    return replace(queue, lag_why="not run by its host")


def current_task(prog: drgn.Program, cpu: int) -> drgn.Object:
    """Return the ``struct task_struct *`` that a CPU runs."""
    with drgn_lookups:
        return ask(per_cpu, find_variable(prog, "runqueues"), cpu).curr


def doing(
    prog: drgn.Program, text: KernelText, cpu: int, losses: LossLog
) -> str | None:
    """Return what a CPU was doing, by its registers in a dump.

    :param text: looks up functions, also of modules without debug info
    :return: ``user mode``, or ``kernel`` or ``interrupt`` with the innermost function
        that is no thunk; ``None`` without registers, as on a live kernel, or for an
        offline CPU.
    """
    try:
        task = current_task(prog, cpu).value_()
    except LOST as error:
        losses.lose(Loss.CPUS, f"cannot determine what a CPU was doing: {error}")
        return None
    frames = running_frames(prog, task, losses)
    if not frames:
        return None
    innermost, _ = frames[0]
    if innermost < KERNEL_HALF:
        return "user mode"
    entered = any(name.startswith(INTERRUPTS) for _, name in frames)
    # A thunk says nothing: take the function that it returns to, or that jumps by it.
    thunks = [*takewhile(is_thunk, (name for _, name in frames))]
    if thunks and len(thunks) < len(frames):
        innermost = frames[len(thunks)][0] - 1
    name = text.name(innermost) or hex(innermost)
    return f"{'interrupt' if entered else 'kernel'} {name}"
