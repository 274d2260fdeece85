# SPDX-License-Identifier: LGPL-2.1-or-later

"""Snapshots of waits, locks and owners, from which reports are made."""

from collections.abc import Iterable
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from msatools.errors import LOST, UNREADABLE
from msatools.kernel.clocks import Clocks
from msatools.kernel.losses import Loss
from msatools.locks.base.lock import Holder, Lock, LockTypeName, QueuedWaiter
from msatools.locks.base.lock_context import LockContext
from msatools.locks.blocked import Blocked, blocked_rows, find_blocked
from msatools.locks.graph import Edge, Graph, Thing
from msatools.locks.lock_types import holders_of, queue_of, readers_of
from msatools.locks.owners import Owned
from msatools.locks.reasons import wait_text
from msatools.locks.sleeping.spinlocks import spins
from msatools.locks.user.futexcontent import condition_at
from msatools.locks.user.userlocks import FUTEX
from msatools.tasks.classes import TaskClass
from msatools.tasks.identity import comm_text
from msatools.tasks.states import letters
from msatools.tasks.table import TaskTable
from msatools.tasks.task_state import TaskState

BRIEF_NS = 1_000_000_000
"""Waits for contended locks are usually much shorter."""


class Unknown(Struct, frozen=True):
    """Uninterruptible sleep for something else than a lock, by the calling function."""

    text: str


class Wanted(Struct):
    """A lock that tasks wait for."""

    lock: Lock
    rows: list[int] = field(default_factory=list)
    """Rows of the waiters, in the order in which they were found."""

    queue: tuple[QueuedWaiter, ...] | None = None
    holders: tuple[Holder, ...] = ()
    readers: int | None = None
    owners: tuple[Owned, ...] = ()
    refuted: tuple[Owned, ...] = ()
    """Those whom the lock names, though something refutes it."""


