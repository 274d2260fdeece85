# SPDX-License-Identifier: LGPL-2.1-or-later

"""Collect the reports of one kernel on zombies, and why they are not reaped."""

import time
from collections.abc import Iterable, Sequence
from itertools import compress

import drgn
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import LOST
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.pids import find_tasks, require_pids
from msatools.kernel.report import (
    KernelSession,
    Loss,
    LossLog,
    Progress,
    ReadCost,
    ns_between,
    quietly,
)
from msatools.kernel.structs import Booleans, read_structs
from msatools.locks.locks import collect_locks
from msatools.locks.report_builder import LocksOptions
from msatools.program.description import describe
from msatools.program.model import Target, TargetError
from msatools.selfdesc.find import find_variable
from msatools.tasks.identity import comm_text, read_cgroups, read_members, read_users
from msatools.tasks.stacks import StackCollector
from msatools.tasks.states import letters
from msatools.tasks.table import Records, TaskReader, TaskTable
from msatools.tasks.unwind import Rows
from msatools.zombies.leaks import find_pid_leaks
from msatools.zombies.limits import collect_limits, held_memory, left
from msatools.zombies.model import (
    Heir,
    HeldMemory,
    Leak,
    Limit,
    TaskAsked,
    Zombie,
    ZombieChanges,
    ZombieGroup,
    ZombiesOptions,
    ZombiesReport,
)
from msatools.zombies.parents import Aged, read_ages, read_dead, read_parents
from msatools.zombies.reparenting import find_heirs, with_held_namespaces
from msatools.zombies.rows import (
    Found,
    ZombieRows,
    groups,
    read_survivors,
    with_survivors,
)
from msatools.zombies.verdicts import VERDICTS, read_doing, verdicts

_COVERAGE = (
    *("tasks", "tasks_unreadable", "lists_broken", "zombies", "parents_unknown"),
    *("reads", "bytes_read"),
)
"""Keys that are always in the report's coverage."""

_SAME = {
    "pid": ("pid",),
    "exit_state": ("exit_state",),
    "real_parent": ("real_parent",),
    "signal": ("signal",),
}
"""Members that do not change while a task stays dead."""

Threads = frozenset[tuple[int, int]]
"""Threads by PID and start time, as PIDs are reused."""

_STEPS = 5
_MAX_BLOCKED = 16
"""Maximum number of groups whose root cause is searched for."""

_MAX_STUCK = 8
"""Maximum number of a group's stuck threads whose root cause is searched for."""


def collect_zombies(
    prog: drgn.Program,
    *,
    target: Target | None = None,
    options: ZombiesOptions | None = None,
    progress: Progress | None = None,
) -> ZombiesReport:
    """
    Report all zombies of a kernel, why they are not reaped, and what they use.

    >>> report = collect_zombies(prog)
    >>> report.groups[0].count, report.groups[0].verdict
    (20000, 'never-waits')

    Nothing is written, and nothing but *prog* is read.

    :param prog: A Linux kernel with types, live or dead.
    :param target: Description of the target; read from *prog* if not given.
    :param progress: Called with the steps done and the number of steps.
    :raises NoSuchPidError: if a requested PID does not exist
    :raises MissingError: if the types of tasks are missing
    :raises drgn.FaultError: if the dump lacks every task
    :raises TargetError: if the program is not a kernel, or has no types
    """
    session = Zombies(prog, target or describe(prog), options or ZombiesOptions())
    return session.report(progress or quietly)


class _ZombieSample(Struct, frozen=True):
    """The tasks that were read, and the dead among them."""

    found: Found
    aged: Aged
    places: Rows
    """Indices of the requested dead tasks."""


