# SPDX-License-Identifier: LGPL-2.1-or-later

"""What tasks wait for that nobody takes, and what the guest says of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from drgn import Program

from fixtures import lab
from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.locks.cases import read_cases
from msatools.locks.events import events
from msatools.locks.layout import Layout
from msatools.locks.lock import Lock, Request
from msatools.locks.look import Case, Look
from msatools.tasks.classes import TaskClass
from msatools.tasks.now import collect_now
from msatools.tasks.stackmemory import stack_bytes
from msatools.tasks.stacks import StackCollector
from msatools.tasks.table import TaskReader
from tests.support.dumps import open_dump

TYPES = ("completion", "wait_queue", "folio", "bit_wait")
MODULE = ("lockmodule-6.1", "lockmodule-6.12")
STOCK = ("locks-6.1", "locks-6.12")
TASKS = ("tasks-6.1", "tasks-6.12")


@dataclass
class Waits:
    run: lab.Run
    look: Look
    findings: Findings
    cases: dict[int, Case]
    """Of all that sleep, by thread ID."""

    requests: dict[int, Request]

    def pids(self, tasks: list[int]) -> list[int | None]:
        return [self.look.pid(task) for task in tasks]

    def queue(self, lock: Lock) -> list[int | None] | None:
        queued = events.queue(self.look, lock)
        return None if queued is None else self.pids([one.task for one in queued])

    def holders(self, lock: Lock) -> list[tuple[int | None, str]]:
        found = events.holders(self.look, lock)
        return [(self.look.pid(one.task), one.confidence) for one in found]

    def what(self, pid: int) -> str | None:
        return events.what(self.look, self.cases[pid], self.requests[pid].lock)

    def locks(self, *types: str) -> list[dict[str, Any]]:
        """What the guest says of locks of some types."""
        said: list[dict[str, Any]] = self.run.workload["locks"]
        return [lock for lock in said if lock["type"] in types]

    def named(self, name: str) -> int:
        """The thread ID of a task of the scenario ``tasks``."""
        return int(self.run.workload["tasks"][name]["tid"])


def look_for(prog: Program, name: str, alone: str | None = None) -> Waits:
    """Look at all tasks of a dump, or at a named one only."""
    reader, aside, findings = Reader(prog), Findings(), Findings()
    run = lab.build(name)
    table = TaskReader(reader).read_all(aside)
    if alone is not None:
        tid = run.workload["tasks"][alone]["tid"]
        (address,) = table["address"][table["pid"] == tid].tolist()
        table = TaskReader(reader).read([address], aside)
    clocks = read_clocks(reader, aside)
    now = collect_now(StackCollector(reader, aside), prog, table, clocks)
    look = Look(Layout(reader), table, findings, clocks, alone=alone is not None)
    rows = np.flatnonzero(now.classes != TaskClass.ZMB)
    found = list(read_cases(look, now, rows, stack_bytes(prog)))
    cases = {int(table["pid"][case.row]): case for case in found}
    asked = {pid: events.request(look, case) for pid, case in cases.items()}
    requests = {pid: one for pid, one in asked.items() if one is not None}
    return Waits(run, look, findings, cases, requests)


@lru_cache(maxsize=2)
def waits(name: str, types: str = "btf") -> Waits:
    return look_for(open_dump(name, types), name)


def check_locks(seen: Waits, type_: str, check: Callable[..., None]) -> int:
    """
    Hold all locks of a type against what the guest says: waiters and their order.

    :param check: Called with each lock as the guest has it and as it was found.
    :return: How many there are.
    """
    said = seen.locks(type_)
    for lock in said:
        pids = [waiter["pid"] for waiter in lock["waiters"]]
        found = {seen.requests[pid].lock for pid in pids}
        assert len(found) == 1, lock["name"]
        (one,) = found
        assert one.type == type_
        if lock["address"] is not None:
            assert one.address == int(lock["address"], 16)
        assert seen.queue(one) == pids, lock["name"]
        check(lock, one)
    return len(said)
