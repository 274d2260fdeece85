# SPDX-License-Identifier: LGPL-2.1-or-later

"""Makes the reports of msa-locks: the waits, locks and owners of one kernel.

On a running kernel only the waits that did not change during the read are kept.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import drgn
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from msatools.errors import UNREADABLE
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.pids import find_tasks
from msatools.kernel.report import KernelSession, Loss, LossLog, Note, Progress, quietly
from msatools.kernel.structs import NOT_FOUND, Booleans, find_rows
from msatools.locks.context import MAX_WAITERS, LockContext
from msatools.locks.graph import BY_STACK, Edge
from msatools.locks.herds import Watched, read_again
from msatools.locks.ownership import find_owners, missing_owners
from msatools.locks.report import Contended, Lock, LocksReport, OwnerSeen, changes
from msatools.locks.report_builder import LocksOptions, ReportBuilder
from msatools.locks.root_rows import LockIds, lock_id
from msatools.locks.spinlocks import ANY, ANY_ID, ANY_NAME, SpinQueues
from msatools.locks.struct_reader import Layout
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted, read_snapshot
from msatools.program.description import describe
from msatools.program.model import Target
from msatools.tasks.identity import KernelNames, comm_text
from msatools.tasks.sampler import (
    MAX_HZ,
    Sampler,
    TaskState,
    collect_now,
    share_of_samples,
)
from msatools.tasks.states import WAKING, asleep
from msatools.tasks.table import IDENTITY, TaskTable
from msatools.tasks.unwind import stack_bytes
from msatools.tasks.waits import TaskClass

# --- Keeps only the waits that did not change while a running kernel was read.
#
# A snapshot takes many reads, and tasks run meanwhile. Two rules make it consistent:
#
# - A task that slept from the first read until after the last one waited for one lock
#   all the time, so the data of its wait is right. It has neither taken nor released a
#   lock, so it owned the same locks all the time. So tasks that wait for each other and
#   did not wake up are a deadlock, however long the reads took.
# - An owner may run. It owned the lock when the lock was read, if the same task still
#   exists after the last read, at the same address.
#
# A lock may be handed to a task that still sleeps (futex_unlock_pi()), which then seems
# to wait for a lock of its own. So cycles are read twice: see unconfirmed().


_SWITCHED = (
    *IDENTITY,
    *("state", "on_cpu", "nvcsw", "nivcsw", "sp", "last_arrival_ns"),
)
"""Columns of the task table, at least one of which changes if a task runs.

