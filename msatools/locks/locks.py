# SPDX-License-Identifier: LGPL-2.1-or-later

"""Who waits for whom, on one kernel: reports one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass

import drgn
import numpy as np
import numpy.typing as npt

from msatools.kernel.clocks import read_clocks
from msatools.kernel.pids import find_tasks, require_pids
from msatools.kernel.report import Findings
from msatools.kernel.session import KernelSession, Progress, quietly
from msatools.locks.changes import changes
from msatools.locks.layout import Layout
from msatools.locks.look import Look
from msatools.locks.options import LocksOptions
from msatools.locks.report import LocksReport
from msatools.locks.scene import Scene, find_owners, make_scene, missing_owners
from msatools.locks.sleeping.kernellocks import MAX_WAITERS
from msatools.locks.steady import (
    concerned,
    held,
    in_circles,
    unconfirmed,
    without_edges,
)
from msatools.locks.telling import Teller
from msatools.target.describe import describe
from msatools.target.model import Target
from msatools.tasks.now import collect_now
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader, TaskTable

_COVERAGE = (
    *("tasks", "tasks_scanned", "zombies", "tasks_unreadable", "lists_broken"),
    *("stacks", "stacks_incomplete", "blocked", "locks_unknown", "stacks_searched"),
    *("reads", "bytes_read"),
)
"""Keys that are always in the report's coverage."""

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


@dataclass(frozen=True)
class _Before:
    """What an interval began with."""

    report: LocksReport
    slept: Mapping[tuple[int, int], int]
    """How often each thread, by its ID and when it started, had gone to sleep."""