class Zombies(KernelSession[ZombiesReport, ZombiesOptions]):
    """A series of reports: see :class:`msatools.kernel.report.Session`."""

    def __init__(
        self, prog: drgn.Program, target: Target, options: ZombiesOptions
    ) -> None:
        super().__init__(prog, target, options)
        self._cost: ReadCost | None = None
        if options.cost:
            self._cost = ReadCost(self._reader, of_file=target.kind != "qmp")
        with self._learning():
            self._task_reader = TaskReader(self._reader)
            self._collector = StackCollector(self._reader, self._losses)
        self._has_parents = False
        self._threads: Threads = frozenset()
        self._threads_before: Threads = frozenset()

    def delta(self, previous: ZombiesReport, current: ZombiesReport) -> ZombiesReport:
        """Return the current report with the changes since the previous one."""
        then, now = self._threads_before, self._threads
        interval_ns, limits = ns_between(previous, current), current.limits
        if interval_ns is not None and limits and previous.limits is not None:
            limits = left(previous.limits, limits, interval_ns)
        counts = {(each.ppid, each.verdict): each.count for each in previous.groups}
        return replace(
            current,
            interval_ns=interval_ns,
            limits=limits,
            changes=ZombieChanges(begun=len(now - then), reaped=len(then - now)),
            groups=tuple(
                replace(g, delta=g.count - counts.get((g.ppid, g.verdict), 0))
                for g in current.groups
            ),
        )

    def report(self, progress: Progress) -> ZombiesReport:
        """Report the zombies that exist now."""
        started_ns = time.monotonic_ns()
        options, losses, reader = self._options, self._losses, self._reader
        alone = options.pids is not None
        with self._reporting():
            progress(0, _STEPS)
            tasks = self._read_named() if alone else self._read_all()
            progress(1, _STEPS)
            clocks = read_clocks(reader, losses)
            sample = self._read_sample(tasks, clocks)
            found, dead = sample.found, sample.found.dead
            progress(2, _STEPS)
            doing = read_doing(
                self._collector, reader, tasks, found.parents, clocks, losses
            )
            heirs = () if alone else self._heirs(tasks, dead.row)
            by_parent = {heir.ppid: heir for heir in heirs}
            made = with_held_namespaces(
                *(reader, tasks, dead, sample.aged.age_ns),
                *(groups(found, sample.places, doing, by_parent), losses),
            )
            # Finding root causes needs all tasks, which is too slow for one.
            made = made if alone else self._with_roots(made, sample)
            progress(3, _STEPS)
            limits: tuple[Limit, ...] | None = None
            held: HeldMemory | None = None
            if not alone:
                limits = collect_limits(reader, tasks, dead.row, losses)
                held = held_memory(reader, tasks, dead.row, losses)
            progress(4, _STEPS)
            leaks = self._leaks(tasks) if options.leaks else None
            rows = ZombieRows(found, sample.places)
            asked = self._asked(rows, sample) if alone else None
        coverage = losses.coverage
        coverage["tasks"] = len(tasks)
        coverage["zombies"] = len(dead) - coverage["zombies_reaped"]
        report = ZombiesReport(
            **self._head(clocks.monotonic_ns, _COVERAGE),
            zombies=rows,
            groups=made,
            limits=limits,
            held=held,
            heirs=heirs if options.heirs else None,
            leaks=leaks,
            asked=asked,
        )
        if self._cost is not None:
            report = replace(
                report,
                reads=self._cost.reads(),
                read_bytes=report.coverage["bytes_read"],
                elapsed_ns=time.monotonic_ns() - started_ns,
            )
        self._threads_before, self._threads = self._threads, _threads(sample)
        return report

    def _read_all(self) -> TaskTable:
        tasks = self._task_reader.require_all(self._losses)
        self._require_parents(tasks)
        return tasks

    def _require_parents(self, tasks: TaskTable) -> None:
        """Check once, at the first report, that the requested parents exist.

        :raises NoSuchPidError: if one does not
        """
        if self._options.parents is None or self._has_parents:
            return
        keys = ("tasks_unreadable", "lists_broken")
        damaged = any(self._losses.coverage[key] for key in keys)
        there = {*tasks["pid"].tolist()}
        require_pids(self._options.parents, there, damaged=damaged, option="--parent")
        self._has_parents = True

    def _read_named(self) -> TaskTable:
        """Read the requested tasks, and all threads of their parents."""
        pids = self._options.pids or ()
        addresses = find_tasks(self._reader, pids, self._losses)
        tasks = self._task_reader.read_with_others(
            [*addresses.values()], self._processes_to_read, self._losses
        )
        there = {*tasks["pid"][: self._named].tolist()}
        damaged = self._losses.coverage["pids_unreadable"] > 0
        require_pids(pids, there, damaged=damaged)
        return tasks

    def _processes_to_read(
        self, addresses: Sequence[int], named: Records
    ) -> Iterable[int]:
        """Choose the processes whose threads are read in addition to *named*."""
        # A leader may stay because of its other threads, or because of its parent.
        dead = (named["exit_state"] != 0).tolist()
        # The idle task, the parent of 1 and 2, is in no list.
        nobody = {0, self._reader.once("init_task", self._first_task)}
        parents = {*named["real_parent"].tolist()} - nobody
        return [*compress(addresses, dead), *sorted(parents)]

    def _first_task(self) -> int | None:
        address: int | None = find_variable(self._prog, "init_task").address_
        return address

    def _read_sample(self, tasks: TaskTable, clocks: Clocks) -> _ZombieSample:
        reader, losses = self._reader, self._losses
        aged = read_ages(tasks, clocks)
        dead = read_dead(reader, tasks, aged, losses)
        if self._options.pids is not None:
            # The parents' processes may have dead threads, too.
            named = {*tasks["signal"][: self._named].tolist()}
            of_those = [signal in named for signal in dead.process.tolist()]
            dead = dead.only(np.array(of_those, np.bool_))
        parents = read_parents(reader, tasks, dead, aged, losses)
        own = tasks.only(dead.row)
        found = Found(
            tasks=tasks,
            dead=dead,
            parents=parents,
            verdicts=verdicts(dead, parents),
            users=read_users(reader, own, losses),
            cgroups=read_cgroups(reader, own, losses),
        )
        return _ZombieSample(found, aged, self._wanted(found, aged))

    @property
    def _named(self) -> int:
        """Number of requested tasks: they are the first rows of the table."""
        return len({*(self._options.pids or ())})

    def _wanted(self, found: Found, aged: Aged) -> Rows:
        """Return the indices of the requested dead tasks."""
        options, dead = self._options, found.dead
        wanted = self._stays(found) if self._target.live else np.ones(len(dead), bool)
        if options.pids is not None:
            wanted &= dead.row < self._named
        if options.parents is not None:
            pids = [each.pid for each in found.parents.facts]
            # The last element is for an unknown parent (NONE, which is -1).
            of = np.array([*pids, 0], np.int64)[found.parents.index]
            wanted &= np.isin(of, options.parents)
        if not options.membership.is_any:
            own = found.tasks.only(dead.row)
            wanted &= read_members(
                self._reader, own, options.membership, self._losses, found.cgroups
            )
        if options.uids is not None:
            wanted &= np.isin(found.users.uid, options.uids)
        if options.min_age_ns:
            wanted &= aged.age_ns[dead.row] >= options.min_age_ns
        if options.verdicts is not None:
            chosen = [VERDICTS.index(verdict) for verdict in options.verdicts]
            wanted &= np.isin(found.verdicts, chosen)
        return np.flatnonzero(wanted)

    def _stays(self, found: Found) -> Booleans:
        """Return for each dead task whether it was dead after its parent was read.

        The memory of reaped tasks may have been reused meanwhile.
        """
        rows = found.dead.row
        addresses = found.tasks["address"][rows].astype(np.uint64)
        known = LossLog()  # a task that was reaped is not counted as unreadable
        now = read_structs(self._reader, "struct task_struct", _SAME, addresses, known)
        stays = now.readable
        for name in _SAME:
            stays = stays & (now[name] == found.tasks[name][rows])
        gone = int(np.count_nonzero(~stays))
        self._losses.coverage["zombies_reaped"] += gone
        return stays

    def _heirs(self, tasks: TaskTable, dead: Rows) -> tuple[Heir, ...]:
        return find_heirs(self._reader, tasks, dead, self._losses)

    def _leaks(self, tasks: TaskTable) -> tuple[Leak, ...] | None:
        try:
            return find_pid_leaks(self._reader, tasks, self._losses)
        except LOST as error:
            self._losses.lose(Loss.LEAKS, f"leaks cannot be looked for: {error}")
            return None

    def _asked(
        self, zombies: Sequence[Zombie], sample: _ZombieSample
    ) -> tuple[TaskAsked, ...]:
        """Return each requested task, dead or alive."""
        dead = {zombie.pid: zombie for zombie in zombies}
        tasks, age_ns = sample.found.tasks, sample.aged.age_ns
        states = letters(TaskTable(tasks.records[: self._named], tasks.columns))
        pids: list[int] = tasks["pid"].tolist()
        names = dict(zip(tasks["address"].tolist(), range(len(pids)), strict=True))
        asked = []
        for pid in self._options.pids or ():
            row = pids.index(pid)
            parent = names.get(int(tasks["real_parent"][row]))
            zombie = dead.get(pid)
            leader = None if parent is None else int(tasks["tgid"][parent])
            first = pids.index(leader) if leader in pids else parent
            comm = None if first is None else bytes(tasks["comm"][first])
            asked.append(
                TaskAsked(
                    pid=pid,
                    comm=comm_text(tasks["comm"][row]),
                    state=str(states[row]),
                    ppid=leader or 0,
                    parent_comm=None if comm is None else comm_text(comm),
                    age_ns=int(age_ns[row]),
                    verdict=zombie.verdict if zombie else None,
                )
            )
        return tuple(asked)

    def _with_roots(
        self, made: tuple[ZombieGroup, ...], sample: _ZombieSample
    ) -> tuple[ZombieGroup, ...]:
        """Add the root causes of blocked parents, and of threads that outlive leaders.

        Only the first groups get one: each takes as long as a report of locks.
        """
        left = _MAX_BLOCKED
        found = []
        for group in made:
            pids: tuple[int, ...] = ()
            if group.verdict == "leader-exited":
                survivors = read_survivors(
                    *(self._reader, sample.found.tasks, sample.aged.age_ns),
                    *(group, self._losses),
                )
                group = with_survivors(group, survivors)
                pids = survivors.stuck[:_MAX_STUCK]
            elif group.verdict == "parent-blocked":
                threads = group.evidence.threads
                stuck = tuple(each.pid for each in threads if each.state == "D")
                pids = stuck or (group.ppid,)
            if pids and left:
                left -= 1
                group = self._with_root(group, pids)
            found.append(group)
        return tuple(found)

    def _with_root(self, group: ZombieGroup, pids: tuple[int, ...]) -> ZombieGroup:
        try:
            options = LocksOptions(pids=pids)
            report = collect_locks(self._prog, target=self._target, options=options)
        except (*LOST, TargetError) as error:
            self._losses.lose(
                Loss.LOCKS, f"cannot determine what a parent waits for: {error}"
            )
            return group
        for key in ("reads", "bytes_read"):
            self._losses.coverage[key] += report.coverage[key]
        for note in report.notes:
            if note.code == "lost":
                self._losses.lose(Loss.PARENTS_LOCKS)
                self._losses.note(note.code, note.text, note.text)
        if not report.roots:
            return group
        root = report.roots[0]
        who = f"{root.pid} {root.comm}: " if root.comm and root.pid not in pids else ""
        evidence = replace(
            group.evidence, root=f"{who}{root.reason}", root_pid=root.pid or None
        )
        return replace(group, evidence=evidence)


def _threads(sample: _ZombieSample) -> Threads:
    """Return the keys of the dead tasks: PID and start time."""
    tasks, rows = sample.found.tasks, sample.found.dead.row[sample.places]
    started = tasks["start_ns"][rows].tolist()
    return frozenset(zip(tasks["pid"][rows].tolist(), started, strict=True))
