# SPDX-License-Identifier: LGPL-2.1-or-later

"""Crowds, stacks and priorities of a snapshot, of tasks made by hand."""

from types import SimpleNamespace
from typing import Any

import drgn
import numpy as np

from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.lock_types import Blocked
from msatools.locks.ownership import seen_on_stacks
from msatools.locks.report import Lock, Request
from msatools.locks.report_builder import urgency
from msatools.locks.wait_snapshot import WaitSnapshot, Wanted
from msatools.tasks.table import TaskTable

STACK = 0xFFFF_C900_0000_0000
STACK_BYTES = 0x4000
USED = 64
LOCK = 0xFFFF_8880_0000_2000


def table(**columns: list[int]) -> TaskTable:
    (count,) = {len(values) for values in columns.values()}
    records = np.zeros(
        count,
        [
            (name, "u8" if max(values) >> 63 else "i8")
            for name, values in columns.items()
        ],
    )
    for name, values in columns.items():
        records[name] = values
    return TaskTable(records, frozenset(columns))


def test_waiters_of_one_futex_are_one_crowd_by_whatever_key() -> None:
    private, shared = Lock("futex", 0x1000, 1), Lock("futex", 0x1000, 2)
    other = Lock("futex", 0x2000, 1)
    waits = {0: private, 1: shared, 2: private, 3: other}
    wanted = {
        lock: Wanted(lock, [row for row, of in waits.items() if of == lock])
        for lock in (private, shared, other)
    }
    blocked = {row: Blocked(row, (Request(lock),)) for row, lock in waits.items()}
    nothing: Any = None
    snapshot = WaitSnapshot(
        nothing, table(tgid=[7, 7, 7, 7]), nothing, nothing, blocked, wanted
    )
    crowds = {want.lock: want.rows for want in snapshot.crowds}
    assert [sorted(rows) for rows in crowds.values()] == [[0, 1, 2], [3]]
    of_first, of_second = (snapshot.crowd_lock(wanted[of]) for of in (private, shared))
    assert of_first == of_second
    assert of_first in crowds


def test_stacks_that_cannot_be_read_are_not_searched() -> None:
    stacks = [STACK, STACK + STACK_BYTES, STACK + 2 * STACK_BYTES]
    sps = [stack + STACK_BYTES - USED for stack in stacks]
    tasks = table(stack=stacks, sp=sps, on_cpu=[0, 0, 0], exit_state=[0, 0, 0])
    words = np.zeros(USED // 8, np.uint64)
    words[3] = LOCK

    def read(address: int, size: int, physical: bool) -> bytes:
        if address == sps[1]:
            raise drgn.FaultError("not in the dump", address)
        return words.tobytes() if address == sps[2] else bytes(size)

    prog: Any = SimpleNamespace(flags=drgn.ProgramFlags.IS_LIVE, cache={}, read=read)
    reader = Reader(prog)
    losses = LossLog()
    rows = np.arange(3)
    seen = seen_on_stacks(reader, tasks, rows, [LOCK], STACK_BYTES, losses)
    assert seen == {LOCK: [2]}
    assert losses.coverage["stacks_searched"] == 2


def test_urgency_is_by_class_and_real_time_priority() -> None:
    """Of a deadline task, two real-time ones, nice -20, 0 and 19, and SCHED_IDLE."""
    prio = [-1, 9, 50, 100, 120, 139, 120]
    policy = [6, 1, 2, 0, 0, 0, 5]
    ranks = urgency(table(prio=prio, policy=policy)).tolist()
    assert ranks[3] == ranks[4] == ranks[5]
    assert ranks[:4] == sorted(set(ranks[:4]))
    assert ranks[4] < ranks[6]


def test_owner_that_was_boosted_is_as_urgent_as_its_waiter() -> None:
    """Priority inheritance sets the priority, not the policy."""
    boosted, waiter = urgency(table(prio=[50, 50], policy=[5, 1])).tolist()
    assert boosted == waiter