class WaitSnapshot(Struct, frozen=True, dict=True):
    """All tasks, and the locks that some of them wait for."""

    context: LockContext
    tasks: TaskTable
    now: TaskState
    clocks: Clocks
    blocked: dict[int, Blocked]
    """Maps the row of a task to its wait."""

    wanted: dict[Lock, Wanted]

    moved: frozenset[int] = frozenset()
    """Rows of owners that ran while the snapshot was read."""

    def without(self, rows: set[int]) -> "WaitSnapshot":
        """Return the snapshot without the waits of some tasks."""
        blocked = {row: each for row, each in self.blocked.items() if row not in rows}
        wanted = {
            lock: replace(want, rows=[row for row in want.rows if row not in rows])
            for lock, want in self.wanted.items()
        }
        waited = {lock: want for lock, want in wanted.items() if want.rows}
        return replace(self, blocked=blocked, wanted=waited)

    @cached_property
    def graph(self) -> Graph:
        """The graph of waits."""
        edges = [
            Edge(row, each.lock, own.row, own.confidence, self._is_firm(row, own))
            for each in self.wanted.values()
            for row in each.rows
            if len(self.blocked[row].requests) == 1
            for own in each.owners
        ]
        things = {row: self._thing(each) for row, each in self.blocked.items()}
        known = {row: thing for row, thing in things.items() if thing is not None}
        return Graph(edges, known, lambda row: int(self.now.age_ns[row]))

    def _is_firm(self, row: int, own: Owned) -> bool:
        """Return whether a wait of one task for another may be part of a deadlock.

        An address on the stack of a task that just fell asleep may be that of a lock
        that it has just released.
        """
        if own.confidence == "exact" or not own.seen:
            return own.firm
        brief = min(int(self.now.age_ns[row]), int(self.now.age_ns[own.row]))
        return own.firm and brief >= BRIEF_NS

    def _thing(self, blocked: Blocked) -> Thing | None:
        """Return the thing that a task waits for if it has no owner.

        :return: ``None`` for a wait for any of several locks.
        """
        if blocked.external is not None:
            return blocked.external.kind, blocked.external.identity
        if len(blocked.requests) == 1:
            return blocked.requests[0].lock
        if blocked.requests:
            return None
        wait = self.now.waits[int(self.now.stacks.index[blocked.row])]
        where = wait.caller or wait.function
        if where is None:
            return None
        text = blocked.what
        if text is None and wait.task_class is not TaskClass.LCK:
            # The address of a futex is that of another one in another process.
            text = wait_text(wait.task_class, blocked.on)
        return Unknown(text or f"asleep in {where}")

    def pid(self, task: int) -> int | None:
        """Return a task's thread ID; ``None`` if it cannot be read."""
        try:
            return self.context.pid(task)
        except UNREADABLE:
            self.context.losses.lose(Loss.WAITERS, "cannot read all waiters for a lock")
            return None

    @cached_property
    def pids(self) -> list[int]:
        """Thread ID of each task."""
        pids: list[int] = self.tasks["pid"].tolist()
        return pids

    @cached_property
    def letters(self) -> list[str]:
        """Letter of each task's state, as in /proc."""
        found: list[str] = letters(self.tasks).tolist()
        return found

    @cached_property
    def ages_ns(self) -> list[int]:
        """Time since each task entered its state."""
        ages: list[int] = self.now.age_ns.tolist()
        return ages

    def comm(self, row: int) -> str:
        """Return the name of a task."""
        return comm_text(self.tasks["comm"][row])

    def functions(self, row: int) -> tuple[str, ...]:
        """Return the functions on a task's stack, innermost first."""
        stacks = self.now.stacks
        return stacks.names(stacks[row])

    def oldest_first(self, rows: Iterable[int]) -> list[int]:
        """Sort tasks by the time since they entered their state, the longest first."""
        return sorted(rows, key=lambda row: (-self.ages_ns[row], self.pids[row]))

    @cached_property
    def unqueued(self) -> dict[tuple[int, int], list[int]]:
        """Rows of tasks in a futex call but not in its queue, by process and address.

        They still sleep, but were taken off the queue to be woken. On a running kernel
        they may also have queued after the queue was read.
        """
        found: dict[tuple[int, int], list[int]] = {}
        for row, each in self.blocked.items():
            on = each.on
            if on is not None and on.kind == "futex" and on.address is not None:
                futex = self.place_of(row, int(on.address))
                found.setdefault(futex, []).append(row)
        return found

    def place_of(self, row: int, address: int) -> tuple[int, int]:
        """Return the process of a task, and the address that identifies a futex.

        For a futex of a condition variable that is the address of its start.
        """
        start = condition_at(self.context, int(self.tasks["mm"][row]), address)
        return int(self.tasks["tgid"][row]), address if start is None else start

    @cached_property
    def crowds(self) -> list[Wanted]:
        """The waiters of each lock, and the tasks that have just left its queue.

        A futex is identified by its process and address.
        """
        found: dict[Lock, Wanted] = {}
        for want in self.wanted.values():
            lock = self.crowd_lock(want)
            # A futex that is used as private and as shared one has two queues.
            known = found.get(lock, replace(want, rows=[]))
            found[lock] = replace(known, lock=lock, rows=[*known.rows, *want.rows])
        for place, rows in self.unqueued.items():
            lock = futex_at(place)
            want = found.get(lock, Wanted(lock))
            found[lock] = replace(want, rows=[*want.rows, *rows])
        return list(found.values())

    def crowd_lock(self, want: Wanted) -> Lock:
        """Return the lock that identifies a crowd: see :attr:`crowds`."""
        place = self.place(want)
        return want.lock if place is None else futex_at(place, want.lock.type)

    def place(self, want: Wanted) -> tuple[int, int] | None:
        """Return the process and address of a futex; ``None`` for another lock."""
        if want.lock.type not in FUTEX.names or want.lock.address is None:
            return None
        return int(self.tasks["tgid"][want.rows[0]]), want.lock.address

    @cached_property
    def rows(self) -> dict[int, int]:
        """Maps the address of a task to its row."""
        addresses: list[int] = self.tasks["address"].tolist()
        return {address: row for row, address in enumerate(addresses)}


def futex_at(place: tuple[int, int], type_: LockTypeName = "futex") -> Lock:
    """Return the lock of a futex, by its process and address alone."""
    tgid, address = place
    return Lock(type_, address, tgid)


def read_snapshot(
    context: LockContext, now: TaskState, clocks: Clocks, stack_size: int
) -> WaitSnapshot:
    """Read the blocked tasks, the locks they wait for, and their holders."""
    tasks = context.tasks
    rows = blocked_rows(context, now)
    blocked = {each.row: each for each in find_blocked(context, now, rows, stack_size)}
    spinning = {spin.row: spin for spin in spins(context, stack_size)}
    for row, spin in spinning.items():
        blocked[row] = Blocked(row, (spin.request,), caller=spin.caller)
    wanted: dict[Lock, Wanted] = {}
    for row, each in blocked.items():
        for request in each.requests:
            wanted.setdefault(request.lock, Wanted(request.lock)).rows.append(row)
    snapshot = WaitSnapshot(context, tasks, now, clocks, blocked, wanted)
    for want in wanted.values():
        if want.rows[0] in spinning:
            want.holders = spinning[want.rows[0]].holders
        else:
            _read_lock(context, want)
    return snapshot


def _read_lock(context: LockContext, want: Wanted) -> None:
    """Read the waiters of a lock, and the holders that it records."""
    try:
        queue = queue_of(context, want.lock)
        want.queue = None if queue is None else tuple(queue)
        want.holders = tuple(holders_of(context, want.lock))
        want.readers = readers_of(context, want.lock)
    except LOST as error:
        context.losses.lose(
            Loss.LOCKS, f"cannot read the owner or the waiters of a lock: {error}"
        )