class Locks(KernelSession):
    """A run of reports on one kernel: see :class:`msatools.command.Session`."""

    def __init__(
        self, prog: drgn.Program, target: Target, options: LocksOptions
    ) -> None:
        super().__init__(prog, target)
        self._options = options
        self._layout = Layout(self._reader)
        with self._learning():
            self._task_reader = TaskReader(self._reader)
            self._collector = StackCollector(self._reader, self._findings)
            self._stack_bytes = stack_bytes(prog)
            # The first time it takes long, which is not to pass between tasks and
            # clocks.
            read_clocks(self._reader, Findings())
        self._before: _Before | None = None

    def report(self, progress: Progress) -> LocksReport:
        """Report who waits for whom now."""
        return self._collect(progress)[0]

    def begin(self, progress: Progress) -> None:
        """Look at all tasks: an interval begins."""
        self._before = _before(*self._collect(progress))

    def advance(self, progress: Progress) -> LocksReport:
        """Report who waits for whom now, and what has changed since the last look."""
        assert self._before is not None, "no interval has begun"
        before = self._before
        report, scene = self._collect(progress, before)
        self._before = _before(report, scene)
        return changes(before.report, report)

    def _collect(
        self, progress: Progress, before: _Before | None = None
    ) -> tuple[LocksReport, Scene]:
        findings = self._findings
        with self._reporting():
            progress(0, _STEPS)
            tasks = self._read()
            progress(1, _STEPS)
            scene = self._scene(tasks)
            progress(3, _STEPS)
            find_owners(
                scene, self._reader, self._stack_bytes, findings, not self._alone
            )
            if self._prog.flags & drgn.ProgramFlags.IS_LIVE:
                scene = self._confirmed(self._held(scene))
            progress(4, _STEPS)
            teller = Teller(scene, self._options, self._stack_bytes)
            slept = None if before is None else _slept(scene.tasks, before)
            told = teller.tell(slept)
            self._count(scene)
        report = LocksReport(
            target=self._target,
            taken_at_ns=scene.clocks.monotonic_ns,
            interval_ns=None,
            coverage=self._coverage(_COVERAGE),
            notes=tuple(findings.notes.values()),
            waits=told.waits,
            locks=told.locks,
            roots=told.roots,
            deadlocks=told.deadlocks,
            herds=told.herds,
            inversions=told.inversions,
        )
        return report, scene

    def _read(self) -> TaskTable:
        """Read all threads, or those that were named."""
        pids = self._options.pids
        if pids is None:
            return self._task_reader.read_all(self._findings)
        found = find_tasks(self._reader, pids, self._findings)
        damaged = self._findings.coverage["pids_unreadable"] > 0
        require_pids(pids, found, damaged=damaged)
        return self._task_reader.read(list(found.values()), self._findings)

    def _scene(self, tasks: TaskTable) -> Scene:
        """Find who waits for what; of named tasks also what its owners wait for."""
        for _ in range(_MAX_ROUNDS):
            scene = self._look(tasks)
            missing = missing_owners(scene) if self._alone else ()
            if not missing:
                break
            more = self._are_tasks(self._task_reader.read(missing, self._findings))
            if not len(more):
                break
            # All is told anew of the tasks of this look and of the one before.
            self._findings.reset(self._lasting)
            records = np.concatenate([tasks.records, more.records])
            tasks = TaskTable(records, tasks.columns)
        return scene

    def _are_tasks(self, tasks: TaskTable) -> TaskTable:
        """Leave out what is no task any more, but was one when a lock named it."""
        known = find_tasks(self._reader, tasks["pid"].tolist(), Findings())
        return tasks.only(np.isin(tasks["address"], list(known.values())))

    @property
    def _alone(self) -> bool:
        return self._options.pids is not None

    def _look(self, tasks: TaskTable) -> Scene:
        return self._look_at(tasks, self._findings, self._alone)

    def _look_at(self, tasks: TaskTable, findings: Findings, alone: bool) -> Scene:
        clocks = read_clocks(self._reader, findings)
        now = collect_now(self._collector, self._prog, tasks, clocks)
        # Who waits for a lock is told in full, also where but one was asked for.
        limit = MAX_WAITERS
        look = Look(self._layout, tasks, findings, clocks, alone=alone, limit=limit)
        return make_scene(look, now, clocks, self._stack_bytes)

    def _held(self, scene: Scene) -> Scene:
        """Leave out what has changed while it was looked at."""
        again = self._task_reader.read(concerned(scene), Findings())
        kept = held(scene, again, alone=self._alone)
        ended = len(scene.blocked) - len(kept.blocked)
        self._findings.coverage["waits_ended"] += ended
        return kept

    def _confirmed(self, scene: Scene) -> Scene:
        """Leave out circles of waits that are not there at a second look."""
        circles = in_circles(scene)
        if not circles:
            return scene
        aside = Findings()
        tasks = self._task_reader.read(circles, aside)
        second = self._look_at(tasks, aside, alone=True)
        find_owners(second, self._reader, self._stack_bytes, aside, search=True)
        wrong = unconfirmed(scene, second)
        self._findings.coverage["owners_unconfirmed"] += len(wrong)
        # Asleep from before the first look until after the second.
        return self._held(without_edges(scene, wrong))

    def _count(self, scene: Scene) -> None:
        coverage = self._findings.coverage
        dead = int(np.count_nonzero(scene.tasks["exit_state"]))
        coverage["tasks"] = len(scene.tasks)
        coverage["zombies"] = dead
        coverage["tasks_scanned"] = len(scene.tasks) - dead
        coverage["blocked"] = len(scene.blocked)
        unknown = [each for each in scene.blocked.values() if each.why]
        coverage["locks_unknown"] = len(unknown)


def _before(report: LocksReport, scene: Scene) -> _Before:
    tasks = scene.tasks
    threads = zip(tasks["pid"].tolist(), tasks["start_ns"].tolist(), strict=True)
    slept = dict(zip(threads, tasks["nvcsw"].tolist(), strict=True))
    return _Before(report, slept)


def _slept(tasks: TaskTable, before: _Before) -> npt.NDArray[np.int64]:
    """Tell how often each task has gone to sleep since; one that is new, never."""
    threads = zip(tasks["pid"].tolist(), tasks["start_ns"].tolist(), strict=True)
    now: list[int] = tasks["nvcsw"].tolist()
    then = [before.slept.get(thread) for thread in threads]
    pairs = zip(now, then, strict=True)
    return np.array([0 if b is None else a - b for a, b in pairs], np.int64)
