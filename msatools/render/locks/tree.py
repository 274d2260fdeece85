# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the tree of a root: its locks, their waiters, the waiters' locks."""

from collections.abc import Iterator, Sequence
from itertools import islice

from msatools.locks.report import LockRow
from msatools.render.blocks import Cell, Span, Text, advice, escape
from msatools.render.blocks import one_line as line
from msatools.render.cells import NOT_KEPT, state_cell
from msatools.render.locks.wait_graph import HeldLock, WaitGraph
from msatools.render.locks.words import (
    MARKS,
    age_text,
    doing_text,
    lock_facts,
    lock_text,
)

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
        """Tasks that have a line."""

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
        """Yield a line for each task, with aligned columns.

        :param locks: Whether to show the lock that each task waits for.
        """
        for pid, words in zip(pids, self._aligned(pids, locks), strict=True):
            yield from self._task(pid, words, depth)

    def stack(
        self, stack: tuple[str, ...] | None, pid: int, depth: int
    ) -> Iterator[Text]:
        """Yield a stack, or the task that has the same stack."""
        if not stack:
            return
        indent = "  " * depth
        if (first := self._stacks.setdefault(stack, pid)) != pid:
            yield line(indent, Span(f"(the stack of {first})", "dim"))
            return
        for frame in stack:
            yield line(f"{indent}{frame}")

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
        yield line("  " * depth, *words)
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
            yield line(words, Span("(see above)", "dim"))
            return
        self._locks.add(lock.id)
        yield line(words, lock_facts(lock, self.verbose))
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
            yield line("  " * depth, words, *([advice(how)] if how else []))