The counters of switches alone are not enough: a woken task sets the state of its next
sleep before it counts the switch.
"""


def concerned(snapshot: WaitSnapshot) -> list[int]:
    """Return the addresses of the tasks to read again for :func:`held`.

    These are blocked tasks, owners, and tasks in the queues of locks.
    """
    of_table: list[int] = snapshot.tasks["address"].tolist()
    rows = set(snapshot.blocked)
    for want in snapshot.wanted.values():
        rows.update(own.row for own in want.owners)
        queued = (snapshot.rows.get(each.task) for each in want.queue or ())
        rows.update(row for row in queued if row is not None)
    return [of_table[row] for row in sorted(rows)]


def held(snapshot: WaitSnapshot, again: TaskTable, *, alone: bool) -> WaitSnapshot:
    """
    Return the snapshot without tasks that ran while it was read and owners that exited.

    :param again: The tasks of :func:`concerned`, read after all else.
    :param alone: Whether the snapshot has only some tasks. Then other tasks in a queue
        are kept.
    """
    rested = _in_both(_off_cpu(snapshot.tasks), _off_cpu(again), _SWITCHED)
    there = _in_both(snapshot.tasks, again, IDENTITY)
    addresses: list[int] = snapshot.tasks["address"].tolist()
    gone = {row for row in snapshot.blocked if addresses[row] not in rested}

    # A task that was woken up counts as out of the queue.
    sleeping = set(snapshot.tasks["address"][_asleep(snapshot)].tolist()) & rested

    def keep(want: Wanted) -> Wanted:
        queue = None
        if want.queue is not None:
            queue = tuple(
                each
                for each in want.queue
                if each.task in sleeping or (alone and each.task not in snapshot.rows)
            )
        # The stack of a task that ran in between proves nothing.
        owners = tuple(
            own
            for own in want.owners
            if addresses[own.row] in (rested if own.confidence == "evidence" else there)
        )
        return replace(want, queue=queue, owners=owners)

    kept = snapshot.without(gone)
    wanted = {lock: keep(want) for lock, want in kept.wanted.items()}
    owners = {own.row for want in wanted.values() for own in want.owners}
    moved = {row for row in owners if addresses[row] not in rested}
    return replace(kept, wanted=wanted, moved=frozenset(moved))


def _asleep(snapshot: WaitSnapshot) -> Booleans:
    """Return which tasks sleep, without those woken or preempted on the way to sleep.

    Both kinds are still in the queue of their lock. A woken task is in TASK_WAKING. A
    preempted task has set its state, but is on a run queue; it counts as asleep only
    if the snapshot has its wait.
    """
    tasks = snapshot.tasks
    rows = asleep(tasks)
    rows &= (tasks["state"] & WAKING) == 0
    if tasks.has("on_rq"):
        preempted = tasks["on_rq"] != 0
        if tasks.has("sched_delayed"):
            preempted &= tasks["sched_delayed"] == 0
        preempted[list(snapshot.blocked)] = False
        rows &= ~preempted
    return rows


def in_circles(snapshot: WaitSnapshot) -> list[int]:
    """Return the addresses of all tasks in cycles of waits."""
    addresses: list[int] = snapshot.tasks["address"].tolist()
    rows = {row for cycle in snapshot.graph.cycles for row in cycle.tasks}
    return [addresses[row] for row in sorted(rows)]


def unconfirmed(snapshot: WaitSnapshot, second: WaitSnapshot) -> list[Edge]:
    """
    Return the edges of cycles that a second snapshot does not confirm.

    It lacks the edge, or has an ``exact`` one with a lower confidence.

    :param second: Another snapshot, of the tasks of :func:`in_circles`.
    """
    confirmed = {_link(second, edge): edge.confidence for edge in second.graph.edges}
    inside = [
        edge
        for cycle in snapshot.graph.cycles
        for edge in snapshot.graph.edges
        if edge.waiter in cycle.tasks and edge.owner in cycle.tasks
    ]
    return [
        edge
        for edge in inside
        if (found := confirmed.get(_link(snapshot, edge))) is None
        or (edge.confidence == "exact" and found != "exact")
    ]


def without_edges(snapshot: WaitSnapshot, edges: Iterable[Edge]) -> WaitSnapshot:
    """Return the snapshot without the lock owners that *edges* lead to."""
    wrong = {(edge.lock, edge.owner) for edge in edges}
    wanted = {
        lock: replace(
            want, owners=tuple(o for o in want.owners if (lock, o.row) not in wrong)
        )
        for lock, want in snapshot.wanted.items()
    }
    return replace(snapshot, wanted=wanted)


def _link(snapshot: WaitSnapshot, edge: Edge) -> tuple[int, Lock, int]:
    """Return a key of an edge that is valid in any snapshot: addresses, not rows."""
    addresses = snapshot.tasks["address"]
    return int(addresses[edge.waiter]), edge.lock, int(addresses[edge.owner])


def _off_cpu(tasks: TaskTable) -> TaskTable:
    return tasks.only(tasks["on_cpu"] == 0)


def _in_both(
    before: TaskTable, after: TaskTable, columns: tuple[str, ...]
) -> frozenset[int]:
    """Return the addresses of tasks whose *columns* are equal in both tables."""
    addresses = before["address"]
    if not len(after):
        return frozenset()
    other = find_rows(after["address"], addresses)
    same = other != NOT_FOUND
    for column in columns:
        if before.has(column):
            same &= before[column] == after[column][other]
    return frozenset(addresses[same].tolist())


# --- Contention of locks, by samples within an interval.
#
# A wait that is shorter than a snapshot takes is in no report of waits, as waits that
# change while they are read are left out. But each waiter in a sample did wait at some
# moment. With many samples the mean number of waiters measures contention as lockstat
# does: by Little's law it is the time per second that tasks wait for a lock.


MAX_OWNERS = 8
"""Maximum number of owners of one lock to report, the most frequent first."""


class Met(Struct, frozen=True):
    """The number of waiters, and the owners, of one lock in one sample."""

    lock: Lock
    waiters: int
    owners: Sequence[OwnerSeen]


def met(snapshot: WaitSnapshot) -> Iterator[Met]:
    """Yield each lock of a snapshot with its number of waiters and its owners."""
    tasks = snapshot.tasks
    for want in snapshot.crowds:
        owners = [
            OwnerSeen(
                pid=int(tasks["pid"][own.row]),
                comm=comm_text(tasks["comm"][own.row]),
                looks=1,
                where=_where(snapshot, own.row),
            )
            for own in want.owners
        ]
        yield Met(want.lock, len(want.rows), owners)


def _where(snapshot: WaitSnapshot, row: int) -> str:
    """Return the class of a task and, if known, the function that it sleeps in."""
    task_class = TaskClass(int(snapshot.now.classes[row]))
    wait = snapshot.now.waits[int(snapshot.now.stacks.index[row])]
    function = wait.caller or wait.function
    return f"{task_class.name} {function}" if function else task_class.name


class _LockSums(Struct):
    looks: int = 0
    waiters: int = 0
    squares: int = 0
    most: int = 0
    owners: Counter[OwnerSeen] = field(default_factory=Counter)


class Contention:
    """Sums up the samples of an interval."""

    def __init__(self) -> None:
        self._looks = 0
        self._locks: dict[Lock, _LockSums] = {}

    def add(self, met: Iterable[Met]) -> None:
        """Add one sample: the locks that tasks waited for."""
        self._looks += 1
        for each in met:
            sums = self._locks.setdefault(each.lock, _LockSums())
            sums.looks += 1
            sums.waiters += each.waiters
            sums.squares += each.waiters**2
            sums.most = max(sums.most, each.waiters)
            sums.owners.update(each.owners)

    @property
    def looks(self) -> int:
        """Number of samples that were added."""
        return self._looks

    def ranked(self) -> list[Lock]:
        """Return the locks, the one with the longest total wait first."""
        return sorted(
            self._locks, key=lambda lock: (-self._locks[lock].waiters, str(lock))
        )

    def contended(
        self, lock: Lock, id_: str, name: str | None, interval_ns: int
    ) -> Contended:
        """Return the contention of a lock.

        :param id_: Its ID in the report.
        :param interval_ns: The time over which samples were taken.
        """
        sums, looks = self._locks[lock], self._looks
        mean = sums.waiters / looks
        return Contended(
            lock=id_,
            type=lock.type,
            name=name,
            looks=looks,
            share=sums.looks / looks,
            mean_queue=mean,
            max_queue=sums.most,
            wait_ns=round(mean * interval_ns),
            error_ns=round(_error(sums, looks) * interval_ns),
            owners=tuple(
                replace(owner, looks=count)
                for owner, count in sums.owners.most_common(MAX_OWNERS)
            ),
        )


def _error(sums: _LockSums, looks: int) -> float:
    """Return the standard error of the mean number of waiters."""
    if looks < 2:
        return float(sums.waiters)
    variance = (sums.squares - sums.waiters**2 / looks) / (looks - 1)
    return math.sqrt(max(variance, 0) / looks)


# --- Runs of msa-locks: its report, and its intervals with samples.


_COVERAGE = (
    *("tasks", "tasks_scanned", "zombies", "tasks_unreadable", "lists_broken"),
    *("stacks", "stacks_incomplete", "blocked", "locks_unknown", "stacks_searched"),
    *("reads", "bytes_read"),
)
"""Keys that are always in the report's coverage."""

