# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the tree of a root, on the waits-for graph of a report."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

from msgspec import Struct

from msatools.locks.report import SUREST_FIRST, LockRow, LocksReport, Owner, Root, Wait
from msatools.render.blocks import (
    BOUND_MARKS,
    NOT_KEPT,
    Cell,
    Span,
    Text,
    advice,
    cut_line,
    escape,
    plural,
    state_cell,
)
from msatools.render.on import on_text
from msatools.reports.units import duration
from msatools.tasks.waits import function_text

# --- The waits-for graph of a report: lookups from waiter to owner and back.


_IDLE = frozenset({"futex", "wait_queue"})
"""Types of locks that idle tasks wait on; they have no owner."""


def surest_first(owners: Iterable[Owner]) -> list[Owner]:
    """Return owners sorted by confidence, the surest first."""
    return sorted(owners, key=lambda owner: SUREST_FIRST.index(owner.confidence))


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
        """Return the locks that a task waits for: several if any one ends the wait."""
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
        """Return the root that a task is or directly waits for; ``None`` if neither."""
        if pid in self.roots:
            return self.roots[pid]
        wait = self.waits.get(pid)
        lock = wait.lock if wait is not None else None
        return self._outside.get(lock or "") or self._served.get(pid)

    def step(self, pid: int) -> Step | None:
        """Return the lock that a task waits for, and its surest owner, if known."""
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
        """Map the PID of each owner to its number of direct and indirect waiters.

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


# --- Describes locks, their owners and their waiters in a few words.


MARKS = {"exact": "=", "likely": "~", "evidence": "?"}
"""Marks for the confidence in an owner."""

FEW_OWNERS = 3

_PIDS = 8
_OF_PROGRAMS = frozenset({"futex", "pi_futex"})


def lock_text(lock: LockRow, verbose: bool = False) -> str:
    """Return a lock's type and name, or its address; both if *verbose*.

    A lock in a program's memory has both, because its name is not unique.
    """
    if lock.name is None:
        return lock.id
    if lock.type in _OF_PROGRAMS:
        return f"{lock.id} ({lock.name})"
    # Some names include the type.
    name = lock.name
    if lock.type not in name.split():
        name = f"{lock.type} {name}"
    address = f" ({lock.id.removeprefix(lock.type).strip()})" if verbose else ""
    return f"{name}{address}"


def task_text(graph: WaitGraph, pid: int) -> str:
    """Return a task's PID and name."""
    comm = graph.comm(pid)
    return str(pid) if comm is None else f"{pid} {comm}"


def age_text(wait: Wait) -> str:
    """Return the duration of a wait, with the mark of its accuracy."""
    return BOUND_MARKS[wait.age_bound] + duration(wait.age_ns)


def place_text(wait: Wait) -> str:
    """Return where a task waits: the calling function and the system call."""
    call = f"{wait.call}()" if wait.call else None
    caller = function_text(wait.caller, wait.module)
    return ", ".join(part for part in (caller, call) if part)


def doing_text(wait: Wait) -> str:
    """Return where a task waits, and the object if that is not a lock."""
    parts = (
        place_text(wait),
        f"any of {len(wait.any_of)}" if wait.any_of else None,
        None if wait.on is None else on_text(wait.on),
        wait.why,
    )
    return ", ".join(part for part in parts if part) or NOT_KEPT


def pids_text(pids: Sequence[int], verbose: bool) -> str:
    """Return the PIDs of tasks; only the first ones if there are many."""
    shown = pids if verbose else pids[:_PIDS]
    left = len(pids) - len(shown)
    return " ".join(map(str, shown)) + (f" +{left:,}" if left else "")


def owners_text(owners: Sequence[Owner], verbose: bool) -> str:
    """Return owners with the marks of their confidence."""
    shown = owners if verbose else owners[:FEW_OWNERS]
    words = [
        f"{MARKS[owner.confidence]}{owner.pid} {owner.comm}"
        + (" (seen)" if owner.seen else "")
        for owner in shown
    ]
    left = len(owners) - len(shown)
    return (", ".join(words) + (f" +{left:,}" if left else "")) or NOT_KEPT


