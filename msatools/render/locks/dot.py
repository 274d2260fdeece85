# SPDX-License-Identifier: LGPL-2.1-or-later

"""
Renders the waits-for graph in Graphviz's DOT language.

Tasks are boxes, locks ellipses, external causes octagons. An edge goes from a waiter to
its lock, and from a lock to its owner: solid if the owner is exact, dashed if likely,
dotted if by evidence. Deadlocks are red.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from msatools.locks.report import Deadlock, LockRow, LocksReport, Root
from msatools.render.blocks import Text, escape, plural, verbatim
from msatools.render.header import taken_from
from msatools.render.locks.tree import (
    WaitGraph,
    age_text,
    doing_text,
    lock_text,
    surest_first,
    task_text,
)
from msatools.reports.units import duration

_LEAVES = 6
"""Maximum nodes of a lock's waiters without waiters; further ones share a node."""

_EDGES = {"exact": "solid", "likely": "dashed", "evidence": "dotted"}


def quoted(*lines: str) -> str:
    """
    Return lines as one quoted string of DOT.

    DOT expands escapes (``\\N`` is the node's name) and HTML entities in a string, so
    both are escaped. A leading ``<`` is plain text in a quoted string.

    >>> print(quoted('a "b" & <c>', "d"))
    "a \\"b\\" &amp; <c>\\nd"
    """
    return '"' + "\\n".join(map(_plain, lines)) + '"'


def _plain(text: str) -> str:
    safe = escape(text).replace("\\", "\\\\").replace('"', '\\"')
    return safe.replace("&", "&amp;")


def digraph(report: LocksReport, *, verbose: bool = False) -> Iterator[Text]:
    """Yield the lines of a graph.

    :param verbose: Whether to show all waiters of a lock, and the locks without a known
        owner whose waiters seem to be idle.
    """
    yield verbatim("digraph waits {")
    yield verbatim("  rankdir=LR;")
    yield verbatim("  node [shape=box];")
    yield verbatim("  labelloc=t;")
    yield verbatim(f"  label={quoted(*_title(report))};")
    for statement in _Graph(report, verbose).lines():
        yield verbatim(f"  {statement};")
    yield verbatim("  subgraph cluster_legend {")
    for statement in _LEGEND:
        yield verbatim(f"    {statement};")
    yield verbatim("  }")
    yield verbatim("}")


def _title(report: LocksReport) -> Iterator[str]:
    target = report.target
    yield f"Who waits for whom: {target.release}, {taken_from(target)}"
    in_d = sum(wait.state == "D" for wait in report.waits)
    words = f"{plural(len(report.waits), 'task')} blocked, {in_d:,} in D"
    if report.taken_at_ns is not None:
        words += f", {report.taken_at_ns / 1e9:.3f} s after the start"
    yield words


_LEGEND = (
    'label="red: a deadlock; thick: a root"',
    "labelloc=b",
    'k0 [label="task"]',
    'k1 [shape="ellipse", label="lock"]',
    'k2 [label="owner"]',
    'k3 [label="likely owner"]',
    'k4 [label="owner by evidence"]',
    'k5 [shape="octagon", label="cause outside of tasks"]',
    'k0 -> k1 [label="waits"]',
    'k1 -> k2 [style="solid"]',
    'k1 -> k3 [style="dashed"]',
    'k1 -> k4 [style="dotted"]',
    "k1 -> k5",
)


