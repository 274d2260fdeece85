# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reports of msa-locks for the lab's dumps, with the guests' records."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from fixtures import lab
from msatools.locks.locks import collect_locks
from msatools.locks.report import LockRow, LocksReport, Wait
from tests.locks.seen import Truth
from tests.support.dumps import open_dump


@dataclass
class LoggedReport:
    """A report and the run that it is of."""

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
        """The locks that the guest recorded, by their names in the lab."""
        return {truth["name"]: truth for truth in self.run.workload["locks"]}

    def of(self, truth: Truth) -> LockRow:
        """Return the reported lock of a recorded lock's waiters."""
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
def logged_report(name: str, types: str = "btf") -> LoggedReport:
    return LoggedReport(lab.build(name), collect_locks(open_dump(name, types)))
