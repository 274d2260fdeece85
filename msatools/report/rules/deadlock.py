# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks wait for each other, and the kernel records all owners."""

from collections.abc import Callable, Iterator

from msgspec import Struct

from msatools.locks.report import Deadlock, DeadlockConfidence, LocksReport, Owner, Wait
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import DOUBTS, count_text
from msatools.report.words import tasks_text as names_text

_NAMED = 4


class DeadlockSubject(Struct, frozen=True):
    """A deadlock, and the report that has its tasks and locks."""

    deadlock: Deadlock
    locks: LocksReport

    @property
    def waits(self) -> list[Wait]:
        """The waits of its tasks."""
        pids = {*self.deadlock.pids}
        return [wait for wait in self.locks.waits if wait.pid in pids]


def deadlocks(
    confidence: DeadlockConfidence,
) -> Callable[[ReportParts], Iterator[DeadlockSubject]]:
    """Return the condition for a deadlock of that confidence."""

    def when(parts: ReportParts) -> Iterator[DeadlockSubject]:
        assert parts.locks is not None
        for deadlock in parts.locks.deadlocks:
            if deadlock.confidence == confidence:
                yield DeadlockSubject(deadlock, parts.locks)

    return when


def tasks_text(subject: DeadlockSubject) -> str:
    """Return the number and the names of the tasks."""
    names = {wait.pid: wait.comm for wait in subject.locks.waits}
    pids = subject.deadlock.pids
    named = names_text(((pid, names.get(pid)) for pid in pids), _NAMED)
    return f"{count_text(len(pids), 'task')} ({named})"


def evidence(subject: DeadlockSubject) -> Iterator[str]:
    """Yield who waits for which lock, and who else is behind."""
    locks = {lock.id: lock for lock in subject.locks.locks}
    for pid, lock_id in zip(
        subject.deadlock.pids, subject.deadlock.locks, strict=False
    ):
        lock = locks.get(lock_id)
        name = "" if lock is None else lock.name or ""
        # "threads of 7", "on the stack of 7": some names say what the ID does.
        kind = lock_id.partition(" ")[0]
        name = f" ({name.removeprefix(f'{kind} ')})" if name else ""
        owners = ", ".join(map(_owner, lock.owners)) if lock else ""
        yield f"pid {pid} waits for {lock_id}{name}; owner {owners or '-'}"


def _owner(owner: Owner) -> str:
    return f"pid {owner.pid} ({DOUBTS[owner.confidence] or 'exact'})"


def see(subject: DeadlockSubject) -> tuple[str, ...]:
    """Return the command that shows deadlocks first, with stacks.

    Tasks that are named by ``-p`` are looked up without all that others own.
    """
    return ("locks", "--stacks")


def _words(subject: DeadlockSubject) -> str:
    alone = len(subject.deadlock.pids) == 1
    how = "waits for itself" if alone else "wait for each other"
    return f"{tasks_text(subject)} {how}"


RULE = VerdictRule(
    code="deadlock",
    needs=("locks",),
    when=deadlocks("exact"),
    severity="critical",
    confidence="exact",
    words=_words,
    evidence=evidence,
    see=see,
)
