# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits that changed while a running kernel was read are left out."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.locks.graph import Owned
from msatools.locks.lock_types import Blocked
from msatools.locks.locks import concerned, held, in_circles, unconfirmed, without_edges
from msatools.locks.report import Lock, OwnerConfidence, QueuedWaiter, Request
from msatools.locks.wait_snapshot import BRIEF_NS, WaitSnapshot, Wanted
from msatools.tasks.sampler import TaskState
from msatools.tasks.table import TaskTable

TASK = 0xFFFF888000100000
"""Address of the first task; the others follow."""

COLUMNS = (
    *("address", "pid", "start_ns", "state", "on_cpu", "nvcsw", "nivcsw", "sp"),
    *("last_arrival_ns", "exit_state", "on_rq", "sched_delayed"),
)
AB, BC = Lock("mutex", 0xFFFF888000002000), Lock("mutex", 0xFFFF888000003000)


def address(row: int) -> int:
    return TASK + 0x2000 * row


def table(count: int = 4, **changed: dict[int, int]) -> TaskTable:
    """Make sleeping tasks.

    :param changed: column -> row -> other value
    """
    records = np.zeros(count, [(name, "u8") for name in COLUMNS])
    records["address"] = [address(row) for row in range(count)]
    records["pid"] = np.arange(count) + 1
    records["state"] = 2
    for name in ("start_ns", "nvcsw", "nivcsw", "sp", "last_arrival_ns"):
        records[name] = 7
    for name, values in changed.items():
        for row, value in values.items():
            records[name][row] = value
    return TaskTable(records, frozenset(COLUMNS))


def owned(row: int, confidence: OwnerConfidence = "exact") -> Owned:
    return Owned(row, confidence, seen=confidence == "evidence", firm=True)


def snapshot(
    waits: dict[int, Lock],
    owners: dict[Lock, list[Owned]],
    queue: tuple[int, ...] | None = None,
    tasks: TaskTable | None = None,
) -> WaitSnapshot:
    tasks = tasks or table()
    wanted = {}
    for lock in dict.fromkeys(waits.values()):
        rows = [row for row, own in waits.items() if own == lock]
        wanted[lock] = Wanted(lock, rows, owners=tuple(owners.get(lock, ())))
        wanted[lock].queue = (
            tuple(QueuedWaiter(task) for task in queue) if queue else None
        )
    now: Any = TaskState(
        classes=np.zeros(len(tasks), np.uint8),
        age_ns=np.full(len(tasks), 10**10),
        age_bound=np.zeros(len(tasks), np.uint8),
        stacks=None,  # type: ignore[arg-type]
        waits=(),
    )
    blocked = {row: Blocked(row, (Request(lock),)) for row, lock in waits.items()}
    nothing: Any = None
    return WaitSnapshot(nothing, tasks, now, nothing, blocked, wanted)


def owners_of(found: WaitSnapshot, lock: Lock) -> list[int]:
    return [own.row for own in found.wanted[lock].owners]


def deadlocks(found: WaitSnapshot) -> list[frozenset[int]]:
    return [cycle.tasks for cycle in found.graph.cycles]


# The first two tasks wait for each other's lock.
WAITS = {0: AB, 1: BC}
OWNERS = {AB: [owned(1)], BC: [owned(0)]}


def test_unchanged_waits_are_kept() -> None:
    before = snapshot(WAITS, OWNERS)
    assert concerned(before) == [address(0), address(1)]
    kept = held(before, table(), alone=False)
    assert (kept.blocked, kept.wanted) == (before.blocked, before.wanted)
    assert kept.moved == frozenset()
    assert deadlocks(kept) == [frozenset((0, 1))]


@pytest.mark.parametrize("column", COLUMNS[1:-3])
def test_wait_of_a_task_that_ran_is_left_out(column: str) -> None:
    """Its deadlocks are left out as well: it can have released its lock."""
    again = table(**{column: {1: 1}})
    kept = held(snapshot(WAITS, OWNERS), again, alone=False)
    assert set(kept.blocked) == {0}
    assert BC not in kept.wanted
    assert deadlocks(kept) == []


def test_task_that_is_about_to_sleep_again() -> None:
    """It has set its state, but no switch is counted: it can have acquired its lock."""
    tasks = table(on_cpu={1: 1})
    kept = held(snapshot(WAITS, OWNERS, tasks=tasks), tasks, alone=False)
    assert set(kept.blocked) == {0}
    assert deadlocks(kept) == []


@pytest.mark.parametrize(
    ("changed", "queued"),
    [
        ({"on_rq": {2: 1}}, (0,)),
        ({"on_rq": {2: 1}, "sched_delayed": {2: 1}}, (0, 2)),
        ({"on_rq": {0: 1}}, (0, 2)),
        ({"state": {2: 0x200}}, (0,)),
    ],
)
def test_waiter_that_was_preempted_or_is_being_woken(
    changed: dict[str, dict[int, int]], queued: tuple[int, ...]
) -> None:
    """It counts as a waiter only if it has a wait, as the first task has."""
    tasks = table(**changed)
    before = snapshot({0: AB}, {}, queue=(address(0), address(2)), tasks=tasks)
    kept = held(before, tasks, alone=False)
    assert [waiter.task for waiter in kept.wanted[AB].queue or ()] == [
        address(row) for row in queued
    ]