class _Graph:
    """The nodes and edges of a report. Names of nodes are identifiers."""

    def __init__(self, report: LocksReport, verbose: bool) -> None:
        self._report = report
        self._verbose = verbose
        self._graph = WaitGraph(report)
        self._shown_locks = [
            lock for lock in report.locks if verbose or not self._graph.is_idle(lock)
        ]
        self._locks = {lock.id: f"l{n}" for n, lock in enumerate(self._shown_locks)}
        self._left_out = {lock.id for lock in report.locks} - self._locks.keys()
        hops = list(_hops(report.deadlocks))
        self._red_tasks = {hop.waiter for hop in hops}
        self._red_waits = {(hop.waiter, hop.lock) for hop in hops}
        self._red_owns = {(hop.lock, hop.owner) for hop in hops}
        self._red_locks = {hop.lock for hop in hops}
        self._tasks: dict[int, None] = {}
        """Tasks that have an edge, in the order of the edges."""

    def lines(self) -> Iterator[str]:
        edges: dict[str, str] = {}
        for edge in self._edges():
            # A task may own a lock several times, or wait for it in several ways.
            edges.setdefault(edge.partition(" [")[0], edge)
        yield from map(self._task, self._tasks)
        yield from map(self._lock, self._shown_locks)
        yield from edges.values()

    def _edges(self) -> Iterator[str]:
        for lock in self._shown_locks:
            yield from self._waits(lock)
            for owner in surest_first(lock.owners):
                edge = f"{self._locks[lock.id]} -> {self._node(owner.pid)}"
                red = (lock.id, owner.pid) in self._red_owns
                yield edge + _attributes(_red(red), style=_EDGES[owner.confidence])
        for number, root in enumerate(self._report.roots):
            if root.kind == "external" and root.lock not in self._left_out:
                yield from self._outside(f"r{number}", root)

    def _waits(self, lock: LockRow) -> Iterator[str]:
        name = self._locks[lock.id]
        shown = self._shown(lock)
        for pid in shown:
            wait = self._graph.waits.get(pid)
            mode = {"label": wait.mode} if wait is not None and wait.mode else {}
            red = _red((pid, lock.id) in self._red_waits)
            yield f"{self._node(pid)} -> {name}{_attributes(mode, red)}"
        yield from _others(name, len(lock.waiters) - len(shown))

    def _shown(self, lock: LockRow) -> Sequence[int]:
        """Return the waiters to show: owners, deadlocked tasks and a few others."""
        if self._verbose or len(lock.waiters) <= _LEAVES + 1:
            return lock.waiters
        shown, leaves = [], 0
        for pid in lock.waiters:
            is_leaf = pid not in self._graph.held and pid not in self._red_tasks
            leaves += is_leaf
            if not is_leaf or leaves <= _LEAVES:
                shown.append(pid)
        return shown

    def _outside(self, name: str, root: Root) -> Iterator[str]:
        """Yield an external root, and the edges of its lock or waiters."""
        pid = root.pid
        label = [root.reason, *([] if pid is None else [f"{pid} {root.comm or ''}"])]
        yield name + _attributes({"shape": "octagon"}, label=label)
        lock = self._locks.get(root.lock or "")
        if lock is not None:
            yield f"{lock} -> {name}"
            return
        waiters = root.waiters if self._verbose else root.waiters[:_LEAVES]
        for waiter in waiters:
            yield f"{self._node(waiter)} -> {name}"
        yield from _others(name, len(root.waiters) - len(waiters))

    def _node(self, pid: int) -> str:
        self._tasks[pid] = None
        return f"t{pid}"

    def _task(self, pid: int) -> str:
        label = [task_text(self._graph, pid)]
        wait, root = self._graph.waits.get(pid), self._graph.roots.get(pid)
        if wait is not None:
            label += [f"{wait.state} {age_text(wait)}", doing_text(wait)]
        elif root is not None and root.state is not None:
            age = "" if root.age_ns is None else f" {duration(root.age_ns)}"
            label.append(f"{root.state}{age}")
        if root is not None:
            label.append(root.reason)
        bold = {} if root is None else {"penwidth": "2"}
        return f"t{pid}" + _attributes(bold, _red(pid in self._red_tasks), label=label)

    def _lock(self, lock: LockRow) -> str:
        red = _red(lock.id in self._red_locks)
        label = [lock_text(lock)]
        if lock.readers:
            label.append(plural(lock.readers, "reader"))
        shape = {"shape": "ellipse"}
        return self._locks[lock.id] + _attributes(shape, red, label=label)


def _others(name: str, left: int) -> Iterator[str]:
    """Yield one node for the waiters that are not shown."""
    if left > 0:
        yield f"{name}more{_attributes({'label': f'{left:,} more'})}"
        yield f"{name}more -> {name}"


class _Hop(Struct, frozen=True):
    waiter: int
    lock: str
    owner: int


def _hops(deadlocks: Sequence[Deadlock]) -> Iterator[_Hop]:
    for deadlock in deadlocks:
        owners = (*deadlock.pids[1:], *deadlock.pids[:1])
        for hop in zip(deadlock.pids, deadlock.locks, owners, strict=False):
            yield _Hop(*hop)


def _red(is_red: bool) -> dict[str, str]:
    return {"color": "red", "fontcolor": "red"} if is_red else {}


def _attributes(*given: Mapping[str, str], **more: str | Sequence[str]) -> str:
    merged = {key: value for part in (*given, more) for key, value in part.items()}
    words = [
        f"{key}={quoted(value) if isinstance(value, str) else quoted(*value)}"
        for key, value in merged.items()
    ]
    return f" [{', '.join(words)}]" if words else ""