MAX_NAMED = 32
"""Maximum number of new locks that one sample names, those with most waiters first; the
others have only an ID, with their address."""

_STEPS = 6
_MAX_ROUNDS = 64
"""Maximum number of rounds that read missing owners, where only named tasks are read:
each round follows chains of owners by one task."""


def collect_locks(
    prog: drgn.Program,
    *,
    target: Target | None = None,
    options: LocksOptions | None = None,
    progress: Progress | None = None,
) -> LocksReport:
    """
    Find all blocked tasks of a kernel, the locks that they wait for and the owners.

    >>> report = collect_locks(prog)
    >>> report.roots[0].pid, report.roots[0].reason
    (487, 'FUSE server 480 (/mnt/d)')

    Nothing is written, and nothing but *prog* is read.

    :param prog: A Linux kernel with types, live or dead.
    :param target: Description of the target for the report; read from *prog* if not
        given.
    :param progress: Called with the number of steps done, and that of all steps.
    :raises NoSuchPidError: if a PID that the options name does not exist
    :raises MissingError: if types or members that describe tasks are missing
    :raises drgn.FaultError: if the dump lacks every task
    :raises TargetError: if the program is not a kernel, or has no types
    """
    session = Locks(prog, target or describe(prog), options or LocksOptions())
    return session.report(progress or quietly)


