# SPDX-License-Identifier: LGPL-2.1-or-later

"""What of a scene held all the while that it was looked at, on a kernel that runs.

A look takes many reads, and tasks go on meanwhile. Two things make one moment of it:

- A task that slept from the first read until after the last has waited for one thing
  all the time, so what was read of its wait in between is right. Nor has it taken or
  given back any lock: whatever it was seen to have, it had all the time. Tasks that
  wait for each other and did not wake up are a deadlock, then, however long the look
  took.
- An owner need not sleep. It is one as of the moment that the lock was read, if it is
  the task that is in the table still, and no other that has its memory now.

A lock may be handed to one who sleeps still (futex_unlock_pi()): that lock is the one
it waits for. So what looks like a circle is looked at twice: :func:`unconfirmed`.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from msatools.locks.base.lock import Lock
from msatools.locks.graph import Edge
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted
from msatools.tasks.states import asleep
from msatools.tasks.table import TaskTable

_IDENTITY = ("address", "pid", "start_ns")

_SWITCHED = (
    *_IDENTITY,
    *("state", "on_cpu", "nvcsw", "nivcsw", "sp", "last_arrival_ns"),
)
"""What changes when a task is switched.

Counters alone do not tell: who was woken up counts no switch until it sleeps again, and
has set its state to that of the next sleep before.
"""


def concerned(scene: WaitSnapshot) -> list[int]:
    """Give the addresses of tasks that a scene tells of: :func:`held` needs them."""
    of_table: list[int] = scene.tasks["address"].tolist()
    rows = set(scene.blocked)
    for want in scene.wanted.values():
        rows.update(own.row for own in want.owners)
        queued = (scene.rows.get(each.task) for each in want.queue or ())
        rows.update(row for row in queued if row is not None)
    return [of_table[row] for row in sorted(rows)]


def held(scene: WaitSnapshot, again: TaskTable, *, alone: bool) -> WaitSnapshot:
    """
    Leave out who has not stayed blocked, and owners that are no more.

    :param again: The tasks that the scene tells of, read after all else.
    :param alone: Whether the table has but a few tasks: of others in a queue nothing
        is known, and they are kept.
    """
    rested = _in_both(_off_cpu(scene.tasks), _off_cpu(again), _SWITCHED)
    there = _in_both(scene.tasks, again, _IDENTITY)
    addresses: list[int] = scene.tasks["address"].tolist()
    gone = {row for row in scene.blocked if addresses[row] not in rested}

    # Who was woken up is as good as out of the queue.
    sleeping = set(scene.tasks.only(asleep(scene.tasks))["address"].tolist()) & rested

    def keep(want: Wanted) -> Wanted:
        queue = None
        if want.queue is not None:
            queue = tuple(
                each
                for each in want.queue
                if each.task in sleeping or (alone and each.task not in scene.rows)
            )
        # Nor does the stack of one who has run in between tell anything.
        owners = tuple(
            own
            for own in want.owners
            if addresses[own.row] in (rested if own.confidence == "evidence" else there)
        )
        return replace(want, queue=queue, owners=owners)

    kept = scene.without(gone)
    wanted = {lock: keep(want) for lock, want in kept.wanted.items()}
    owners = {own.row for want in wanted.values() for own in want.owners}
    moved = {row for row in owners if addresses[row] not in rested}
    return replace(kept, wanted=wanted, moved=frozenset(moved))


def in_circles(scene: WaitSnapshot) -> list[int]:
    """Give the addresses of tasks that wait for each other, all that do."""
    addresses: list[int] = scene.tasks["address"].tolist()
    rows = {row for cycle in scene.graph.cycles for row in cycle.tasks}
    return [addresses[row] for row in sorted(rows)]


def unconfirmed(scene: WaitSnapshot, second: WaitSnapshot) -> list[Edge]:
    """
    Give what closes circles by the first look only, or is less sure by the second.

    :param second: Another look at those of :func:`in_circles`.
    """
    confirmed = {_link(second, edge): edge.confidence for edge in second.graph.edges}
    inside = [
        edge
        for cycle in scene.graph.cycles
        for edge in scene.graph.edges
        if edge.waiter in cycle.tasks and edge.owner in cycle.tasks
    ]
    return [
        edge
        for edge in inside
        if (found := confirmed.get(_link(scene, edge))) is None
        or (edge.confidence == "exact" and found != "exact")
    ]


def without_edges(scene: WaitSnapshot, edges: Iterable[Edge]) -> WaitSnapshot:
    """Give the scene without some owners of locks."""
    wrong = {(edge.lock, edge.owner) for edge in edges}
    wanted = {
        lock: replace(
            want, owners=tuple(o for o in want.owners if (lock, o.row) not in wrong)
        )
        for lock, want in scene.wanted.items()
    }
    return replace(scene, wanted=wanted)


def _link(scene: WaitSnapshot, edge: Edge) -> tuple[int, Lock, int]:
    """Tell an edge by what does not depend on the table: the addresses of tasks."""
    addresses = scene.tasks["address"]
    return int(addresses[edge.waiter]), edge.lock, int(addresses[edge.owner])


def _off_cpu(tasks: TaskTable) -> TaskTable:
    return tasks.only(tasks["on_cpu"] == 0)


def _in_both(
    before: TaskTable, after: TaskTable, columns: tuple[str, ...]
) -> frozenset[int]:
    """Give the addresses of tasks of which two looks say the same."""
    addresses = before["address"]
    if not len(after):
        return frozenset()
    order = np.argsort(after["address"])
    places = np.searchsorted(after["address"][order], addresses)
    other = order[np.minimum(places, len(order) - 1)]
    same = np.ones(len(before), np.bool_)
    for column in columns:
        if before.has(column):
            same &= before[column] == after[column][other]
    return frozenset(addresses[same].tolist())
