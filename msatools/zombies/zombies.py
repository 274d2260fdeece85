# SPDX-License-Identifier: LGPL-2.1-or-later

"""Why the dead are not reaped, on one kernel: reports one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import drgn
import numpy as np

from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.pids import find_tasks
from msatools.kernel.readcost import ReadCost
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings, noting_refusals
from msatools.kernel.structs import Booleans, read_structs
from msatools.locks.locks import collect_locks
from msatools.locks.options import LocksOptions
from msatools.target.describe import describe
from msatools.target.errors import TargetError
from msatools.target.model import Target
from msatools.tasks.cgroups import read_cgroups
from msatools.tasks.identity import comm_text, read_identities
from msatools.tasks.now import ages
from msatools.tasks.stackmemory import Rows
from msatools.tasks.stacks import StackCollector
from msatools.tasks.states import letters
from msatools.tasks.table import TaskReader, TaskTable
from msatools.zombies.dead import read_dead
from msatools.zombies.doing import read_doing
from msatools.zombies.heirs import find_heirs
from msatools.zombies.held import held_memory
from msatools.zombies.leaks import find_leaks
from msatools.zombies.limits import collect_limits, left
from msatools.zombies.model import (
    Changes,
    Group,
    Heir,
    Held,
    Leak,
    TaskAsked,
    Zombie,
    ZombiesReport,
)
from msatools.zombies.options import ZombiesOptions
from msatools.zombies.parents import read_parents
from msatools.zombies.rows import Found, ZombieRows, groups
from msatools.zombies.verdicts import VERDICTS, verdicts

Progress = Callable[[int, int], None]

_COVERAGE = (
    *("tasks", "tasks_unreadable", "lists_broken", "zombies", "parents_unknown"),
    *("reads", "bytes_read"),
)
"""Keys that are always in the report's coverage."""

_SAME = {
    "pid": ("i4", ("pid",)),
    "exit_state": ("i4", ("exit_state",)),
    "real_parent": ("u8", ("real_parent",)),
    "signal": ("u8", ("signal",)),
}
"""What does not change of who stays dead."""

_STEPS = 5
_MAX_BLOCKED = 16
"""Blocked parents of which is told what they wait for in the end."""


class NoSuchPidError(TargetError):
    """A PID that was named is not there."""


def collect_zombies(
    prog: drgn.Program,
    *,
    target: Target | None = None,
    options: ZombiesOptions | None = None,
    progress: Progress | None = None,
) -> ZombiesReport:
    """
    Find all dead tasks of a kernel, why nobody reaps them, and what they use up.

    >>> report = collect_zombies(prog)
    >>> report.groups[0].count, report.groups[0].verdict
    (20000, 'never-waits')

    Nothing is written, and nothing but *prog* is read.

    :param prog: A Linux kernel with types, live or dead.
    :param target: What to say of the target; found out if not given.
    :param progress: Called now and then with steps done and steps in all.
    :raises NoSuchPidError: if a PID that the options name is not there
    :raises LookupError: if the types lack what describes tasks
    :raises drgn.FaultError: if the dump lacks every task
    :raises TargetError: if the program is not a kernel, or has no types
    """
    session = Zombies(prog, target or describe(prog), options or ZombiesOptions())
    return session.report(progress or (lambda done, total: None))


@dataclass(frozen=True)
class _Look:
    """All tasks that are looked at, and the dead among them."""

    found: Found
    clocks: Clocks
    places: Rows
    """Which of the dead were asked for."""