Switches = Mapping[tuple[int, int], int]
"""Maps a thread's ID and start time, in ns, to its voluntary context switches."""


class Locks(KernelSession[LocksReport, LocksOptions]):
    """A run of reports on one kernel: see :class:`msatools.kernel.report.Session`."""

    def __init__(
        self, prog: drgn.Program, target: Target, options: LocksOptions
    ) -> None:
        super().__init__(prog, target, options)
        self._layout = Layout(self._reader)
        with self._learning():
            self._sampler = Sampler(self._reader, self._losses, read=self._read)
            self._task_reader = self._sampler.task_reader
            self._kernel_names = KernelNames(self._reader)
            self._stack_bytes = stack_bytes(prog)
            self._spin_queues = SpinQueues(self._reader, self._losses)
        self._switches: Switches | None = None
        self._live = self._reader.is_live
        self._contention = Contention()
        self._names: dict[Lock, tuple[str, str | None]] = {}
        self._unnamed: dict[Lock, str] = {}
        """The IDs of sampled locks that are not named yet."""

        self._cost_s = 0.0

    @property
    def period_s(self) -> float | None:
        """Seconds from one sample to the next; more if samples cost much CPU time."""
        return max(1 / MAX_HZ, self._cost_s / share_of_samples(self._options.share))

    def begin(self, progress: Progress) -> None:
        """Take the first snapshot of an interval."""
        self._contention = Contention()
        self._switches = None
        super().begin(progress)

    def sample(self) -> None:
        """Take a snapshot within an interval."""
        began_s = time.process_time()
        # Losses of samples are dropped: the interval's report has its own losses.
        aside = LossLog()
        if self._alone:
            snapshot = self._snapshot_of(self._read(aside), aside, alone=True)
        else:
            snapshot = self._snapshot_of_all(aside)
        find_owners(snapshot, self._reader, self._stack_bytes, aside, search=False)
        self._meet(snapshot)
        self._cost_s = time.process_time() - began_s

    def _meet(self, snapshot: WaitSnapshot) -> None:
        """Add a snapshot as one sample of the contention; name its new locks."""
        self._contention.add([*met(snapshot), *self._spins()])
        new = [want for want in snapshot.crowds if want.lock not in self._names]
        new.sort(key=lambda want: -len(want.rows))
        named, unnamed = new[:MAX_NAMED], new[MAX_NAMED:]
        ids = LockIds(snapshot, self._stack_bytes)
        ids.add(named)
        for want in named:
            self._names[want.lock] = ids[want.lock], ids.name(want.lock).name
        for want in unnamed:
            self._unnamed[want.lock] = lock_id(snapshot, want)

    def _spins(self) -> Iterator[Met]:
        """Yield the number of CPUs in queues for spinlocks, as waiters of ``ANY``."""
        if self._alone:
            return
        try:
            waiting = self._spin_queues.waiting()
        except UNREADABLE as error:
            self._losses.lose(Loss.CPUS, f"cannot determine who spins: {error}")
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
        # In the next interval another lock may be at the same address.
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
        """Return the contention of the locks of the types that were asked for."""
        types, interval_ns = self._options.types, report.interval_ns or 0
        unnamed = {lock: (id_, None) for lock, id_ in self._unnamed.items()}
        names = {**unnamed, **self._names}
        return tuple(
            contention.contended(lock, *names[lock], interval_ns)
            for lock in contention.ranked()
            if types is None or lock.type in types
        )

    def report(self, progress: Progress) -> LocksReport:
        """Return a report of the waits, locks and owners at this moment."""
        losses = self._losses
        with self._reporting():
            progress(0, _STEPS)
            snapshot = self._of_some() if self._alone else self._snapshot_of_all(losses)
            self._kernel_names.fill(snapshot.tasks, losses)
            progress(3, _STEPS)
            search = not snapshot.context.alone
            find_owners(snapshot, self._reader, self._stack_bytes, losses, search)
            crowded = snapshot
            if self._live:
                self._meet(snapshot)
                snapshot = self._confirmed(self._held(snapshot))
            progress(4, _STEPS)
            tasks, then = snapshot.tasks, self._switches
            watched = Watched(
                None if then is None else _slept(tasks, then),
                read_again(self._task_reader, tasks) if self._live else None,
            )
            builder = ReportBuilder(snapshot, self._options, self._stack_bytes, crowded)
            rows = builder.rows(watched)
            now = zip(_threads(tasks), tasks["nvcsw"].tolist(), strict=True)
            self._switches = dict(now)
            self._count(snapshot)
        return LocksReport(
            **self._head(snapshot.clocks.monotonic_ns, _COVERAGE),
            **rows,
            pids=tuple(snapshot.tasks["pid"].tolist()),
        )

    def _read(self, losses: LossLog) -> TaskTable:
        """Read all threads, or only those that the options name."""
        return self._task_reader.read_named(self._options.pids, losses)

    def _of_some(self) -> WaitSnapshot:
        """Read the waits of the named tasks, and of the owners they lead to."""
        tasks = self._read(self._losses)
        for _ in range(_MAX_ROUNDS):
            snapshot = self._snapshot_of(tasks, self._losses, alone=True)
            missing = missing_owners(snapshot)
            if not missing:
                break
            more = self._are_tasks(self._task_reader.read(missing, self._losses))
            if not len(more):
                break
            # The next round reads all of these tasks again, and counts losses anew.
            self._losses.reset(self._lasting)
            records = np.concatenate([tasks.records, more.records])
            tasks = TaskTable(records, tasks.columns)
        if not _asks_all(snapshot):
            return snapshot
        self._losses.reset(self._lasting)
        tasks = self._task_reader.require_all(self._losses)
        return self._snapshot_of(tasks, self._losses, alone=False)

    def _are_tasks(self, tasks: TaskTable) -> TaskTable:
        """Return the tasks that still exist."""
        known = find_tasks(self._reader, tasks["pid"].tolist(), LossLog())
        return tasks.only(np.isin(tasks["address"], list(known.values())))

    @property
    def _alone(self) -> bool:
        return self._options.pids is not None

    def _snapshot_of_all(self, losses: LossLog) -> WaitSnapshot:
        seen = self._sampler.sample()
        return self._snapshot(seen.tasks, seen.now, seen.clocks, losses, alone=False)

    def _snapshot_of(
        self, tasks: TaskTable, losses: LossLog, *, alone: bool
    ) -> WaitSnapshot:
        clocks = read_clocks(self._reader, losses)
        now = collect_now(self._sampler.collector, self._prog, tasks, clocks)
        return self._snapshot(tasks, now, clocks, losses, alone=alone)

    def _snapshot(
        self,
        tasks: TaskTable,
        now: TaskState,
        clocks: Clocks,
        losses: LossLog,
        *,
        alone: bool,
    ) -> WaitSnapshot:
        # All waiters of a lock are reported, even for a single task.
        limit = MAX_WAITERS
        context = LockContext(
            self._layout, tasks, losses, clocks, alone=alone, limit=limit
        )
        return read_snapshot(context, now, clocks, self._stack_bytes)

    def _held(self, snapshot: WaitSnapshot) -> WaitSnapshot:
        """Return the snapshot without waits and owners that changed meanwhile."""
        again = self._task_reader.read(concerned(snapshot), LossLog())
        kept = held(snapshot, again, alone=snapshot.context.alone)
        ended = len(snapshot.blocked) - len(kept.blocked)
        self._losses.coverage["waits_ended"] += ended
        return kept

    def _confirmed(self, snapshot: WaitSnapshot) -> WaitSnapshot:
        """Return the snapshot without cycles that a second one does not confirm."""
        circles = in_circles(snapshot)
        if not circles:
            return snapshot
        aside = LossLog()
        tasks = self._task_reader.read(circles, aside)
        second = self._snapshot_of(tasks, aside, alone=True)
        find_owners(second, self._reader, self._stack_bytes, aside, search=True)
        wrong = unconfirmed(snapshot, second)
        self._losses.coverage["owners_unconfirmed"] += len(wrong)
        # Keep only tasks that slept from the first snapshot until after the second.
        return self._held(without_edges(snapshot, wrong))

    def _count(self, snapshot: WaitSnapshot) -> None:
        coverage = self._losses.coverage
        dead = int(np.count_nonzero(snapshot.tasks["exit_state"]))
        coverage["tasks"] = len(snapshot.tasks)
        coverage["zombies"] = dead
        coverage["tasks_scanned"] = len(snapshot.tasks) - dead
        coverage["blocked"] = len(snapshot.blocked)
        unknown = [each for each in snapshot.blocked.values() if each.why]
        coverage["locks_unknown"] = len(unknown)


