# SPDX-License-Identifier: LGPL-2.1-or-later

"""Sleeping locks of the lab's module: waiters, order, modes, owners, addresses."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from fixtures import lab
from msatools.kernel.clocks import Clocks, read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.locks.cases import read_cases
from msatools.locks.layout import Layout
from msatools.locks.lock import Lock, Request
from msatools.locks.look import Case, Look
from msatools.locks.sleeping import sleeplocks
from msatools.tasks.now import Now, collect_now
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader, TaskTable
from tests.support.dumps import open_dump

DUMPS = list(product(("lockmodule-6.1", "lockmodule-6.12"), ("btf", "dwarf")))

# Whom no word of the lock names: readers but the last, who has a semaphore, who is
# inside a percpu_rwsem, and a last reader that has gone.
NOT_NAMED = {
    *("semaphore", "semaphore-of-two", "percpu-written", "percpu-read", "stale-rwsem"),
}


@dataclass
class Dump:
    run: lab.Run
    look: Look
    now: Now
    clocks: Clocks
    cases: dict[int, Case]
    """By thread ID."""

    requests: dict[int, Request]

    @property
    def locks(self) -> list[dict[str, Any]]:
        """Those that are told here."""
        locks: list[dict[str, Any]] = self.run.workload["locks"]
        return [lock for lock in locks if lock["type"] in sleeplocks.TYPES]

    def lock(self, name: str) -> Lock:
        (found,) = (lock for lock in self.locks if lock["name"] == name)
        return Lock(found["type"], int(found["address"], 16))

    def pid(self, task: int) -> int:
        row = np.flatnonzero(self.look.tasks["address"] == np.uint64(task))
        return int(self.look.tasks["pid"][row[0]])

    def alone(self, pid: int) -> tuple[Look, Case]:
        """Look at one thread only."""
        table = self.look.tasks
        row = int(np.flatnonzero(table["pid"] == pid)[0])
        one = TaskReader(self.look.reader).read(
            [int(table["address"][row])], Findings()
        )
        return look_at(self.look.reader, one)[0], replace(self.cases[pid], row=0)


def look_at(reader: Reader, table: TaskTable) -> tuple[Look, Now, Clocks]:
    aside = Findings()
    clocks = read_clocks(reader, aside)
    now = collect_now(StackCollector(reader, aside), reader.prog, table, clocks)
    alone = len(table) == 1
    return Look(Layout(reader), table, Findings(), clocks, alone), now, clocks


@lru_cache(maxsize=1)
def opened(name: str, types: str) -> Dump:
    prog = open_dump(name, types)
    reader = Reader(prog)
    look, now, clocks = look_at(reader, TaskReader(reader).read_all(Findings()))
    rows = np.arange(len(look.tasks))
    cases = {
        int(look.tasks["pid"][case.row]): case
        for case in read_cases(look, now, rows, stack_bytes(prog))
    }
    found = {pid: sleeplocks.request(look, case) for pid, case in cases.items()}
    requests = {pid: request for pid, request in found.items() if request}
    return Dump(lab.build(name), look, now, clocks, cases, requests)


@pytest.fixture(scope="module", params=DUMPS, ids="-".join)
def dump(request: pytest.FixtureRequest) -> Dump:
    return opened(*request.param)


def test_what_every_thread_waits_for(dump: Dump) -> None:
    """All that wait for one, and no others."""
    expected = {
        waiter["pid"]: Request(dump.lock(lock["name"]), waiter["mode"])
        for lock in dump.locks
        for waiter in lock["waiters"]
    }
    assert dump.requests == expected
    assert len(expected) > 30
    assert {request.lock.type for request in expected.values()} == sleeplocks.TYPES


def test_the_order_of_waiters(dump: Dump) -> None:
    for lock in dump.locks:
        queue = sleeplocks.queue(dump.look, dump.lock(lock["name"]))
        assert queue is not None, lock["name"]
        found = [(dump.pid(waiter.task), waiter.mode) for waiter in queue]
        should = [(waiter["pid"], waiter["mode"]) for waiter in lock["waiters"]]
        assert found == should, lock["name"]


def test_owners(dump: Dump) -> None:
    """Those that have a lock for themselves are exact; the last reader is likely."""
    for lock in dump.locks:
        name = lock["name"]
        held = sleeplocks.holders(dump.look, dump.lock(name))
        found = [(dump.pid(holder.task), holder.confidence) for holder in held]
        if name == "percpu-read":
            # The writer keeps all others out while it waits for the reader.
            assert found == [(lock["waiters"][0]["pid"], "exact")]
        elif name == "stale-rwsem":
            # It names the last that came, which has gone; who stays is not named.
            assert lock["owners"][0]["pid"] not in dict(found)
            assert [confidence for _, confidence in found] == ["likely"]
        elif name in NOT_NAMED:
            assert found == []
        elif lock["readers"]:
            assert found == [(lock["owners"][-1]["pid"], "likely")], name
        else:
            assert found == [(lock["owners"][0]["pid"], "exact")], name


def test_readers(dump: Dump) -> None:
    counted = 0
    for lock in dump.locks:
        found = sleeplocks.readers(dump.look, dump.lock(lock["name"]))
        if lock["type"] in ("rwsem", "percpu_rwsem"):
            assert found == lock["readers"], lock["name"]
            counted += found or 0
        else:
            assert found is None
    assert counted > 5


def test_nothing_is_lost(dump: Dump) -> None:
    assert not dump.look.findings.lost
    assert not dump.look.findings.notes


def test_one_thread_alone(dump: Dump) -> None:
    """Others than it need not be in the table of tasks."""
    for pid, request in dump.requests.items():
        look, case = dump.alone(pid)
        assert sleeplocks.request(look, case) == request
        queue = sleeplocks.queue(look, request.lock)
        assert queue == sleeplocks.queue(dump.look, request.lock)
        assert sleeplocks.holders(look, request.lock) == sleeplocks.holders(
            dump.look, request.lock
        )
        assert not look.findings.lost
