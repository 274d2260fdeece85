# SPDX-License-Identifier: LGPL-2.1-or-later

"""The waits-for graph of a report: lookups from waiter to owner and back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from msgspec import Struct

from msatools.locks.report import LockRow, LocksReport, Owner, Root, Wait

_IDLE = frozenset({"futex", "wait_queue"})
"""Types of locks that idle tasks wait on; they have no owner."""

_SUREST_FIRST = ("exact", "likely", "evidence")


def surest_first(owners: Iterable[Owner]) -> list[Owner]:
    """Return owners in the order of their confidence."""
    return sorted(owners, key=lambda owner: _SUREST_FIRST.index(owner.confidence))


class HeldLock(Struct, frozen=True):
    """A lock that has waiters, and one of its owners."""

    lock: LockRow
    owner: Owner


class Step(Struct, frozen=True):
    """A step from a waiter to the owner of its lock."""

    lock: LockRow
    owner: Owner | None
    """An owner with the best confidence; ``None`` if no owner is known."""

    others: int
    """Number of further owners."""


class WaitGraph:
    """The waits-for graph of a report."""

    def __init__(self, report: LocksReport) -> None:
        self.waits: Mapping[int, Wait] = {wait.pid: wait for wait in report.waits}
        self.locks: Mapping[str, LockRow] = {lock.id: lock for lock in report.locks}
        self.roots: Mapping[int, Root] = {
            root.pid: root
            for root in report.roots
            if root.kind == "task" and root.pid is not None
        }
        """Roots that are tasks, by PID."""

        self._outside = {
            root.lock: root for root in report.roots if root.lock is not None
        }
        self._served = {
            pid: root
            for root in report.roots
            if root.kind == "external"
            for pid in root.waiters
        }
        self._idle: dict[str, bool] = {}
        self.held: dict[int, list[HeldLock]] = {}
        """Locks with waiters that each task owns, in the report's order."""

        self._comms = {wait.pid: wait.comm for wait in report.waits}
        for lock in report.locks:
            for owner in lock.owners:
                self.held.setdefault(owner.pid, []).append(HeldLock(lock, owner))
                self._comms.setdefault(owner.pid, owner.comm)
        for root in report.roots:
            if root.pid is not None and root.comm is not None:
                self._comms.setdefault(root.pid, root.comm)

    def comm(self, pid: int) -> str | None:
        """Return a task's name, if the report has it."""
        return self._comms.get(pid)

    def wanted(self, wait: Wait) -> list[LockRow]:
        """Return the lock that a task waits for, or several if any of them will do."""
        ids = wait.any_of or ((wait.lock,) if wait.lock is not None else ())
        return [self.locks[lock] for lock in ids if lock in self.locks]

    def is_idle(self, lock: LockRow) -> bool:
        """Return whether the waiters of a lock seem to be idle workers."""
        if lock.id not in self._idle:
            self._idle[lock.id] = self._is_idle(lock)
        return self._idle[lock.id]

    def _is_idle(self, lock: LockRow) -> bool:
        return (
            lock.type in _IDLE
            and not lock.owners
            and lock.what is None
            and all(self._idles(pid) for pid in lock.waiters)
        )

    def _idles(self, pid: int) -> bool:
        wait = self.waits.get(pid)
        return pid not in self.held and (wait is None or wait.state != "D")

    def stack(self, pid: int) -> tuple[str, ...] | None:
        """Return a task's stack, if the report has it."""
        if (wait := self.waits.get(pid)) is not None:
            return wait.stack
        root = self.roots.get(pid)
        return None if root is None else root.stack

    def end(self, pid: int) -> Root | None:
        """Return the root that a task is, or that it waits for directly."""
        if pid in self.roots:
            return self.roots[pid]
        wait = self.waits.get(pid)
        lock = wait.lock if wait is not None else None
        return self._outside.get(lock or "") or self._served.get(pid)

    def step(self, pid: int) -> Step | None:
        """Return the lock that a task waits for, and its surest owner."""
        wait = self.waits.get(pid)
        lock = self.locks.get(wait.lock) if wait is not None and wait.lock else None
        if lock is None:
            return None
        owners = surest_first(lock.owners)
        owner = owners[0] if owners else None
        return Step(lock, owner, max(len(owners) - 1, 0))

    def way(self, pid: int) -> Iterator[Step]:
        """Yield the steps from a task to its root; each task at most once."""
        seen = {pid}
        while (step := self.step(pid)) is not None:
            yield step
            if step.owner is None or step.owner.pid in seen:
                return
            pid = step.owner.pid
            seen.add(pid)

    def waiting_for(self, pid: int) -> set[int]:
        """Return the tasks that wait for a task's locks."""
        return {
            waiter
            for held in self.held.get(pid, ())
            for waiter in held.lock.waiters
            if waiter != pid
        }

    def reached(self, roots: Sequence[Root]) -> set[int]:
        """Return the tasks that some roots block, and the roots themselves."""
        todo: list[int] = []
        seen_locks: set[str] = set()
        for root in roots:
            todo += root.waiters
            if root.kind != "external" and root.pid is not None:
                todo.append(root.pid)
            lock = self.locks.get(root.lock or "")
            todo += lock.waiters if lock is not None else ()
        seen: set[int] = set()
        while todo:
            pid = todo.pop()
            if pid in seen:
                continue
            seen.add(pid)
            for held in self.held.get(pid, ()):
                if held.lock.id not in seen_locks:
                    seen_locks.add(held.lock.id)
                    todo += held.lock.waiters
        return seen

    @cached_property
    def behind(self) -> Mapping[int, int]:
        """Return the number of direct and indirect waiters of each owner.

        Sets are integers with a bit for each waiter: there may be a set for each task.
        """
        numbers: dict[int, int] = {}
        own: dict[str, int] = {}
        onward: dict[str, list[int]] = {}
        for lock in self.locks.values():
            for pid in lock.waiters:
                numbers.setdefault(pid, len(numbers))
            own[lock.id] = sum(1 << numbers[pid] for pid in set(lock.waiters))
            onward[lock.id] = [pid for pid in lock.waiters if pid in self.held]
        sets = dict.fromkeys(self.held, 0)
        changes = True
        while changes:
            # Two rounds, the second to see that nothing changes; a few more if cyclic.
            changes = False
            for pid in self._farthest_first(onward):
                bits = 0
                for held in self.held[pid]:
                    bits |= own[held.lock.id]
                    for waiter in onward[held.lock.id]:
                        bits |= sets[waiter]
                changes |= bits != sets[pid]
                sets[pid] = bits
        return {
            pid: (bits & ~(1 << numbers[pid]) if pid in numbers else bits).bit_count()
            for pid, bits in sets.items()
        }

    def _farthest_first(self, onward: Mapping[str, Sequence[int]]) -> list[int]:
        """Sort holders so that those that wait for a holder come before it."""
        order: list[int] = []
        seen: set[int] = set()
        for first in self.held:
            if first in seen:
                continue
            seen.add(first)
            work = [(first, self._holders_before(first, onward))]
            while work:
                pid, before = work[-1]
                for waiter in before:
                    if waiter not in seen:
                        seen.add(waiter)
                        work.append((waiter, self._holders_before(waiter, onward)))
                        break
                else:
                    order.append(pid)
                    work.pop()
        return order

    def _holders_before(
        self, pid: int, onward: Mapping[str, Sequence[int]]
    ) -> Iterator[int]:
        for held in self.held[pid]:
            yield from onward[held.lock.id]
