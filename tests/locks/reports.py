# SPDX-License-Identifier: LGPL-2.1-or-later

"""What msa-locks reports of the lab's dumps, beside what was logged in the guests."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from fixtures import lab
from msatools.locks.locks import collect_locks
from msatools.locks.report import LockRow, LocksReport, Wait
from tests.locks.seen import Truth
from tests.support.dumps import open_dump


@dataclass
class Told:
    run: lab.Run
    report: LocksReport

    @cached_property
    def waits(self) -> dict[int, Wait]:
        return {wait.pid: wait for wait in self.report.waits}

    @cached_property
    def locks(self) -> dict[str, LockRow]:
        return {lock.id: lock for lock in self.report.locks}

    @property
    def truths(self) -> dict[str, Truth]:
        """The locks that were logged, by the name that the lab has for each."""
        return {truth["name"]: truth for truth in self.run.workload["locks"]}

    def of(self, truth: Truth) -> LockRow:
        """The lock that those are said to wait for who do so in truth."""
        pids = [waiter["pid"] for waiter in truth["waiters"]]
        ids = {id_ for pid in pids for id_ in self.ids(pid)}
        found = [self.locks[id_] for id_ in ids if self.is_at(truth, self.locks[id_])]
        assert len(found) == 1, (truth["name"], ids)
        return found[0]

    def ids(self, pid: int) -> tuple[str, ...]:
        wait = self.waits[pid]
        return wait.any_of or ((wait.lock,) if wait.lock else ())

    @staticmethod
    def is_at(truth: Truth, lock: LockRow) -> bool:
        address = truth.get("condition") or truth["address"]
        if address is None or lock.address is None:
            return True
        same: bool = hex(lock.address) == address
        return same


@lru_cache(maxsize=8)
def told(name: str, types: str = "btf") -> Told:
    return Told(lab.build(name), collect_locks(open_dump(name, types)))
