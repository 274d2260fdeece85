# SPDX-License-Identifier: LGPL-2.1-or-later

"""Collects reports on the activity and the times of all tasks."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import drgn
import numpy as np
import numpy.typing as npt
from drgn.helpers.linux.mm import totalram_pages
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST
from msatools.kernel.clocks import (
    Accounting,
    AccountingReader,
    Clocks,
    load_averages,
)
from msatools.kernel.percpu import online_cpus, possible_cpus, require_cpus
from msatools.kernel.pids import find_tasks, require_pids
from msatools.kernel.report import (
    KernelSession,
    LossLog,
    Progress,
    noting_refusals,
    quietly,
)
from msatools.kernel.structs import Booleans
from msatools.locks.file_targets import as_watched
from msatools.locks.herds import (
    MIN_WAITERS,
    Watched,
    find_herds,
    may_be_herds,
    read_again,
)
from msatools.locks.report import Herd, WaitTarget
from msatools.locks.user_stacks import with_frames
from msatools.locks.wait_targets import (
    Explainer,
    as_conditions,
    awake_rows,
    is_off_queue,
    leaving,
)
from msatools.program.description import describe
from msatools.program.model import Target
from msatools.prstat.interval import Deltas, Ended, Interval, ended
from msatools.prstat.model import PrstatReport, StackGroup, Totals
from msatools.prstat.recorded import (
    count,
    ordered,
    recorded,
    threads_of,
    wanted_rows,
    with_views,
)
from msatools.prstat.rows import (
    Kept,
    Spent,
    TaskRows,
    Threads,
    keep,
    totals,
)
from msatools.prstat.select import Options
from msatools.prstat.states import Breakdown, breakdown, sleeps, states
from msatools.selfdesc.find import ask
from msatools.tasks.accounting import (
    Microstates,
    Processes,
    bound_of,
    read_delays,
    read_memory,
    read_processes,
    read_reaped,
    without_sleep,
)
from msatools.tasks.identity import (
    KernelNames,
    comm_text,
    read_cgroups,
    read_identities,
    read_task_namespaces,
)
from msatools.tasks.running_stacks import StackReader, frame_text, named_frames
from msatools.tasks.sampler import Sampler, TaskSample, TaskState, runs
from msatools.tasks.stacks import Stack, Stacks
from msatools.tasks.states import Throttles, loads, read_in_iowait
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import RUNNABLE, TaskClass, are_any

# --- Groups sleeping threads by their kernel stacks, as mdb's ::stacks.


def stack_groups(
    tasks: TaskTable,
    now: TaskState,
    wanted: npt.NDArray[np.bool_],
    running: StackReader | None = None,
    *,
    functions: Iterable[str] = (),
    modules: Iterable[str] = (),
) -> tuple[StackGroup, ...]:
    """Group the wanted threads that have a stack, the largest group first.

    :param running: Reads the stacks of running threads, in a dump; if ``None``, these
        threads are left out.
    :param functions: If not empty, only stacks with one of these functions.
    :param modules: If not empty, only stacks with a function of one of these modules.
    """
    functions, modules = frozenset(functions), frozenset(modules)
    frames: dict[int, tuple[str, ...]] = {}
    groups: dict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
    for row in np.flatnonzero(wanted & (now.stacks.index != 0)).tolist():
        index = int(now.stacks.index[row])
        if index not in frames:
            named = _frames(now.stacks, now.stacks.unique[index])
            keep = _has(named, functions, modules)
            frames[index] = tuple(map(frame_text, named)) if keep else ()
        if frames[index]:
            groups[frames[index], int(now.classes[row])].append(row)
    on_cpu = np.flatnonzero(wanted & runs(tasks)).tolist() if running else []
    for row in on_cpu:
        assert running is not None
        address = int(tasks["address"][row])
        stack = running.read(address) or running.at_last_switch(address)
        named = [] if stack is None else list(named_frames(stack, now.stacks.text))
        if named and _has(named, functions, modules):
            key = tuple(map(frame_text, named)), int(now.classes[row])
            groups[key].append(row)
    made = [
        StackGroup(
            frames=stack_frames,
            task_class=TaskClass(task_class).name,
            pids=tuple(tasks["pid"][rows].tolist()),
            min_age_ns=int(now.age_ns[rows].min()),
            max_age_ns=int(now.age_ns[rows].max()),
            ages_ns=tuple(now.age_ns[rows].tolist()),
            comms=tuple(map(comm_text, tasks["comm"][rows])),
        )
        for (stack_frames, task_class), rows in groups.items()
    ]
    return tuple(sorted(made, key=lambda group: (-len(group.pids), group.pids)))


def _frames(stacks: Stacks, stack: Stack) -> list[tuple[str, str | None]]:
    """Return each function of a stack, with its module or ``None``."""
    text = stacks.text
    return [
        (name, text.module_name(address))
        for name, address in zip(stacks.names(stack), stack.instructions(), strict=True)
    ]


def _has(
    frames: list[tuple[str, str | None]],
    functions: frozenset[str],
    modules: frozenset[str],
) -> bool:
    # Names may have suffixes of the compiler, as in do_exit.cold.
    names = {name.partition(".")[0] for name, _ in frames}
    names |= {name for name, _ in frames}
    return (not functions or bool(functions & names)) and (
        not modules or any(module in modules for _, module in frames)
    )


# --- Runs of msa-prstat: its report, and its intervals with samples.


_COVERAGE = (
    *("tasks", "tasks_unreadable", "lists_broken", "stacks", "stacks_incomplete"),
    *("stacks_guessed", "stacks_by_drgn", "latency_impossible", "breakdown_impossible"),
    *("reads", "bytes_read"),
)
"""Keys that are always in the report's coverage."""

