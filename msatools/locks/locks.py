# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who waits for whom, on one kernel: reports one after the other."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.losses import Loss
from msatools.kernel.pids import find_tasks
from msatools.kernel.report import LossLog, Note
from msatools.kernel.session import KernelSession, Progress, quietly
from msatools.locks.base.lock import Lock
from msatools.locks.base.lock_context import MAX_WAITERS, LockContext
from msatools.locks.base.struct_reader import Layout
from msatools.locks.changes import changes
from msatools.locks.consistency import (
    concerned,
    held,
    in_circles,
    unconfirmed,
    without_edges,
)
from msatools.locks.contention import Contention, Met, met
from msatools.locks.herds import look_again
from msatools.locks.options import LocksOptions
from msatools.locks.owners import BY_STACK
from msatools.locks.report import Contended, LocksReport
from msatools.locks.report_builder import ReportBuilder
from msatools.locks.sleeping.spinqueues import ANY, ANY_ID, ANY_NAME, SpinQueues
from msatools.locks.wait_snapshot import (
    WaitSnapshot,
    Wanted,
    find_owners,
    make_scene,
    missing_owners,
)
from msatools.prstat.sampler import MAX_HZ, Sampler, share_of_looks
from msatools.target.describe import describe
from msatools.target.model import Target
from msatools.tasks.names import KernelNames
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState, collect_now

_COVERAGE = (
    *("tasks", "tasks_scanned", "zombies", "tasks_unreadable", "lists_broken"),
    *("stacks", "stacks_incomplete", "blocked", "locks_unknown", "stacks_searched"),
    *("reads", "bytes_read"),
)
"""Keys that are always in the report's coverage."""

MAX_NAMED = 32
"""New locks that one look names, those first for which most tasks wait; others are told
by where they are."""

_STEPS = 6
_MAX_ROUNDS = 64
"""How far a chain of owners is followed, where each is looked up by itself."""


def collect_locks(
    prog: drgn.Program,
    *,
    target: Target | None = None,
    options: LocksOptions | None = None,
    progress: Progress | None = None,
) -> LocksReport:
    """
    Find all blocked tasks of a kernel, what they wait for and who has that.

    >>> report = collect_locks(prog)
    >>> report.roots[0].pid, report.roots[0].reason
    (487, 'FUSE server 480 (/mnt/d)')

    Nothing is written, and nothing but *prog* is read.

    :param prog: A Linux kernel with types, live or dead.
    :param target: What to say of the target; found out if not given.
    :param progress: Called now and then with steps done and steps in all.
    :raises NoSuchPidError: if a PID that the options name is not there
    :raises LookupError: if the types lack what describes tasks
    :raises drgn.FaultError: if the dump lacks every task
    :raises TargetError: if the program is not a kernel, or has no types
    """
    session = Locks(prog, target or describe(prog), options or LocksOptions())
    return session.report(progress or quietly)


Switches = Mapping[tuple[int, int], int]
"""How often each thread, by its ID and when it started, has gone to sleep."""