@pytest.mark.parametrize(
    ("age_ns", "closed"), [(BRIEF_NS, True), (BRIEF_NS - 1, False)]
)
def test_stack_of_a_task_that_slept_only_briefly(age_ns: int, closed: bool) -> None:
    """Its evidence can be of a released lock, and closes no cycle."""
    made = snapshot(WAITS, {AB: [owned(1)], BC: [owned(0, "evidence")]})
    made.now.age_ns[0] = age_ns
    assert bool(deadlocks(made)) == closed


def test_wait_for_any_of_several_locks_has_no_edge() -> None:
    """It is unknown which of the locks it will get."""
    made = snapshot({0: AB, 1: BC}, {AB: [owned(2)], BC: [owned(3)]})
    made.blocked[0] = Blocked(0, (Request(AB), Request(BC)))
    assert [(edge.waiter, edge.owner) for edge in made.graph.edges] == [(1, 3)]


def test_task_that_has_exited() -> None:
    again = table()
    again = again.only(again["pid"] != 2)
    kept = held(snapshot(WAITS, OWNERS), again, alone=False)
    assert set(kept.blocked) == {0}
    assert owners_of(kept, AB) == []


def test_owner_need_not_sleep() -> None:
    """An owner that ran is kept if the lock records it, not if its stack does."""
    before = snapshot({0: AB, 3: BC}, {AB: [owned(1)], BC: [owned(2, "evidence")]})
    assert concerned(before) == [address(row) for row in range(4)]
    kept = held(before, table(nvcsw={1: 8, 2: 8}), alone=False)
    assert owners_of(kept, AB) == [1]
    assert owners_of(kept, BC) == []
    assert kept.moved == {1}


def test_owner_whose_task_struct_is_reused() -> None:
    before = snapshot({0: AB}, {AB: [owned(1)]})
    kept = held(before, table(pid={1: 9}, start_ns={1: 8}), alone=False)
    assert set(kept.blocked) == {0}
    assert owners_of(kept, AB) == []


@pytest.mark.parametrize("alone", [False, True])
def test_queue_keeps_unchanged_waiters(alone: bool) -> None:
    """Waiters that are not in the table are kept only if it has selected tasks."""
    unknown = address(77)
    queue = (address(0), address(1), unknown, address(2))
    before = snapshot({0: AB, 1: AB}, {}, queue)
    assert concerned(before) == [address(0), address(1), address(2)]
    kept = held(before, table(nvcsw={1: 8}), alone=alone)
    left = [waiter.task for waiter in kept.wanted[AB].queue or ()]
    between = [unknown] if alone else []
    assert left == [address(0), *between, address(2)]


def test_queue_loses_woken_waiters() -> None:
    tasks = table(state={2: 0})
    before = snapshot({0: AB}, {}, (address(0), address(2)), tasks)
    kept = held(before, tasks, alone=False)
    assert kept.wanted[AB].queue == (QueuedWaiter(address(0)),)


# --- a second snapshot of cycles in the first


def second_snapshot(owners: dict[Lock, list[Owned]]) -> WaitSnapshot:
    """Return a second snapshot of the two tasks in the cycle, as rows 1 and 0."""
    tasks = table(2)
    swapped = TaskTable(tasks.records[::-1].copy(), tasks.columns)
    return snapshot({1: AB, 0: BC}, owners, tasks=swapped)


def test_cycle_in_both_snapshots_is_confirmed() -> None:
    first = snapshot({**WAITS, 2: AB, 3: AB}, OWNERS)
    assert in_circles(first) == [address(0), address(1)]
    assert unconfirmed(first, second_snapshot({AB: [owned(0)], BC: [owned(1)]})) == []


@pytest.mark.parametrize(
    "owners",
    [
        {AB: [owned(0)]},
        {BC: [owned(1)]},
        {AB: [owned(0)], BC: [owned(1, "likely")]},
        # Each seems to own the lock that it waits for.
        {AB: [owned(1)], BC: [owned(0)]},
    ],
)
def test_cycle_in_one_snapshot_is_left_out(owners: dict[Lock, list[Owned]]) -> None:
    first = snapshot(WAITS, OWNERS)
    left = without_edges(first, unconfirmed(first, second_snapshot(owners)))
    assert deadlocks(left) == []
    assert set(left.blocked) == {0, 1}


def test_lock_handed_to_its_waiter() -> None:
    """futex_unlock_pi() sets the new owner before it wakes it."""
    first = snapshot({0: AB, 1: AB}, {AB: [owned(0)]})
    assert deadlocks(first) == [frozenset((0,))]
    again = snapshot({}, {}, tasks=table(1))
    left = without_edges(first, unconfirmed(first, again))
    assert deadlocks(left) == []
    kept = held(left, table(on_cpu={0: 1}, state={0: 0}), alone=False)
    assert set(kept.blocked) == {1}
    assert replace(kept.wanted[AB], queue=None) == Wanted(AB, [1])