def lock_facts(lock: LockRow, verbose: bool) -> str:
    """Return a lock's readers, owners, purpose and change of waiters, as text."""
    facts = [plural(lock.readers, "reader")] if lock.readers else []
    if len(lock.owners) == 1:
        (owner,) = lock.owners
        facts.append(f"owner {MARKS[owner.confidence]}{owner.pid}")
        facts += ["seen on its stack"] if owner.seen else []
    elif lock.owners:
        facts.append(f"owners {owners_text(lock.owners, verbose)}")
    else:
        facts.append(f"owner {NOT_KEPT}")
    if lock.what and lock.owners:
        facts.append(lock.what)
    if lock.delta_waiters:
        facts.append(f"{lock.delta_waiters:+,} waiters")
    return ", ".join(facts)


# --- Renders the tree of a root: its locks, their waiters, the waiters' locks.


_WAITERS = 5
_LOCKS = 4
_DEPTH = 12
_ALL_DEPTH = 64
"""Maximum depth with -v: deeper indentation is not readable."""

_HOW = {"behind it": "--chains shows the way", "not among those asked for": ""}
_MODES = {"read": "R", "write": "W", None: " "}


class WaitTree:
    """Makes the lines of the tree of one root."""

    def __init__(self, graph: WaitGraph, verbose: bool) -> None:
        self.graph = graph
        self.verbose = verbose
        self._depth = _ALL_DEPTH if verbose else _DEPTH
        self._locks: set[str] = set()
        self._stacks: dict[tuple[str, ...], int] = {}
        self.shown_pids: set[int] = set()
        """PIDs of the tasks that have a line."""

        self.lines = 0
        """Number of lines, without those of stacks."""

    def of_task(
        self, pid: int, waiters: Sequence[int], depth: int = 1
    ) -> Iterator[Text]:
        """Yield a task's locks, and those of *waiters* that wait for none of them."""
        self.shown_pids.add(pid)
        yield from self._held(pid, depth, frozenset())
        known = self.graph.waiting_for(pid)
        yield from self._waiters([w for w in waiters if w not in known], depth)

    def of_thing(self, lock: LockRow | None, waiters: Sequence[int]) -> Iterator[Text]:
        """Yield the waiters of a root that is not a task."""
        if lock is not None:
            yield from self._lock(lock, None, 1, frozenset())
            queued = frozenset(lock.waiters)
            waiters = [w for w in waiters if w not in queued]
        yield from self._waiters(waiters, 1)

    def of_cycle(self, pids: Sequence[int]) -> Iterator[Text]:
        """Yield the tasks of a cycle that have waiters outside the cycle."""
        inside = frozenset(pids)
        for pid in pids:
            if self.graph.waiting_for(pid) - inside:
                yield from self.tasks((pid,), 1)
                yield from self._held(pid, 2, inside)

    def tasks(
        self, pids: Sequence[int], depth: int, *, locks: bool = False
    ) -> Iterator[Text]:
        """Yield a line for each task, with aligned columns, and its stack.

        :param locks: Whether to show the lock that each task waits for.
        """
        for pid, words in zip(pids, self._aligned(pids, locks), strict=True):
            yield from self._task(pid, words, depth)

    def stack(
        self, stack: tuple[str, ...] | None, pid: int, depth: int
    ) -> Iterator[Text]:
        """Yield a stack, or a reference to a task shown with the same stack."""
        if not stack:
            return
        indent = "  " * depth
        if (first := self._stacks.setdefault(stack, pid)) != pid:
            yield cut_line(indent, Span(f"(the stack of {first})", "dim"))
            return
        for frame in stack:
            yield cut_line(f"{indent}{frame}")

    def _aligned(
        self, pids: Sequence[int], locks: bool = False
    ) -> list[Sequence[Cell]]:
        """Return the cells of tasks with aligned columns."""
        waits = [self.graph.waits.get(pid) for pid in pids]
        comms = [escape(self.graph.comm(pid) or NOT_KEPT) for pid in pids]
        ages = ["" if wait is None else age_text(wait) for wait in waits]
        pid_width = max((len(str(pid)) for pid in pids), default=0)
        comm_width = max(map(len, comms), default=0)
        age_width = max(map(len, ages), default=0)
        rows: list[Sequence[Cell]] = []
        for pid, wait, comm, age in zip(pids, waits, comms, ages, strict=True):
            name = f"{pid:>{pid_width}} {comm:<{comm_width}}"
            if wait is None:
                rows.append((f"  {name}",))
                continue
            state = state_cell(wait.state)
            where = f" {age:>{age_width}}  {doing_text(wait)}"
            if locks and (wanted := self.graph.wanted(wait)):
                where += f", for {lock_text(wanted[0], self.verbose)}"
            rows.append((f"{_MODES[wait.mode]} {name}  ", state, where))
        return rows

    def _task(self, pid: int, words: Sequence[Cell], depth: int) -> Iterator[Text]:
        self.lines += 1
        yield cut_line("  " * depth, *words)
        self.shown_pids.add(pid)
        yield from self.stack(self.graph.stack(pid), pid, depth + 2)

    def _held(self, pid: int, depth: int, without: frozenset[int]) -> Iterator[Text]:
        """Yield the locks of a task that have waiters outside *without*."""
        held = [
            item
            for item in self.graph.held.get(pid, ())
            if not without.issuperset(item.lock.waiters)
        ]
        shown = held if self.verbose else held[:_LOCKS]
        for item in shown:
            yield from self._lock(item.lock, item, depth, without)
        yield from self._more(len(held) - len(shown), "more locks", depth)

    def _lock(
        self, lock: LockRow, held: HeldLock | None, depth: int, without: frozenset[int]
    ) -> Iterator[Text]:
        """Yield a lock and its waiters; the waiters of each lock only once."""
        mark = NOT_KEPT if held is None else MARKS[held.owner.confidence]
        words = f"{'  ' * depth}{mark} {lock_text(lock, self.verbose)}  "
        self.lines += 1
        if lock.id in self._locks:
            yield cut_line(words, Span("(see above)", "dim"))
            return
        self._locks.add(lock.id)
        yield cut_line(words, lock_facts(lock, self.verbose))
        # Tasks of a cycle have their own lines.
        waiters = [pid for pid in lock.waiters if pid not in without]
        yield from self._waiters(waiters, depth + 1)

    def _waiters(self, pids: Sequence[int], depth: int) -> Iterator[Text]:
        graph, queued = self.graph, len(pids)
        pids = [pid for pid in pids if pid in graph.waits or pid in graph.held]
        shown = pids if self.verbose else self._few(pids)
        for pid, words in zip(shown, self._aligned(shown), strict=True):
            again = pid in self.shown_pids
            yield from self._task(pid, words, depth)
            if again:
                continue
            if depth < self._depth:
                yield from self._held(pid, depth + 1, frozenset())
            else:
                behind = self.graph.behind.get(pid, 0)
                yield from self._more(behind, "behind it", depth + 1)
        yield from self._more(len(pids) - len(shown), "more", depth)
        yield from self._more(queued - len(pids), "not among those asked for", depth)

    def _few(self, pids: Sequence[int]) -> Sequence[int]:
        """Return the first waiters, and a few of the others that have waiters."""
        if len(pids) <= _WAITERS + 1:
            return pids
        others = (pid for pid in pids[_WAITERS:] if pid in self.graph.held)
        return [*pids[:_WAITERS], *islice(others, _WAITERS)]

    def _more(self, left: int, what: str, depth: int) -> Iterator[Text]:
        if left > 0:
            self.lines += 1
            how = _HOW.get(what, "-v shows them")
            words = Span(f"… {left:,} {what}", "dim")
            yield cut_line("  " * depth, words, *([advice(how)] if how else []))