class Locks(KernelSession[LocksReport, LocksOptions]):
    """A run of reports on one kernel: see :class:`msatools.kernel.session.Session`."""

    def __init__(
        self, prog: drgn.Program, target: Target, options: LocksOptions
    ) -> None:
        super().__init__(prog, target, options)
        self._layout = Layout(self._reader)
        with self._learning():
            self._sampler = Sampler(self._reader, self._findings, read=self._read)
            self._task_reader = self._sampler.task_reader
            self._kernel_names = KernelNames(self._reader)
            self._stack_bytes = stack_bytes(prog)
            self._spin_queues = SpinQueues(self._reader, self._findings)
        self._switches: Switches | None = None
        self._live = bool(prog.flags & drgn.ProgramFlags.IS_LIVE)
        self._contention = Contention()
        self._names: dict[Lock, tuple[str, str | None]] = {}
        self._unnamed: dict[Lock, str] = {}
        """The IDs of locks that were met and, so far, not named."""

        self._cost_s = 0.0

    @property
    def period_s(self) -> float | None:
        """How long after one look the next is due; more where they cost much."""
        return max(1 / MAX_HZ, self._cost_s / share_of_looks(self._options.share))

    def begin(self, progress: Progress) -> None:
        """Look at all tasks: an interval begins."""
        self._contention = Contention()
        self._switches = None
        super().begin(progress)

    def sample(self) -> None:
        """Look at all tasks in the midst of an interval."""
        began_s = time.process_time()
        # A part that is lost is so in the report of the interval as well.
        aside = LossLog()
        if self._alone:
            scene = self._look_at(self._read(aside), aside, alone=True)
        else:
            scene = self._look_at_all(aside)
        find_owners(scene, self._reader, self._stack_bytes, aside, search=False)
        self._meet(scene)
        self._cost_s = time.process_time() - began_s

    def _meet(self, scene: WaitSnapshot) -> None:
        """Add the locks that a look has met, as they were just then."""
        self._contention.add([*met(scene), *self._spins()])
        new = [want for want in scene.crowds if want.lock not in self._names]
        if new:
            teller = ReportBuilder(scene, self._options, self._stack_bytes)
            new.sort(key=_crowd)
            self._names |= teller.names(new[:MAX_NAMED])
            self._unnamed |= teller.ids(new[MAX_NAMED:])

    def _spins(self) -> Iterator[Met]:
        """Yield what CPUs wait for that are in queues for spinlocks, as one lock."""
        if self._alone:
            return
        try:
            waiting = self._spin_queues.waiting()
        except drgn.FaultError as error:
            self._findings.lose(Loss.CPUS, f"who spins is lost: {error}")
            return
        if waiting:
            self._names[ANY] = ANY_ID, ANY_NAME
            yield Met(ANY, waiting, ())

    def delta(self, previous: LocksReport, current: LocksReport) -> LocksReport:
        """Return the current report with what has changed since the previous one."""
        report = changes(previous, current)
        contention, self._contention = self._contention, Contention()
        contended = self._contended(contention, report)
        unnamed = sum(lock not in self._names for lock in contention.ranked())
        # What lies at an address may be another lock by then.
        self._names, self._unnamed = {}, {}
        return replace(
            report,
            coverage={
                **report.coverage,
                "looks": contention.looks,
                "locks_unnamed": unnamed,
            },
            notes=(*report.notes, *_unnamed_note(unnamed)),
            contention=contended,
        )

    def _contended(
        self, contention: Contention, report: LocksReport
    ) -> tuple[Contended, ...]:
        """Tell the locks that were met, of the types that were asked for."""
        types, interval_ns = self._options.types, report.interval_ns or 0
        unnamed = {lock: (id_, None) for lock, id_ in self._unnamed.items()}
        names = {**unnamed, **self._names}
        return tuple(
            contention.tell(lock, *names[lock], interval_ns)
            for lock in contention.ranked()
            if types is None or lock.type in types
        )

    def report(self, progress: Progress) -> LocksReport:
        """Report who waits for whom now."""
        findings = self._findings
        with self._reporting():
            progress(0, _STEPS)
            scene = self._of_some() if self._alone else self._look_at_all(findings)
            self._kernel_names.fill(scene.tasks, findings)
            progress(3, _STEPS)
            search = not scene.look.alone
            find_owners(scene, self._reader, self._stack_bytes, findings, search)
            crowded = scene
            if self._live:
                self._meet(scene)
                scene = self._confirmed(self._held(scene))
            progress(4, _STEPS)
            again = look_again(self._task_reader, scene.tasks) if self._live else None
            teller = ReportBuilder(
                scene, self._options, self._stack_bytes, crowded, again
            )
            tasks, then = scene.tasks, self._switches
            told = teller.tell(None if then is None else _slept(tasks, then))
            now = zip(_threads(tasks), tasks["nvcsw"].tolist(), strict=True)
            self._switches = dict(now)
            self._count(scene)
        return LocksReport(
            **self._head(scene.clocks.monotonic_ns, _COVERAGE),
            waits=told.waits,
            locks=told.locks,
            roots=told.roots,
            deadlocks=told.deadlocks,
            herds=told.herds,
            inversions=told.inversions,
            pids=tuple(scene.tasks["pid"].tolist()),
        )

    def _read(self, findings: LossLog) -> TaskTable:
        """Read all threads, or those that were named."""
        return self._task_reader.read_named(self._options.pids, findings)

    def _of_some(self) -> WaitSnapshot:
        """Find what the named tasks wait for, and what the owners of that wait for."""
        tasks = self._read(self._findings)
        for _ in range(_MAX_ROUNDS):
            scene = self._look_at(tasks, self._findings, alone=True)
            missing = missing_owners(scene)
            if not missing:
                break
            more = self._are_tasks(self._task_reader.read(missing, self._findings))
            if not len(more):
                break
            # All is told anew of the tasks of this look and of the one before.
            self._findings.reset(self._lasting)
            records = np.concatenate([tasks.records, more.records])
            tasks = TaskTable(records, tasks.columns)
        if not _asks_all(scene):
            return scene
        self._findings.reset(self._lasting)
        tasks = self._task_reader.read_all(self._findings)
        return self._look_at(tasks, self._findings, alone=False)

    def _are_tasks(self, tasks: TaskTable) -> TaskTable:
        """Leave out what is no task any more, but was one when a lock named it."""
        known = find_tasks(self._reader, tasks["pid"].tolist(), LossLog())
        return tasks.only(np.isin(tasks["address"], list(known.values())))

    @property
    def _alone(self) -> bool:
        return self._options.pids is not None

    def _look_at_all(self, findings: LossLog) -> WaitSnapshot:
        seen = self._sampler.look()
        return self._scene(seen.tasks, seen.now, seen.clocks, findings, alone=False)

    def _look_at(
        self, tasks: TaskTable, findings: LossLog, *, alone: bool
    ) -> WaitSnapshot:
        clocks = read_clocks(self._reader, findings)
        now = collect_now(self._sampler.collector, self._prog, tasks, clocks)
        return self._scene(tasks, now, clocks, findings, alone=alone)

    def _scene(
        self,
        tasks: TaskTable,
        now: TaskState,
        clocks: Clocks,
        findings: LossLog,
        *,
        alone: bool,
    ) -> WaitSnapshot:
        # Who waits for a lock is told in full, also where but one was asked for.
        limit = MAX_WAITERS
        look = LockContext(
            self._layout, tasks, findings, clocks, alone=alone, limit=limit
        )
        return make_scene(look, now, clocks, self._stack_bytes)

    def _held(self, scene: WaitSnapshot) -> WaitSnapshot:
        """Leave out what has changed while it was looked at."""
        again = self._task_reader.read(concerned(scene), LossLog())
        kept = held(scene, again, alone=scene.look.alone)
        ended = len(scene.blocked) - len(kept.blocked)
        self._findings.coverage["waits_ended"] += ended
        return kept

    def _confirmed(self, scene: WaitSnapshot) -> WaitSnapshot:
        """Leave out circles of waits that are not there at a second look."""
        circles = in_circles(scene)
        if not circles:
            return scene
        aside = LossLog()
        tasks = self._task_reader.read(circles, aside)
        second = self._look_at(tasks, aside, alone=True)
        find_owners(second, self._reader, self._stack_bytes, aside, search=True)
        wrong = unconfirmed(scene, second)
        self._findings.coverage["owners_unconfirmed"] += len(wrong)
        # Asleep from before the first look until after the second.
        return self._held(without_edges(scene, wrong))

    def _count(self, scene: WaitSnapshot) -> None:
        coverage = self._findings.coverage
        dead = int(np.count_nonzero(scene.tasks["exit_state"]))
        coverage["tasks"] = len(scene.tasks)
        coverage["zombies"] = dead
        coverage["tasks_scanned"] = len(scene.tasks) - dead
        coverage["blocked"] = len(scene.blocked)
        unknown = [each for each in scene.blocked.values() if each.why]
        coverage["locks_unknown"] = len(unknown)