class Zombies:
    """A run of reports on one kernel: see :class:`msatools.command.Session`."""

    period_s = None

    def __init__(
        self, prog: drgn.Program, target: Target, options: ZombiesOptions
    ) -> None:
        self._prog = prog
        self._target = target
        self._options = options
        self._reader = Reader(prog)
        self._cost: ReadCost | None = None
        if options.cost:
            self._cost = ReadCost(self._reader, of_file=target.kind != "qmp")
        self._findings = Findings()
        with noting_refusals(prog, self._findings):
            self._task_reader = TaskReader(self._reader)
            self._collector = StackCollector(self._reader, self._findings)
        self._lasting = replace(
            self._findings,
            coverage=self._findings.coverage.copy(),
            lost=self._findings.lost.copy(),
            notes=dict(self._findings.notes),
        )
        self._before: tuple[ZombiesReport, frozenset[tuple[int, int]]] | None = None

    def report(self, progress: Progress) -> ZombiesReport:
        """Report the dead that are there now."""
        return self._collect(progress)[0]

    def begin(self, progress: Progress) -> None:
        """Look at all tasks: an interval begins."""
        report, look = self._collect(progress)
        self._before = report, _threads(look)

    def sample(self) -> None:
        """There is nothing to look at within an interval."""
        raise NotImplementedError("it has no period")

    def advance(self, progress: Progress) -> ZombiesReport:
        """Report the dead that are there now, and what has changed."""
        assert self._before is not None, "no interval has begun"
        before, then = self._before
        report, look = self._collect(progress)
        now = _threads(look)
        self._before = report, now
        changes = Changes(begun=len(now - then), reaped=len(then - now))
        interval_ns = None
        limits = report.limits
        if report.taken_at_ns is not None and before.taken_at_ns is not None:
            interval_ns = report.taken_at_ns - before.taken_at_ns
            limits = left(before.limits, limits, interval_ns)
        counts = {(each.ppid, each.verdict): each.count for each in before.groups}
        return replace(
            report,
            interval_ns=interval_ns,
            limits=limits,
            changes=changes,
            groups=tuple(
                replace(g, delta=g.count - counts.get((g.ppid, g.verdict), 0))
                for g in report.groups
            ),
        )

    def _collect(self, progress: Progress) -> tuple[ZombiesReport, _Look]:
        self._forget()
        options, findings, reader = self._options, self._findings, self._reader
        alone = options.pids is not None
        with noting_refusals(self._prog, findings):
            progress(0, _STEPS)
            tasks = self._read_named() if alone else self._read_all()
            progress(1, _STEPS)
            look = self._look(tasks)
            found, dead = look.found, look.found.dead
            progress(2, _STEPS)
            doing = read_doing(
                self._collector, self._prog, tasks, found.parents, look.clocks
            )
            heirs = () if alone else self._heirs(tasks, dead.row)
            by_parent = {heir.ppid: heir for heir in heirs}
            made = groups(found, look.places, doing, by_parent)
            # Who waits for whom takes all tasks: too much to tell of one.
            made = made if alone else self._with_roots(made)
            progress(3, _STEPS)
            limits = () if alone else collect_limits(reader, tasks, dead.row, findings)
            held = Held(bytes=0, each_bytes={})
            if not alone:
                held = held_memory(reader, tasks, dead.row, findings)
            progress(4, _STEPS)
            leaks = self._leaks(tasks) if options.leaks else None
            rows = ZombieRows(found, look.places)
            asked = self._asked(tasks, rows, look.clocks) if alone else None
        coverage = findings.coverage
        coverage["tasks"] = len(tasks)
        coverage["zombies"] = len(dead) - coverage["zombies_reaped"]
        coverage["reads"] = reader.reads
        coverage["bytes_read"] = reader.bytes
        report = ZombiesReport(
            target=self._target,
            taken_at_ns=look.clocks.monotonic_ns,
            interval_ns=None,
            coverage={
                **dict.fromkeys(_COVERAGE, 0),
                **{key: count for key, count in coverage.items() if count},
            },
            notes=tuple(findings.notes.values()),
            zombies=rows,
            groups=made,
            limits=limits,
            held=held,
            heirs=heirs if options.heirs else None,
            leaks=leaks,
            asked=asked,
        )
        if self._cost is not None:
            report = replace(report, reads=self._cost.look())
        return report, look

    def _read_all(self) -> TaskTable:
        return self._task_reader.read_all(self._findings)

    def _read_named(self) -> TaskTable:
        """Read the tasks that were named, and all threads of their parents."""
        pids = self._options.pids or ()
        addresses = find_tasks(self._reader, pids, self._findings)
        named = self._task_reader.read(list(addresses.values()), self._findings)
        missing = [pid for pid in pids if pid not in named["pid"]]
        if missing:
            lost = self._findings.coverage["pids_unreadable"]
            why = "no such task" if len(missing) == 1 else "no such tasks"
            raise NoSuchPidError(
                f"pid {', '.join(map(str, missing))}",
                "not found, and a part of what tells is damaged" if lost else why,
                "list all zombies without -p",
            )
        # Its dead threads tell why a leader stays; its parent's why it is left.
        own = named["address"][named["exit_state"] != 0].tolist()
        # The idle task, which has made 1 and 2, is in no list.
        nobody = (0, self._prog["init_task"].address_)
        parents = np.unique(named["real_parent"]).tolist()
        parents = [task for task in parents if task not in nobody]
        others = self._task_reader.read_processes([*own, *parents], self._findings)
        others = others.only(~np.isin(others["address"], named["address"]))
        records = np.concatenate([named.records, others.records])
        return TaskTable(records, named.columns)

    def _look(self, tasks: TaskTable) -> _Look:
        reader, findings = self._reader, self._findings
        clocks = read_clocks(self._prog, findings)
        dead = read_dead(reader, tasks, clocks, findings)
        if self._options.pids is not None:
            # Of their parents' processes there may be dead ones, too.
            named = np.isin(tasks["pid"], self._options.pids)
            processes = tasks["signal"][named]
            dead = dead.only(np.isin(tasks["signal"][dead.row], processes))
        parents = read_parents(reader, tasks, dead, clocks, findings)
        found = Found(
            tasks=tasks,
            dead=dead,
            parents=parents,
            verdicts=verdicts(dead, parents),
            identities=read_identities(reader, tasks, findings),
            cgroups=read_cgroups(reader, tasks, findings),
        )
        return _Look(found, clocks, self._wanted(found))

    def _wanted(self, found: Found) -> Rows:
        """Choose the dead that were asked for."""
        options, dead = self._options, found.dead
        wanted = self._stays(found) if self._target.live else np.ones(len(dead), bool)
        if options.pids is not None:
            wanted &= np.isin(found.tasks["pid"][dead.row], options.pids)
        if options.parents is not None:
            pids = [each.pid for each in found.parents.facts]
            # The last stands for a parent that is not known.
            of = np.array([*pids, 0], np.int64)[found.parents.index]
            wanted &= np.isin(of, options.parents)
        if options.namespaces is not None:
            wanted &= np.isin(dead.namespace, options.namespaces)
        if options.uids is not None:
            wanted &= np.isin(found.identities.uid[dead.row], options.uids)
        if options.verdicts is not None:
            chosen = [VERDICTS.index(verdict) for verdict in options.verdicts]
            wanted &= np.isin(found.verdicts, chosen)
        return np.flatnonzero(wanted)

    def _stays(self, found: Found) -> Booleans:
        """Tell who is still as it was after all of its parent was read.

        Of others that may be what its memory has become.
        """
        rows = found.dead.row
        addresses = found.tasks["address"][rows].astype(np.uint64)
        known = Findings()  # to be gone by now is no loss
        now = read_structs(self._reader, "struct task_struct", _SAME, addresses, known)
        stays = now.readable
        for name in _SAME:
            stays = stays & (now[name] == found.tasks[name][rows])
        gone = int(np.count_nonzero(~stays))
        self._findings.coverage["zombies_reaped"] += gone
        return stays

    def _heirs(self, tasks: TaskTable, dead: Rows) -> tuple[Heir, ...]:
        return find_heirs(self._reader, tasks, dead, self._findings)

    def _leaks(self, tasks: TaskTable) -> tuple[Leak, ...] | None:
        try:
            return find_leaks(self._reader, tasks, self._findings)
        except (drgn.FaultError, LookupError) as error:
            self._findings.coverage["leaks_lost"] += 1
            self._findings.lose("leaks", f"leaks cannot be looked for: {error}")
            return None

    def _asked(
        self, tasks: TaskTable, zombies: Sequence[Zombie], clocks: Clocks
    ) -> tuple[TaskAsked, ...]:
        """Tell each task that was named, dead or alive."""
        dead = {zombie.pid: zombie for zombie in zombies}
        states, now = letters(tasks), np.zeros(len(tasks), np.uint8)
        age_ns, _ = ages(tasks, clocks, now)
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

    def _with_roots(self, made: tuple[Group, ...]) -> tuple[Group, ...]:
        """Add what blocked parents wait for in the end."""
        blocked = [group for group in made if group.verdict == "parent-blocked"]
        return tuple(
            self._with_root(group) if group in blocked[:_MAX_BLOCKED] else group
            for group in made
        )

    def _with_root(self, group: Group) -> Group:
        stuck = [each.pid for each in group.evidence.threads if each.state == "D"]
        pids = tuple(stuck) or (group.ppid,)
        try:
            options = LocksOptions(pids=pids)
            report = collect_locks(self._prog, target=self._target, options=options)
        except (TargetError, drgn.FaultError, LookupError) as error:
            self._findings.lose("locks", f"what a parent waits for is lost: {error}")
            return group
        self._findings.coverage["reads"] += report.coverage["reads"]
        if not report.roots:
            return group
        root = report.roots[0]
        who = f"{root.pid} {root.comm}: " if root.comm and root.pid not in pids else ""
        told = replace(
            group.evidence, root=f"{who}{root.reason}", root_pid=root.pid or None
        )
        return replace(group, evidence=told)

    def _forget(self) -> None:
        """Gather the findings of one report apart from those of others before."""
        made, findings = self._lasting, self._findings
        findings.coverage = made.coverage.copy()
        findings.lost = made.lost.copy()
        findings.notes = dict(made.notes)
        self._reader.reads = self._reader.bytes = 0


def _threads(look: _Look) -> frozenset[tuple[int, int]]:
    """Tell the dead from others that have had their numbers."""
    tasks, rows = look.found.tasks, look.found.dead.row[look.places]
    started = tasks["start_ns"][rows].tolist()
    return frozenset(zip(tasks["pid"][rows].tolist(), started, strict=True))