_STEPS = 8


def collect_prstat(
    prog: drgn.Program,
    *,
    target: Target | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> PrstatReport:
    """
    Report what all tasks of a kernel are doing, and where their time went.

    >>> report = collect_prstat(prog)
    >>> report.tasks[0].comm
    'hog'

    Nothing is written, and nothing but *prog* is read.

    :param prog: A Linux kernel with types, live or dead.
    :param target: Description of the target; derived from *prog* if not given.
    :param progress: Called with the steps done and the number of steps.
    :raises NoSuchPidError: if a requested PID does not exist
    :raises MissingError: if the types of tasks are missing
    :raises drgn.FaultError: if the dump lacks every task
    :raises TargetError: if the program is not a kernel, or has no types
    """
    session = Prstat(prog, target or describe(prog), options or Options())
    return session.report(progress or quietly)


class _Kept(Struct, frozen=True):
    """Each thread's times over its life, with the parts that the kernel keeps."""

    accounting: Accounting
    lives: Microstates
    split: Breakdown


class Prstat(KernelSession[PrstatReport, Options]):
    """A series of reports: see :class:`msatools.kernel.report.Session`."""

    def __init__(self, prog: drgn.Program, target: Target, options: Options) -> None:
        super().__init__(prog, target, options)
        with self._learning():
            # If the list of CPUs is lost, the report says so.
            if (wanted := options.selection.cpus) is not None and (
                cpus := possible_cpus(prog, self._losses)
            ):
                require_cpus(wanted, cpus)
            self._accounting = AccountingReader(prog)
            self._bound_ns = bound_of(self._accounting.read(self._losses))
            self._sampler = Sampler(
                self._reader,
                self._losses,
                hz=options.hz,
                share=options.share,
                bound_ns=self._bound_ns,
                read=self._read,
                on_code=self._on_code if options.causes else None,
            )
            self._explainer = Explainer(self._reader)
            self._kernel_names = KernelNames(self._reader)
        self._live = self._reader.is_live
        self._interval: Interval | None = None
        self._began: tuple[TaskSample, Processes] | None = None

    @property
    def period_s(self) -> float | None:
        """Seconds from one sample to the next."""
        return self._sampler.period_s

    def report(self, progress: Progress) -> PrstatReport:
        """Report each task's life, and what it is doing."""
        with self._reporting():
            progress(0, _STEPS)
            sample = self._sample()
            processes = read_processes(self._reader, sample.tasks, self._losses)
            progress(1, _STEPS)
            return self._report(sample, processes, progress)

    def begin(self, progress: Progress) -> None:
        """Take the first sample of an interval."""
        with self._reporting():
            sample = self._sample()
            self._begin(
                sample, read_processes(self._reader, sample.tasks, self._losses)
            )

    def sample(self) -> None:
        """Take a sample within an interval."""
        assert self._interval is not None, "no interval has begun"
        self._interval.add(self._sampler.sample())

    def advance(self, progress: Progress) -> PrstatReport:
        """Report what tasks did in the interval that ends now."""
        assert self._interval is not None, "no interval has begun"
        assert self._began is not None
        with noting_refusals(self._prog, self._losses):
            sample = self._sampler.sample()
            self._kernel_names.fill(sample.tasks, self._losses)
            processes = read_processes(self._reader, sample.tasks, self._losses)
            self._interval.add(sample)
            deltas = self._interval.end()
            dead = ended(*self._began, sample, processes)
            self._losses.coverage["tasks_gone"] += deltas.gone
            self._losses.coverage["samples"] = deltas.samples
            report = self._report(sample, processes, progress, deltas, dead)
        self._begin(sample, processes)
        # Losses of samples within the next interval belong to its report.
        self._forget()
        return report

    def _begin(self, sample: TaskSample, processes: Processes) -> None:
        self._interval = Interval(sample, self._bound_ns)
        self._began = sample, processes

    def _sample(self) -> TaskSample:
        sample = self._sampler.sample()
        self._kernel_names.fill(sample.tasks, self._losses)
        wanted = self._options.selection.pids or ()
        lost = ("pids_unreadable", "tasks_unreadable", "lists_broken")
        damaged = any(self._losses.coverage[key] for key in lost)
        require_pids(wanted, sample.tasks["pid"], damaged=damaged)
        return sample

    def _on_code(
        self,
        tasks: TaskTable,
        now: TaskState,
        clocks: Clocks,
        rows: npt.NDArray[np.intp],
    ) -> Booleans:
        """Return which threads' page faults are on code (executable mappings)."""
        # Losses are dropped: the report reads the same data again, and notes them.
        aside = LossLog()
        return _text_faults(
            self._explainer.explain(tasks, now, clocks, aside, rows=rows)
        )

    def _read(self, losses: LossLog) -> TaskTable:
        """Read all threads, or those of the requested processes."""
        reader = self._sampler.task_reader
        pids = self._options.selection.pids
        if pids is None:
            return reader.require_all(losses)
        found = list(find_tasks(self._reader, pids, losses).values())
        if not self._options.by_thread:
            return reader.read_processes(found, losses)
        # The first thread of a process stands for all of them, as in prstat -L -p.
        named = reader.read(found, losses)
        leaders = named["address"][named.leaders].tolist()
        whole = reader.read_processes(leaders, losses)
        others = named.only(~np.isin(named["tgid"], whole["tgid"]))
        return TaskTable(np.concatenate([whole.records, others.records]), whole.columns)

    def _report(
        self,
        sample: TaskSample,
        processes: Processes,
        progress: Progress,
        deltas: Deltas | None = None,
        dead: Ended | None = None,
    ) -> PrstatReport:
        options, tasks = self._options, sample.tasks
        kept = self._kept(sample)
        progress(2, _STEPS)
        threads = self._threads(sample, processes, None if deltas else kept.split)
        progress(4, _STEPS)
        if deltas is None or dead is None:
            spent = totals(tasks, kept.lives, processes)
        else:
            spent = _spent(deltas, dead)
        known = keep(threads, spent)
        if options.load or options.whole:
            known = replace(known, callers=_callers(sample.now))
        rows = wanted_rows(known, options)
        wanted = threads_of(rows)
        shown = rows
        if not options.whole:
            shown = rows.take(ordered(rows, options, self._target)[: options.rows])
        explained = self._explained(sample, wanted, shown)
        ons, herds = self._waits(sample, wanted, explained, deltas)
        progress(6, _STEPS)
        rows, shown = rows.with_ons(ons), shown.with_ons(ons)
        summed = self._totals(known, wanted)
        self._count(sample, spent, kept.split.impossible)
        if options.states:
            self._note_ended(tasks, processes, wanted)
        coverage = self._coverage(_COVERAGE)
        report = PrstatReport(
            target=self._target,
            taken_at_ns=sample.clocks.monotonic_ns,
            interval_ns=deltas.interval_ns if deltas else None,
            coverage={
                # Keys that are not always there follow by name.
                name: coverage[name]
                for name in (*_COVERAGE, *sorted(coverage))
            },
            notes=tuple(self._losses.notes.values()),
            bound_ns=self._bound_ns,
            accounting=kept.accounting,
            totals=summed,
            tasks=(),
            per_thread=options.by_thread,
            selects=not options.selection.is_all,
            herds=herds,
        )
        if options.whole:
            return recorded(report, replace(known, ons=tuple(ons)))
        report = with_views(replace(report, tasks=shown), rows, wanted, options)
        return self._with_stacks(report, sample, kept, wanted, ons)

    def _kept(self, sample: TaskSample) -> _Kept:
        """Return the times of each thread's life that the kernel keeps."""
        reader, losses, tasks = self._reader, self._losses, sample.tasks
        accounting = self._accounting.read(losses)
        in_iowait = read_in_iowait(reader, tasks, losses)
        slept = sleeps(tasks, accounting, sample.now, in_iowait)
        lives = without_sleep(sample.states, slept.total_ns)
        delays = read_delays(reader, tasks, losses)
        split = breakdown(tasks, sample.clocks, lives, slept, delays, accounting)
        return _Kept(accounting, lives, split)

    def _threads(
        self, sample: TaskSample, processes: Processes, split: Breakdown | None
    ) -> Threads:
        """Read the data of threads outside of their ``struct task_struct``."""
        reader, losses, tasks = self._reader, self._losses, sample.tasks
        options = self._options
        return Threads(
            tasks=tasks,
            now=sample.now,
            on_code=sample.on_code,
            identities=read_identities(reader, tasks, losses),
            processes=processes,
            memory=read_memory(reader, tasks, losses),
            cgroups=read_cgroups(reader, tasks, losses),
            breakdown=split,
            reaped=read_reaped(reader, tasks, losses) if options.children else None,
            namespaces=(
                read_task_namespaces(reader, tasks, losses)
                if options.needs_namespaces
                else None
            ),
        )

    def _with_stacks(
        self,
        report: PrstatReport,
        sample: TaskSample,
        kept: _Kept,
        wanted: Booleans,
        ons: Sequence[WaitTarget | None],
    ) -> PrstatReport:
        """Return the report with states and stacks, if requested."""
        options, tasks, now = self._options, sample.tasks, sample.now
        lives, split, accounting = kept.lives, kept.split, kept.accounting
        if options.states:
            faults = _text_faults(ons)
            times = states(tasks, lives, split, accounting, now, wanted, faults)
            report = replace(report, states=times)
        if options.stacks:
            asked = {"functions": options.functions, "modules": options.modules}
            running = StackReader(self._reader, now.stacks.text, self._losses)
            groups = stack_groups(tasks, now, wanted, running, **asked)
            report = replace(report, stacks=groups)
        return report

    def _explained(
        self, sample: TaskSample, wanted: Booleans, shown: TaskRows
    ) -> Booleans:
        """Return which wanted threads to explain: shown, in the load, or in herds."""
        options, tasks, now = self._options, sample.tasks, sample.now
        if options.states or (options.whole and options.causes):
            return wanted
        asked = may_be_herds(tasks, now)
        if options.load:
            asked |= loads(tasks) | are_any(now.classes, RUNNABLE)
        if options.causes:
            asked[shown.columns["thread"]] = True
        return asked & wanted

    def _waits(
        self,
        sample: TaskSample,
        wanted: Booleans,
        explained: Booleans,
        deltas: Deltas | None,
    ) -> tuple[list[WaitTarget | None], tuple[Herd, ...]]:
        """Return what threads wait on, and the herds among the wanted ones.

        :param explained: The threads to explain, among them all that may be herds.
        """
        tasks, now = sample.tasks, sample.now
        runs = are_any(now.classes, RUNNABLE)
        ons: list[WaitTarget | None] = [None] * len(tasks)
        if not explained.any():
            return ons, ()
        throttles = Throttles(self._reader, tasks, self._losses)
        for row in np.flatnonzero(explained & runs).tolist():
            cpu = int(tasks["cpu"][row])
            throttle = throttles.of(row, sample.clocks.local_ns)
            ons[row] = (
                WaitTarget(kind="cpu", cpu=cpu)
                if throttle is None
                else WaitTarget(kind="quota", cpu=cpu, path=throttle.cgroup)
            )
        waits = ~runs & (now.classes != TaskClass.ZMB)
        places = np.flatnonzero(explained & waits)
        # All wanted waiters count, however few rows are shown.
        alone = np.count_nonzero(wanted & waits) == 1
        found = self._explainer.explain(
            tasks, now, sample.clocks, self._losses, rows=places, alone=alone
        )
        for row, on in zip(places.tolist(), found, strict=True):
            ons[row] = on
        # Herds include tasks being woken: they wait for a CPU, or left their futex's
        # queue. (On a running kernel the queue was read at another time.)
        things = list(ons)
        off = [row for row, on in enumerate(ons) if on and is_off_queue(on)]
        gone = [] if self._live else off
        awake = awake_rows(tasks, now)
        awake = awake[explained[awake]]
        # Unreadable data is left out here without a note.
        context = self._explainer.context(tasks, sample.clocks)
        stack_bytes = self._explainer.stack_bytes
        left = leaving(context, now, awake, stack_bytes)
        for row, on in zip(awake.tolist(), left, strict=True):
            if on is not None:
                things[row] = on
                gone.append(row)
        things = as_conditions(context, things, MIN_WAITERS)
        things = as_watched(context, now, things, MIN_WAITERS, stack_bytes)
        again = read_again(self._sampler.task_reader, tasks) if self._live else None
        watched = Watched(deltas.nvcsw if deltas else None, again)
        herds = find_herds(tasks, now, things, sample.clocks, gone, watched)
        return ons, with_frames(herds, context)

    def _count(
        self, sample: TaskSample, spent: Spent, split_impossible: Booleans
    ) -> None:
        """Count, and note, impossible counters of the kernel."""
        losses = self._losses
        impossible = int(np.count_nonzero(spent.lives.impossible))
        losses.coverage["tasks"] = len(sample.tasks)
        losses.coverage["latency_impossible"] = impossible
        if impossible:
            losses.note(
                "latency-impossible",
                f"{impossible} threads have a run_delay longer than their lifetime "
                f"({_why_impossible(spent.lives)}): LAT is capped",
            )
        count = int(np.count_nonzero(split_impossible))
        losses.coverage["breakdown_impossible"] = count
        if count:
            losses.note(
                "breakdown-impossible",
                f"{count} threads have counters of sleeps or delays that are more than "
                "the time they are part of: those are left out",
            )

    def _note_ended(
        self, tasks: TaskTable, processes: Processes, wanted: Booleans
    ) -> None:
        """Note the CPU time of ended threads, which ``--states`` does not include."""
        _, first = np.unique(tasks["signal"][wanted], return_index=True)
        ended_ns = int(processes.dead_sum_exec_ns[wanted][first].sum())
        if ended_ns:
            self._losses.note(
                "states-without-ended",
                "--states adds up the threads that exist: "
                f"{ended_ns / 1e9:.3f} s on the CPU of ended threads of the same "
                "processes are in no state",
            )

    def _totals(self, known: Kept, wanted: Booleans) -> Totals:
        of_machine = Totals(
            processes=0,
            threads=0,
            states={},
            classes={},
            load_averages=load_averages(self._prog, self._losses),
            cpus=len(online_cpus(self._reader, self._losses)),
            ram_bytes=self._ram_bytes(),
        )
        return count(known, wanted, of_machine)

    def _ram_bytes(self) -> int | None:
        try:
            pages = int(ask(totalram_pages, self._prog))
        except LOST:
            return None
        return pages * self._target.page_size


def _why_impossible(lives: Microstates) -> str:
    """Return why the kernel may count more latency than there was time for."""
    if lives.latency_is_bound:
        return "sleep on the run queue counts, since 6.12"
    # By the clock of its CPU, a thread may even have run before it was created.
    most_ms = lives.missed_ns.max() / 1e6
    return f"the clocks of the CPUs have been {most_ms:.0f} ms apart, or more"


def _text_faults(ons: Sequence[WaitTarget | None]) -> Booleans:
    """Return which threads' page faults are on code (executable mappings)."""
    return np.array([on is not None and bool(on.text) for on in ons], np.bool_)


def _callers(now: TaskState) -> tuple[str | None, ...]:
    """Return the calling function of each thread's wait."""
    names = [wait.caller for wait in now.waits]
    return tuple(names[stack] for stack in now.stacks.index.tolist())


def _spent(deltas: Deltas, dead: Ended) -> Spent:
    """Return the work of threads within an interval."""
    return Spent(
        lives=deltas.lives,
        nvcsw=deltas.nvcsw,
        nivcsw=deltas.nivcsw,
        min_flt=deltas.min_flt,
        maj_flt=deltas.maj_flt,
        dead=dead,
        off_cpu=deltas.off,
    )
