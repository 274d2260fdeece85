# SPDX-License-Identifier: LGPL-2.1-or-later

"""Builds the rows of a report from a snapshot: waits, locks, deadlocks, inversions.

Roots and herds are made in :mod:`msatools.locks.root_rows` and
:mod:`msatools.locks.herd_rows`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from msatools.errors import UNREADABLE, MissingError
from msatools.kernel.losses import Loss
from msatools.locks.base.blocked_tasks import read_cases
from msatools.locks.base.model import Herd
from msatools.locks.graph import Cycle, Edge
from msatools.locks.herd_rows import HerdRows
from msatools.locks.herds import Watched
from msatools.locks.io.inflight import in_flight
from msatools.locks.io.model import DiskIo
from msatools.locks.lock_ids import LockIds
from msatools.locks.options import LocksOptions
from msatools.locks.owners import Owned
from msatools.locks.report import Deadlock, Inversion, LockRow, Owner, Root, Wait
from msatools.locks.root_rows import RootRows, root_of_pool
from msatools.locks.selection import WaitSelection
from msatools.locks.standing import KERNEL_LOCKS
from msatools.locks.user.wakers import with_frames
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted
from msatools.locks.workqueues.listing import list_workqueues, stalled_pools
from msatools.locks.workqueues.model import Workqueues
from msatools.target.model import Address
from msatools.tasks.classes import TaskClass
from msatools.tasks.standing import IDLE, MAX_RT_PRIO
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import AgeBound

_INHERITS = frozenset(("pi_futex", "rt_mutex"))
"""Locks whose owners inherit the priority of waiters."""

_EVENTS = frozenset(
    ("completion", "wait_queue", "threads", "child", "io_uring", "futex", "rcuwait")
)


def urgency(tasks: TaskTable) -> npt.NDArray[np.int64]:
    """
    Return the rank of each task on a CPU: lower ones always run before higher ones.

    The fair class has one rank: nice values are shares of a CPU, which each task gets.
    Only tasks of SCHED_IDLE always give way to others (kernel/sched/fair.c:
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

    def _wait(self, row: int) -> Wait:
        snapshot, now = self._snapshot, self._snapshot.now
        tasks, blocked = snapshot.tasks, snapshot.blocked[row]
        wait = now.waits[int(now.stacks.index[row])]
        task_class = TaskClass(int(now.classes[row]))
        # The caller of a futex is in user space.
        caller = None if task_class is TaskClass.LCK else wait.caller
        single = len(blocked.requests) == 1
        ids = tuple(self._ids[request.lock] for request in blocked.requests)
        owners = [snapshot.pids[edge.owner] for edge in snapshot.graph.edges_of(row)]
        return Wait(
            pid=snapshot.pids[row],
            tgid=int(tasks["tgid"][row]),
            comm=snapshot.comm(row),
            state=snapshot.letters[row],
            age_ns=snapshot.ages_ns[row],
            age_bound=AgeBound(int(now.age_bound[row])).name.lower(),
            mode=blocked.requests[0].mode if single else None,
            lock=ids[0] if single else None,
            task_class=task_class.name,
            caller=blocked.caller or caller,
            module=now.stacks.module(now.stacks[row], blocked.caller or caller),
            call=wait.call,
            start_ns=int(tasks["start_ns"][row]),
            switches=int(tasks["nvcsw"][row]) + int(tasks["nivcsw"][row]),
            owners=tuple(dict.fromkeys(owners)),
            any_of=ids if len(ids) > 1 else None,
            on=blocked.on,
            why=blocked.why,
            stack=snapshot.functions(row) if self._options.stacks else None,
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

        A wait with a timer ends by itself. A lock of a process may be released by
        another thread of it than its reported owner. A task whose lock names itself may
        have taken it twice; or another had it and exited, and its task_struct is used
        anew.
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
