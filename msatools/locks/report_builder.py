# SPDX-License-Identifier: LGPL-2.1-or-later

"""Builds the rows of a report from a snapshot: waits, locks, deadlocks, herds.

Also the options of a report, and the selection of waits by them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypedDict

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.report import Loss
from msatools.kernel.structs import Booleans
from msatools.locks.context import read_cases
from msatools.locks.graph import Cycle, Edge, Owned
from msatools.locks.herds import MIN_WAITERS, Watched, crowd_of
from msatools.locks.io import in_flight
from msatools.locks.ownership import KERNEL_LOCKS
from msatools.locks.report import (
    CONDITION,
    Deadlock,
    DiskIo,
    Herd,
    Inversion,
    LockChanges,
    LockRow,
    LocksReport,
    LockTypeName,
    Owner,
    Root,
    Wait,
    WaitTarget,
    Workqueues,
)
from msatools.locks.root_rows import LockIds, RootRows, root_of_pool
from msatools.locks.user_locks import FUTEX, is_condition
from msatools.locks.user_stacks import with_frames
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted, futex_at
from msatools.locks.wait_targets import awake_rows, leaving
from msatools.locks.workqueues import list_workqueues, stalled_pools
from msatools.program.model import Address
from msatools.tasks.identity import ANY, Membership, read_members
from msatools.tasks.sampler import AgeBound
from msatools.tasks.states import IDLE, MAX_RT_PRIO
from msatools.tasks.table import TaskTable
from msatools.tasks.waits import TaskClass

# --- Options of a report of msa-locks.


class LocksOptions(Struct, frozen=True, kw_only=True):
    """The waits that a report includes; ``None`` for all.

    The graph of waits is made of all tasks, or, with *pids*, of these and all tasks
    they wait for. Then the matching waits are kept, with the chains from them to the
    roots.
    """

    pids: tuple[int, ...] | None = None
    """IDs of threads, which are looked up directly."""

    types: frozenset[LockTypeName] | None = None
    """Types of the locks."""

    states: frozenset[str] | None = None
    """Letters of task states, as in /proc."""

    min_age_ns: int = 0
    """Minimum duration of the waits."""

    membership: Membership = ANY
    """Control groups, containers or namespaces of the threads."""

    share: float | None = None
    """Maximum share of one CPU for samples within an interval; ``None`` for the
    default."""

    stacks: bool = False
    """Whether to include the stacks of waiters and of roots."""

    workqueues: bool = False
    """Whether to list the pools of workers and workqueues."""

    io: bool = False
    """Whether to list the I/O in flight of all disks, not just of roots."""

    @property
    def asks_for_all(self) -> bool:
        """Whether all waits are included."""
        chosen = (self.pids, self.types, self.states)
        any_wait = self.membership.is_any and not self.min_age_ns
        return any_wait and all(each is None for each in chosen)


# --- The part of a report that the options ask for, by pure functions.


def choose(report: LocksReport, options: LocksOptions) -> LocksReport:
    """
    Return the waits that the options ask for, and the chains from them to the roots.

    :param report: A report of all waits.
    """
    if not options.stacks:
        report = _without_stacks(report)
    if not options.workqueues:
        report = replace(report, workqueues=None)
    chosen = report if options.asks_for_all else _chosen(report, options)
    return chosen if options.io else _without_other_io(chosen)


def _chosen(report: LocksReport, options: LocksOptions) -> LocksReport:
    types = {lock.id: lock.type for lock in report.locks}
    matching = {wait.pid for wait in report.waits if _matches(wait, options, types)}
    owners = {wait.pid: wait.owners for wait in report.waits}
    pids = with_chains(owners, matching)
    waits = tuple(wait for wait in report.waits if wait.pid in pids)
    locks = {id_ for wait in waits for id_ in _lock_ids(wait)}
    asked = {id_ for w in report.waits if w.pid in matching for id_ in _lock_ids(w)}
    return replace(
        report,
        waits=waits,
        locks=tuple(lock for lock in report.locks if lock.id in locks),
        roots=tuple(root for root in report.roots if not pids.isdisjoint(root.behind)),
        deadlocks=tuple(each for each in report.deadlocks if locks >= {*each.locks}),
        herds=tuple(herd for herd in report.herds if herd.lock in asked),
        inversions=tuple(each for each in report.inversions if each.lock in locks),
        changes=report.changes and _changes(report.changes, report.waits, pids),
        contention=report.contention
        and tuple(
            each
            for each in report.contention
            if options.types is None or each.type in options.types
        ),
    )


def has_stacks(report: LocksReport) -> bool:
    """Return whether stacks are included, or there are no waits at all."""
    return not report.waits or any(wait.stack is not None for wait in report.waits)


def _without_stacks(report: LocksReport) -> LocksReport:
    return replace(
        report,
        waits=tuple(replace(wait, stack=None) for wait in report.waits),
        roots=tuple(replace(root, stack=None) for root in report.roots),
    )


def _without_other_io(report: LocksReport) -> LocksReport:
    """Return the report with the I/O of the disks of roots only."""
    names = {name for root in report.roots for name in root.disks or ()}
    disks = tuple(disk for disk in report.io or () if disk.name in names)
    return replace(report, io=disks or None, has_all_io=None)


def _lock_ids(wait: Wait) -> tuple[str, ...]:
    """Return the IDs of the locks that a task waits for."""
    return (wait.any_of or ()) if wait.lock is None else (wait.lock,)


def _matches(wait: Wait, options: LocksOptions, types: dict[str, LockTypeName]) -> bool:
    if options.pids is not None and wait.pid not in options.pids:
        return False
    if options.states is not None and wait.state not in options.states:
        return False
    if options.types is not None:
        lock_types = {types.get(id_) for id_ in _lock_ids(wait)}
        if lock_types.isdisjoint(options.types):
            return False
    return wait.age_ns >= options.min_age_ns


def with_chains(owners: Mapping[int, Iterable[int]], tasks: Iterable[int]) -> set[int]:
    """
    Return tasks, and all blocked tasks on the chains from them to the roots.

    :param owners: Maps each blocked task to the tasks that it waits for.
    """
    chosen = set(tasks)
    todo = list(chosen)
    while todo:
        for owner in owners[todo.pop()]:
            if owner in owners and owner not in chosen:
                chosen.add(owner)
                todo.append(owner)
    return chosen


def _changes(
    changes: LockChanges, waits: Iterable[Wait], pids: Collection[int]
) -> LockChanges:
    """Return the changes without waits that were not asked for; all ended ones stay."""
    gone = {wait.pid for wait in waits if wait.pid not in pids}

    def left(pids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(pid for pid in pids if pid not in gone)

    return LockChanges(
        begun=left(changes.begun),
        ended=changes.ended,
        moved=left(changes.moved),
        stuck=left(changes.stuck),
    )


# --- Selects the waits of a snapshot that the options ask for.


class WaitSelection:
    """The options, applied to the waits of one snapshot."""

    def __init__(self, snapshot: WaitSnapshot, options: LocksOptions) -> None:
        self._snapshot = snapshot
        self._options = options

    def with_chains(self) -> set[int]:
        """Return the tasks that fit, and those on the chains from them to the roots."""
        snapshot = self._snapshot
        owners = {
            row: [edge.owner for edge in snapshot.graph.edges_of(row)]
            for row in snapshot.blocked
        }
        return with_chains(owners, filter(self.fits, snapshot.blocked))

    def fits(self, row: int) -> bool:
        """Return whether the options ask for the wait of a blocked task."""
        options, snapshot = self._options, self._snapshot
        if options.pids is not None and snapshot.pids[row] not in options.pids:
            return False
        if options.states is not None and snapshot.letters[row] not in options.states:
            return False
        if not self._members[row]:
            return False
        types = {request.lock.type for request in snapshot.blocked[row].requests}
        if options.types is not None and types.isdisjoint(options.types):
            return False
        return snapshot.ages_ns[row] >= options.min_age_ns

    def fits_any(self, rows: Iterable[int]) -> bool:
        """Return whether the options ask for all waits, or for one of some tasks."""
        blocked = self._snapshot.blocked
        return self._options.asks_for_all or any(
            self.fits(row) for row in rows if row in blocked
        )

    @cached_property
    def _members(self) -> Booleans:
        """Whether each thread is in a control group or namespace that is asked for."""
        context, wanted = self._snapshot.context, self._options.membership
        return read_members(
            context.reader, self._snapshot.tasks, wanted, context.losses
        )


# --- The herds among the waiters of the locks of a snapshot.


class HerdRows:
    """Finds the herds of one snapshot."""

    def __init__(
        self,
        snapshot: WaitSnapshot,
        ids: LockIds,
        selection: WaitSelection,
        stack_size: int,
    ) -> None:
        """
        :param snapshot: A snapshot that keeps waits that changed while it was read, as
            most waits of a herd do.
        :param selection: Selects waits of the same snapshot.
        :param stack_size: Bytes of a kernel stack.
        """
        self._snapshot = snapshot
        self._ids = ids
        self._selection = selection
        self._stack_size = stack_size

    def find(self, watched: Watched) -> Iterator[Herd]:
        """Yield the herds that the options ask for, the largest first."""
        snapshot = self._snapshot
        woken = self._woken()
        for want in self._crowds(woken):
            futex = snapshot.place(want)
            woke = woken.get(futex, []) if futex else []
            waiting = sorted(set(want.rows).difference(woke))
            if len(waiting) + len(woke) < MIN_WAITERS:
                continue
            if not self._selection.fits_any(want.rows):
                continue
            self._ids.add([want])
            yield crowd_of(
                self._ids[want.lock],
                self._target(want),
                snapshot.tasks,
                snapshot.now,
                np.array(waiting, np.intp),
                snapshot.clocks,
                woke,
                watched,
            )

    def _woken(self) -> dict[tuple[int, int], list[int]]:
        """Map a futex, by process and address, to the rows of tasks just woken."""
        snapshot = self._snapshot
        woken: dict[tuple[int, int], list[int]] = {}
        if not snapshot.context.live:
            # Of a running kernel, queues were read at another time than stacks.
            woken = {futex: list(rows) for futex, rows in snapshot.unqueued.items()}
        awake = awake_rows(snapshot.tasks, snapshot.now)
        left = leaving(snapshot.context, snapshot.now, awake, self._stack_size)
        for row, on in zip(awake.tolist(), left, strict=True):
            if on is not None and on.address is not None:
                futex = snapshot.place_of(row, int(on.address))
                woken.setdefault(futex, []).append(row)
        return woken

    def _crowds(self, woken: dict[tuple[int, int], list[int]]) -> list[Wanted]:
        """Return the crowds of all locks, the largest first.

        They include futexes whose waiters have all been woken.
        """
        crowds = list(self._snapshot.crowds)
        # If all waiters are woken together, no crowd of sleepers may be left.
        queued = {self._snapshot.place(want) for want in crowds}
        crowds += [
            Wanted(futex_at(futex), rows)
            for futex, rows in woken.items()
            if futex not in queued
        ]
        return sorted(crowds, key=lambda want: -len(want.rows))

    def _target(self, want: Wanted) -> WaitTarget:
        snapshot, lock = self._snapshot, want.lock
        exact = [own.row for own in want.owners if own.confidence == "exact"]
        mm = int(snapshot.tasks["mm"][want.rows[0]])
        return WaitTarget(
            kind="futex" if lock.type in FUTEX.names else "lock",
            address=None if lock.address is None else Address(lock.address),
            owner=snapshot.pids[exact[0]] if exact else None,
            name=CONDITION if is_condition(snapshot.context, lock, mm) else None,
        )


# --- Builds the rows of a report from a snapshot: waits, locks, deadlocks, inversions.
#
# Roots are made in msatools.locks.root_rows, herds above.


_INHERITS = frozenset(("pi_futex", "rt_mutex"))
"""Locks whose owners inherit the priority of waiters."""

_EVENTS = frozenset(
    ("completion", "wait_queue", "threads", "child", "io_uring", "futex", "rcuwait")
)


def urgency(tasks: TaskTable) -> npt.NDArray[np.int64]:
    """
    Return the rank of each task on a CPU: lower ones always run before higher ones.

    The fair class has one rank: nice values only weigh each task's share of a CPU. But
    tasks of SCHED_IDLE always give way to others (kernel/sched/fair.c:
    check_preempt_wakeup_fair()).
    """
    prio = tasks["prio"].astype(np.int64)
    idle = (tasks["policy"] == IDLE).astype(np.int64)
    return np.where(prio < MAX_RT_PRIO, prio, MAX_RT_PRIO + idle)


class ReportRows(TypedDict):
    """The fields of a report that come from a snapshot."""

    waits: tuple[Wait, ...]
    locks: tuple[LockRow, ...]
    roots: tuple[Root, ...]
    deadlocks: tuple[Deadlock, ...]
    herds: tuple[Herd, ...]
    inversions: tuple[Inversion, ...]
    workqueues: Workqueues | None
    io: tuple[DiskIo, ...] | None
    has_all_io: bool | None


class _WaitColumns(Struct, frozen=True):
    """Columns of the table of tasks for the rows of waits, by the row of a task."""

    tgid: list[int]
    start_ns: list[int]
    switches: list[int]
    classes: list[int]
    bounds: list[int]
    stacks: list[int]
    """Indices in ``now.stacks.unique``."""


class ReportBuilder:
    """Makes the rows of a report from one snapshot."""

    def __init__(
        self,
        snapshot: WaitSnapshot,
        options: LocksOptions,
        stack_size: int,
        crowded: WaitSnapshot,
    ) -> None:
        """
        :param stack_size: Bytes of a kernel stack.
        :param crowded: The same snapshot with waits that changed while it was read.
        """
        self._snapshot = snapshot
        self._options = options
        self._stack_size = stack_size
        self._crowded = crowded
        self._ids = LockIds(snapshot, stack_size)
        self._modules: dict[tuple[int, str | None], str | None] = {}
        """Maps a stack's index and a function on that stack to the module of it."""

    def rows(self, watched: Watched) -> ReportRows:
        """Return the rows that fit the options."""
        snapshot, size = self._snapshot, self._stack_size
        rows = WaitSelection(snapshot, self._options).with_chains()
        locks = [
            want for want in snapshot.wanted.values() if not rows.isdisjoint(want.rows)
        ]
        self._ids.add(locks)
        locks.sort(key=lambda want: (-len(want.rows), self._ids[want.lock]))
        roots = RootRows(snapshot, self._ids, size, with_stacks=self._options.stacks)
        found = roots.of_waits(rows)
        selection = WaitSelection(self._crowded, self._options)
        herds = HerdRows(self._crowded, self._ids, selection, size)
        return ReportRows(
            waits=tuple(map(self._wait, snapshot.oldest_first(rows))),
            locks=tuple(map(self._lock, locks)),
            roots=(*found, *self._stalled(found)),
            deadlocks=tuple(self._deadlocks()),
            herds=with_frames([*herds.find(watched)], self._crowded.context),
            inversions=tuple(self._inversions(locks)),
            workqueues=self._workqueues() if self._options.workqueues else None,
            io=self._io(found),
            has_all_io=self._options.io or None,
        )

    def _io(self, roots: Sequence[Root]) -> tuple[DiskIo, ...] | None:
        """Return the I/O of all disks if asked for, otherwise of those of roots."""
        context = self._snapshot.context
        if self._options.io:
            return in_flight(context).all()
        names = {name for root in roots for name in root.disks or ()}
        return in_flight(context).named(names) if names else None

    def _stalled(self, roots: Sequence[Root]) -> Iterator[Root]:
        """Yield the stalled pools of workers whose culprits are not roots already."""
        snapshot = self._snapshot
        if not self._options.asks_for_all:
            return
        known = {root.pid for root in roots if root.kind == "task"}
        for pool in stalled_pools(snapshot.context, snapshot.ages_ns):
            if known.isdisjoint(pool.culprits):
                yield root_of_pool(pool)

    def _workqueues(self) -> Workqueues | None:
        """List pools and workqueues; ``None``, with a note, if they are unknown."""
        context = self._snapshot.context
        try:
            return list_workqueues(context, self._snapshot.ages_ns)
        except MissingError as error:
            context.losses.note("workqueues-unknown", f"workqueues: {error}")
        except UNREADABLE as error:
            context.losses.lose(Loss.WORKQUEUES, f"cannot read workqueues: {error}")
        return None

    @cached_property
    def _columns(self) -> _WaitColumns:
        """Columns of all tasks as lists: single elements of an array are slow."""
        snapshot = self._snapshot
        tasks, now = snapshot.tasks, snapshot.now
        return _WaitColumns(
            tgid=tasks["tgid"].tolist(),
            start_ns=tasks["start_ns"].tolist(),
            switches=(tasks["nvcsw"] + tasks["nivcsw"]).tolist(),
            classes=now.classes.tolist(),
            bounds=now.age_bound.tolist(),
            stacks=now.stacks.index.tolist(),
        )

    def _module(self, index: int, function: str | None) -> str | None:
        """Return the module of a function on a stack of ``now.stacks.unique``."""
        key = index, function
        if key not in self._modules:
            stacks = self._snapshot.now.stacks
            self._modules[key] = stacks.module(stacks.unique[index], function)
        return self._modules[key]

    def _wait(self, row: int) -> Wait:
        snapshot, columns = self._snapshot, self._columns
        blocked, index = snapshot.blocked[row], columns.stacks[row]
        wait = snapshot.now.waits[index]
        task_class = TaskClass(columns.classes[row])
        # The caller of a futex is in user space.
        caller = None if task_class is TaskClass.LCK else wait.caller
        single = len(blocked.requests) == 1
        ids = tuple(self._ids[request.lock] for request in blocked.requests)
        owners = [snapshot.pids[edge.owner] for edge in snapshot.graph.edges_of(row)]
        return Wait(
            pid=snapshot.pids[row],
            tgid=columns.tgid[row],
            comm=snapshot.comm(row),
            state=snapshot.letters[row],
            age_ns=snapshot.ages_ns[row],
            age_bound=AgeBound(columns.bounds[row]).name.lower(),
            mode=blocked.requests[0].mode if single else None,
            lock=ids[0] if single else None,
            task_class=task_class.name,
            caller=blocked.caller or caller,
            module=self._module(index, blocked.caller or caller),
            call=wait.call,
            start_ns=columns.start_ns[row],
            switches=columns.switches[row],
            owners=tuple(dict.fromkeys(owners)),
            any_of=ids if len(ids) > 1 else None,
            on=blocked.on,
            why=blocked.why,
            stack=snapshot.stack_of(row) if self._options.stacks else None,
        )

    def _lock(self, want: Wanted) -> LockRow:
        snapshot, address = self._snapshot, want.lock.address
        name = self._ids.name(want.lock)
        return LockRow(
            id=self._ids[want.lock],
            type=want.lock.type,
            address=None if address is None else Address(address),
            name=name.name,
            owners=tuple(map(self._owner, want.owners)),
            refuted=tuple(map(self._owner, want.refuted)),
            waiters=tuple(self._waiters(want)),
            max_age_ns=max(snapshot.ages_ns[row] for row in want.rows),
            readers=want.readers,
            path=name.path,
            inode=name.inode,
            device=name.device,
            pid=name.pid,
            cache=name.cache,
            what=self._what(want),
        )

    def _owner(self, own: Owned) -> Owner:
        also = (
            f"its address is on the stack of {self._snapshot.pids[row]}, too"
            for row in own.others
        )
        return Owner(
            pid=self._snapshot.pids[own.row],
            confidence=own.confidence,
            comm=self._snapshot.comm(own.row),
            seen=own.seen,
            evidence=(*own.against, *also),
        )

    def _what(self, want: Wanted) -> str | None:
        """Describe what the waiters for an event, or for a futex, wait for."""
        if want.lock.type not in _EVENTS:
            return None
        return self._snapshot.blocked[want.rows[0]].what

    def _waiters(self, want: Wanted) -> list[int]:
        """Return the waiters in the order of the queue, then others by age."""
        snapshot = self._snapshot
        queued = [snapshot.pid(each.task) for each in want.queue or ()]
        others = [snapshot.pids[row] for row in snapshot.oldest_first(want.rows)]
        known = [pid for pid in queued if pid is not None]
        return list(dict.fromkeys([*known, *others]))

    def _deadlocks(self) -> Iterator[Deadlock]:
        """Yield the cycles of which the options ask for all locks."""
        pids = self._snapshot.pids
        for cycle in self._snapshot.graph.cycles:
            edges = cycle.edges
            if all(edge.lock in self._ids for edge in edges):
                yield Deadlock(
                    confidence="exact" if self._is_certain(cycle) else "possible",
                    pids=tuple(pids[edge.waiter] for edge in edges),
                    locks=tuple(self._ids[edge.lock] for edge in edges),
                )

    def _is_certain(self, cycle: Cycle) -> bool:
        """Return whether a deadlock is certain.

        A wait with a timer ends by itself. A lock that a process owns may be released
        by any of its threads. A task that seems to own the kernel lock that it waits
        for may have taken it twice, or have the task_struct of an owner that exited.
        """
        snapshot = self._snapshot
        if len(cycle.edges) == 1 and cycle.edges[0].lock.type in KERNEL_LOCKS:
            return False
        if not cycle.exact or any(map(self._is_of_process, cycle.edges)):
            return False
        rows = np.array(sorted(edge.waiter for edge in cycle.edges), np.intp)
        cases = read_cases(snapshot.context, snapshot.now, rows, self._stack_size)
        return all(case.stack.timer() is None for case in cases)

    def _is_of_process(self, edge: Edge) -> bool:
        """Return whether any of several threads may release a lock."""
        if edge.lock.type != "posix_lock":
            return False
        tasks = self._snapshot.tasks
        process = tasks["tgid"] == tasks["tgid"][edge.owner]
        return int(np.count_nonzero(process & (tasks["exit_state"] == 0))) > 1

    def _inversions(self, locks: Iterable[Wanted]) -> Iterator[Inversion]:
        """Find runnable owners that are off the CPU and less urgent than a waiter."""
        snapshot = self._snapshot
        tasks, pids = snapshot.tasks, snapshot.pids
        prio: list[int] = tasks["prio"].tolist()
        ranks: list[int] = urgency(tasks).tolist()
        for want in locks:
            if want.lock.type in _INHERITS:
                continue
            waiter = min(want.rows, key=lambda row: (ranks[row], prio[row]))
            for own in want.owners:
                runnable = tasks["state"][own.row] == 0 and not tasks["on_cpu"][own.row]
                if not runnable or ranks[own.row] <= ranks[waiter]:
                    continue
                if not snapshot.context.throttles.rows[own.row]:
                    yield Inversion(
                        lock=self._ids[want.lock],
                        owner=pids[own.row],
                        waiter=pids[waiter],
                        owner_pri=prio[own.row] - MAX_RT_PRIO,
                        waiter_pri=prio[waiter] - MAX_RT_PRIO,
                        owner_policy=("IDLE" if ranks[waiter] == MAX_RT_PRIO else None),
                        owner_ready_ns=int(snapshot.now.age_ns[own.row]),
                    )