def _asks_all(scene: WaitSnapshot) -> bool:
    """Tell whether nothing but all tasks tells who has what some of them wait for.

    Their stacks tell who has locks that do not say so; and their files, who serves a
    file system in user space.
    """
    outside = (each.external for each in scene.blocked.values())
    if any(thing is not None and thing.kind == "fuse" for thing in outside):
        return True
    return any(
        want.lock.type in BY_STACK
        and not any(holder.confidence == "exact" for holder in want.holders)
        for want in scene.wanted.values()
    )


def _unnamed_note(count: int) -> Iterator[Note]:
    if count:
        yield Note(
            "locks-unnamed",
            f"{count:,} locks that were waited for are told by where they are alone: a "
            f"look names {MAX_NAMED} new ones, those first for which most tasks wait",
        )


def _crowd(want: Wanted) -> int:
    return -len(want.rows)


def _threads(tasks: TaskTable) -> Iterator[tuple[int, int]]:
    return zip(tasks["pid"].tolist(), tasks["start_ns"].tolist(), strict=True)


def _slept(tasks: TaskTable, then: Switches) -> npt.NDArray[np.int64]:
    """Tell how often each task has gone to sleep since; one that is new, never."""
    now: list[int] = tasks["nvcsw"].tolist()
    pairs = zip(now, map(then.get, _threads(tasks)), strict=True)
    return np.array([0 if b is None else a - b for a, b in pairs], np.int64)
