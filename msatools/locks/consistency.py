# SPDX-License-Identifier: LGPL-2.1-or-later

"""Keeps only the waits that did not change while a running kernel was read.

A snapshot takes many reads, and tasks run meanwhile. Two rules make it consistent:

- A task that slept from the first read until after the last one waited for one lock
  all the time, so the data of its wait is right. It has neither taken nor released a
  lock, so it owned the same locks all the time. So tasks that wait for each other and
  did not wake up are a deadlock, however long the reads took.
- An owner may run. It owned the lock at the moment the lock was read, if the same task
  is still in the table, and its memory is not another task's by now.

A lock may be handed to a task that still sleeps (futex_unlock_pi()): then that is the
lock that the task waits for. So cycles are read twice: see :func:`unconfirmed`.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from msatools.kernel.rows import NOT_FOUND, find_rows
from msatools.kernel.structs import Booleans
from msatools.locks.base.lock import Lock
from msatools.locks.graph import Edge
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted
from msatools.tasks.states import WAKING, asleep
from msatools.tasks.table import TaskTable

_IDENTITY = ("address", "pid", "start_ns")

_SWITCHED = (
    *_IDENTITY,
    *("state", "on_cpu", "nvcsw", "nivcsw", "sp", "last_arrival_ns"),
)
"""Columns of which some change when a task is switched.

The counters alone are not enough: a task that was woken up counts no switch until it
sleeps again, and sets the state of that sleep before.
"""


def concerned(snapshot: WaitSnapshot) -> list[int]:
    """Return the addresses of the tasks that have to be read again for :func:`held`."""
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

    :param again: The tasks of :func:`concerned`, read last.
    :param alone: Whether the table has only some tasks. Unknown tasks in a queue are
        kept then.
    """
    rested = _in_both(_off_cpu(snapshot.tasks), _off_cpu(again), _SWITCHED)
    there = _in_both(snapshot.tasks, again, _IDENTITY)
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

    Those that another CPU is about to make runnable (TASK_WAKING) are still in the
    queue. Those that were preempted have set their state and are in it, but wait for a
    CPU: unless one is known to be blocked, the report has no wait of it.
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
    """Return the addresses of all tasks that wait for each other."""
    addresses: list[int] = snapshot.tasks["address"].tolist()
    rows = {row for cycle in snapshot.graph.cycles for row in cycle.tasks}
    return [addresses[row] for row in sorted(rows)]


def unconfirmed(snapshot: WaitSnapshot, second: WaitSnapshot) -> list[Edge]:
    """
    Return the edges of cycles that a second snapshot lacks, or has less certain.

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
    """Return the snapshot without some owners of locks."""
    wrong = {(edge.lock, edge.owner) for edge in edges}
    wanted = {
        lock: replace(
            want, owners=tuple(o for o in want.owners if (lock, o.row) not in wrong)
        )
        for lock, want in snapshot.wanted.items()
    }
    return replace(snapshot, wanted=wanted)


def _link(snapshot: WaitSnapshot, edge: Edge) -> tuple[int, Lock, int]:
    """Return a key of an edge that is valid in both tables, by addresses of tasks."""
    addresses = snapshot.tasks["address"]
    return int(addresses[edge.waiter]), edge.lock, int(addresses[edge.owner])


def _off_cpu(tasks: TaskTable) -> TaskTable:
    return tasks.only(tasks["on_cpu"] == 0)


def _in_both(
    before: TaskTable, after: TaskTable, columns: tuple[str, ...]
) -> frozenset[int]:
    """Return the addresses of tasks that are the same in both tables."""
    addresses = before["address"]
    if not len(after):
        return frozenset()
    other = find_rows(after["address"], addresses)
    same = other != NOT_FOUND
    for column in columns:
        if before.has(column):
            same &= before[column] == after[column][other]
    return frozenset(addresses[same].tolist())