def _asks_all(snapshot: WaitSnapshot) -> bool:
    """Return whether all tasks have to be read to find the owners.

    The owners of some locks are only known by stacks, and the server of a file system
    in user space only by open files.
    """
    outside = (each.external for each in snapshot.blocked.values())
    if any(thing is not None and thing.kind == "fuse" for thing in outside):
        return True
    return any(
        want.lock.type in BY_STACK
        and not any(holder.confidence == "exact" for holder in want.holders)
        for want in snapshot.wanted.values()
    )


def _unnamed_note(count: int) -> Iterator[Note]:
    if count:
        yield Note(
            "locks-unnamed",
            f"{count:,} locks that were waited for are known by their address alone: a "
            f"report names {MAX_NAMED} new ones, those first for which most tasks wait",
        )


def _threads(tasks: TaskTable) -> Iterator[tuple[int, int]]:
    return zip(tasks["pid"].tolist(), tasks["start_ns"].tolist(), strict=True)


def _slept(tasks: TaskTable, then: Switches) -> npt.NDArray[np.int64]:
    """Return how often each task went to sleep since *then*; 0 for a new task."""
    now: list[int] = tasks["nvcsw"].tolist()
    pairs = zip(now, map(then.get, _threads(tasks)), strict=True)
    return np.array([0 if b is None else a - b for a, b in pairs], np.int64)
