# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the report of msa-locks: roots with their trees, chains and tables."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from msatools.locks.report import (
    Deadlock,
    Herd,
    Inversion,
    LockChanges,
    LockRow,
    LocksReport,
    Root,
    Wait,
)
from msatools.render.blocks import (
    NOT_KEPT,
    Block,
    Cell,
    Items,
    More,
    Span,
    Style,
    Text,
    advice,
    line,
    plural,
    state_cell,
)
from msatools.render.header import header, losses, notes, times
from msatools.render.locks.io import in_flight, under_root, workqueues
from msatools.render.locks.tables import HOPS, chains, contention, table
from msatools.render.locks.tree import (
    FEW_OWNERS,
    MARKS,
    WaitGraph,
    WaitTree,
    age_text,
    lock_text,
    owners_text,
    pids_text,
    task_text,
)
from msatools.render.on import woken_words
from msatools.reports.units import duration, duration_range

View = Literal["root", "lock", "task", "chains", "holders", "io", "workqueues"]

ROOTS = 10
"""Default number of roots."""

_ALL_LINES = 30
_LINES = 12
_FEW_LINES = 3
"""Maximum lines of the trees without -v: of all roots, of one root, and of one root
once all lines are used up. The sum fills about one screen."""

_CROWDS = 4
"""Maximum locks with many waiters, but no evidence of a herd, to show singly."""

_OTHERS = 5

_TOGETHER = {
    "none": None,
    "one dump": "woken together, by one look",
    "confirmed": "all slept again in the interval",
}
_LEGEND = (
    "R/W: waits to read/write.  Owner: = certain  ~ likely (may be out of date)  "
    "? a guess"
)


def locks_blocks(
    report: LocksReport,
    *,
    view: View = "root",
    rows: int | None = None,
    verbose: bool = False,
    some: bool = False,
) -> Iterator[Block]:
    """Yield the blocks of an ``msa-locks`` report.

    :param rows: Number of roots, locks, tasks or chains, if not the default.
    :param some: Whether only some tasks were requested.
    """
    yield from header(report.target, *_facts(report), verbose=verbose)
    if view in ("io", "workqueues"):
        if view == "io":
            yield from in_flight(report.io, rows, verbose)
        else:
            yield from workqueues(report.workqueues, rows, verbose)
        yield from _end(report)
        return
    graph = WaitGraph(report)
    if report.contention:
        yield from contention(report, report.contention, rows, verbose)
    for deadlock in report.deadlocks:
        yield from _deadlock(deadlock, graph, verbose)
    if not report.waits:
        asked = "blocked task matches the selection" if some else "task is blocked"
        # If no stack at all could be unwound, only states are known.
        unread = (
            0
            < report.coverage.get("stacks", 0)
            <= report.coverage.get("stacks_incomplete", 0)
        )
        yield line(f"It is not known whether a {asked}." if unread else f"No {asked}.")
    elif view == "root":
        yield from _roots(report, graph, rows, verbose)
    elif view == "chains":
        yield from chains(report, graph, rows, verbose)
    else:
        yield from table(view, report, graph, rows, verbose)
    yield from _crowds(report, graph, verbose)
    if report.changes is not None:
        yield from _changes(report.changes, verbose)
    if report.waits and report.locks:
        yield line(Span(_LEGEND, "dim"))
    yield from _end(report)


def _end(report: LocksReport) -> Iterator[Text]:
    yield line(_coverage(report))
    yield from notes(report)


def _facts(report: LocksReport) -> Iterator[str]:
    yield from times(report)
    if "tasks" in report.coverage:
        yield plural(report.coverage["tasks"], "task")
    in_d = sum(wait.state == "D" for wait in report.waits)
    yield f"{len(report.waits):,} blocked ({in_d:,} D)"


def _deadlock(deadlock: Deadlock, graph: WaitGraph, verbose: bool) -> Iterator[Text]:
    pids, locks = deadlock.pids, deadlock.locks
    is_exact = deadlock.confidence == "exact"
    style: Style = "bad" if is_exact else "warn"
    hops = []
    for index, (pid, lock_id) in enumerate(zip(pids, locks, strict=False)):
        lock = graph.locks.get(lock_id)
        owner = pids[(index + 1) % len(pids)]
        name = lock_id if lock is None else lock_text(lock)
        mark = _mark(lock, owner)
        hops.append(f"{pid} {mark}{name}{mark}>")
    left = 0 if verbose else len(hops) - HOPS
    if left > 0:
        hops[HOPS:] = [f"… {left:,} more …"]
    hops.append(str(pids[0]) if pids else NOT_KEPT)
    title = "DEADLOCK  " if is_exact else "POSSIBLE DEADLOCK  "
    how = [advice("-v shows all", "  ")] if left > 0 else []
    yield line(Span(title, style), " ".join(hops), *how)
    shown = pids if verbose else pids[:HOPS]
    yield from WaitTree(graph, verbose).tasks(shown, depth=1)


def _mark(lock: LockRow | None, owner: int) -> str:
    for known in lock.owners if lock is not None else ():
        if known.pid == owner:
            return MARKS[known.confidence]
    # The owner in the deadlock is not among the owners of the lock.
    return "?"


def _crowds(report: LocksReport, graph: WaitGraph, verbose: bool) -> Iterator[Text]:
    """Yield herds, locks with many waiters without a herd, and inversions."""
    crowds = [herd for herd in report.herds if herd.confidence == "none"]
    left = crowds[_CROWDS:] if not verbose else []
    for herd in report.herds:
        if herd not in left:
            yield line(Span(_herd(herd, report, graph, verbose), "warn"))
    if left:
        words = f"… {len(left):,} more locks with many waiters"
        yield line(words, advice("-v shows them"))
    for inversion in report.inversions:
        yield line(Span(_inversion(inversion, graph), "warn"))


def _herd(herd: Herd, report: LocksReport, graph: WaitGraph, verbose: bool) -> str:
    lock = graph.locks.get(herd.lock)
    name = herd.lock if lock is None else lock_text(lock)
    # Waiters that are woken constantly sleep too briefly for the lock to be listed.
    contended = [row.name for row in report.contention or () if row.lock == herd.lock]
    what = next(filter(None, [*contended, herd.name]), None)
    if lock is None and what:
        name += f" ({what})"
    owner = f"{NOT_KEPT} (no known owner)"
    if lock is not None and lock.owners:
        owner = owners_text(lock.owners, verbose)
    ages = duration_range(herd.min_age_ns, herd.max_age_ns)
    words = f"HERD  {herd.waiters:,} x {name}  owner {owner}  asleep for {ages} "
    words += f"after {plural(herd.nvcsw_median, 'sleep')} each (median)"
    together = _TOGETHER[herd.confidence]
    more = woken_words(herd, report.interval_ns)
    return "; ".join([words, *([together] if together else []), *more])


def _inversion(inversion: Inversion, graph: WaitGraph) -> str:
    lock = graph.locks.get(inversion.lock)
    name = inversion.lock if lock is None else lock_text(lock)
    mark = _mark(lock, inversion.owner)
    owner, waiter = (
        task_text(graph, inversion.owner),
        task_text(graph, inversion.waiter),
    )
    policy = f", SCHED_{inversion.owner_policy}" if inversion.owner_policy else ""
    return (
        f"INVERSION  {mark}{owner} (priority {inversion.owner_pri}{policy}) has "
        f"{name}, waits for a CPU{_ready(inversion)}, and keeps {waiter} (priority "
        f"{inversion.waiter_pri}) waiting"
    )


def _ready(inversion: Inversion) -> str:
    ready_ns = inversion.owner_ready_ns
    return "" if ready_ns is None else f" (not run for {duration(ready_ns)})"


def _changes(changes: LockChanges, verbose: bool) -> Iterator[Text]:
    lists = {
        "begun": changes.begun,
        "ended": changes.ended,
        "moved": changes.moved,
        "stuck": changes.stuck,
    }
    words = [
        f"{len(pids):,} {name}" + (f" ({pids_text(pids, verbose)})" if pids else "")
        for name, pids in lists.items()
    ]
    yield line(Span("Changes: ", "title"), ", ".join(words))


def _coverage(report: LocksReport) -> str:
    coverage = report.coverage
    parts = [
        f"coverage: {plural(coverage.get('tasks_scanned', 0), 'task')} scanned, "
        f"{coverage.get('tasks_unreadable', 0):,} unreadable"
    ]
    if zombies := coverage.get("zombies"):
        verb = "has" if zombies == 1 else "have"
        parts.append(f"{plural(zombies, 'zombie')} {verb} no stack")
    if unknown := coverage.get("locks_unknown"):
        parts.append(f"{plural(unknown, 'lock')} not found")
    return "; ".join([*parts, *losses(report)])


# --- roots


def _roots(
    report: LocksReport, graph: WaitGraph, rows: int | None, verbose: bool
) -> Iterator[Block]:
    numbered = list(enumerate(report.roots, 1))
    if not verbose:
        numbered = [(n, root) for n, root in numbered if not _is_idle(root, graph)]
    limit = rows or (len(numbered) if verbose else ROOTS)
    room = _ALL_LINES
    items = []
    for number, root in numbered[:limit]:
        tree = WaitTree(graph, verbose)
        most = None if verbose else min(_LINES, max(_FEW_LINES, room))
        items.append(tuple(_root(number, root, tree, most, report)))
        room -= tree.lines
    left = max(len(numbered) - limit, 0)
    yield Items(items, More("root", left, is_chosen=rows is not None or verbose))
    reached = graph.reached([root for _, root in numbered])
    others = [wait for wait in report.waits if wait.pid not in reached]
    yield from _unowned([w for w in others if _is_idle_task(w, graph)], graph)
    rest = [wait for wait in others if not _is_idle_task(wait, graph)]
    yield from _others(rest, graph, verbose)


def _is_idle_task(wait: Wait, graph: WaitGraph) -> bool:
    locks = graph.wanted(wait)
    return bool(locks) and all(map(graph.is_idle, locks))


def _is_idle(root: Root, graph: WaitGraph) -> bool:
    lock = graph.locks.get(root.lock or "")
    return lock is not None and root.pid is None and graph.is_idle(lock)


def _root(
    number: int, root: Root, tree: WaitTree, most: int | None, report: LocksReport
) -> Iterator[Text]:
    """Yield a root and its tree, in at most *most* lines, and its I/O in flight."""
    yield line(
        Span(f"ROOT {number}  ", "title"),
        *_about(root, tree.graph, tree.verbose),
        Span(f"  {_weight(root)}", "title"),
    )
    for words in under_root(root, report):
        yield line(f"  {words}")
    for text in _behind(root, tree):
        if most is not None and tree.lines > most:
            yield from _cut(root, tree)
            return
        yield text


def _cut(root: Root, tree: WaitTree) -> Iterator[Text]:
    graph = tree.graph
    own = frozenset(root.waiters if root.kind == "cycle" else (root.pid,))
    left = graph.reached([root]) & graph.waits.keys() - tree.shown_pids - own
    if left:
        them = "it" if len(left) == 1 else "them"
        words = Span(f"… {plural(len(left), 'more waiter')}", "dim")
        yield line("  ", words, advice(f"-v shows {them}"))


def _about(root: Root, graph: WaitGraph, verbose: bool) -> Sequence[Cell]:
    """Return the description of a root."""
    if root.kind == "cycle":
        names = ", ".join(task_text(graph, pid) for pid in root.waiters[:FEW_OWNERS])
        left = len(root.waiters) - FEW_OWNERS
        names += f" +{left:,}" if left > 0 else ""
        return (f"cycle of {len(root.waiters):,}: {names}  {root.reason}",)
    if root.kind == "task" and root.pid is not None:
        guess = "perhaps " if root.confidence == "evidence" else ""
        return (guess, *_head(graph, root, root.pid), f"  {root.reason}")
    if (pid := _only_one(root)) is None:
        return (root.reason,)
    what, lock = root.reason, graph.locks.get(root.lock or "")
    if lock is not None and (lock.name or lock.id) not in what:
        what = f"{lock_text(lock, verbose)}: {what}"
    return (*_head(graph, graph.waits.get(pid), pid), f"  {what}")


def _only_one(root: Root) -> int | None:
    """Return the only waiter of an external root; ``None`` if there are several."""
    return root.waiters[0] if len(root.waiters) == 1 else None


def _weight(root: Root) -> str:
    """Return the number of tasks that a root blocks, as text."""
    count = root.blocked_d + root.blocked_s
    if not count or (count == 1 and root.kind == "external" and _only_one(root)):
        return "blocks nobody else"
    return f"blocks {count:,}" + (f" ({root.blocked_d:,} D)" if root.blocked_d else "")


def _behind(root: Root, tree: WaitTree) -> Iterator[Text]:
    graph = tree.graph
    if root.kind == "cycle":
        yield from tree.of_cycle(root.waiters)
    elif root.kind == "task" and root.pid is not None:
        yield from tree.stack(root.stack, root.pid, depth=2)
        yield from tree.of_task(root.pid, root.waiters)
    elif (pid := _only_one(root)) is not None:
        yield from tree.stack(graph.stack(pid), pid, depth=2)
        yield from tree.of_task(pid, ())
    else:
        yield from tree.of_thing(graph.locks.get(root.lock or ""), root.waiters)


def _head(graph: WaitGraph, task: Root | Wait | None, pid: int) -> Sequence[Cell]:
    name = f"pid {task_text(graph, pid)}"
    if isinstance(task, Wait):
        return (f"{name}  ", state_cell(task.state), f" {age_text(task)}")
    if task is None or task.state is None:
        return (name,)
    age = "" if task.age_ns is None else f" {duration(task.age_ns)}"
    return (f"{name}  ", state_cell(task.state), age)


def _unowned(waits: Sequence[Wait], graph: WaitGraph) -> Iterator[Text]:
    """Yield a summary of waits for locks without a known owner (idle workers)."""
    if not waits:
        return
    locks = {lock.id for wait in waits for lock in graph.wanted(wait)}
    count = len(locks)
    types = Counter(graph.wanted(wait)[0].type for wait in waits).most_common()
    kinds = ", ".join(f"{number:,} {name}" for name, number in types)
    verb = "waits" if len(waits) == 1 else "wait"
    yield line(
        Span("NO KNOWN OWNER  ", "title"),
        f"{plural(len(waits), 'task')} {verb} for {plural(count, 'lock')} whose holder "
        f"could not be found (usually idle threads): {kinds}",
        advice("--by lock lists them", "; "),
    )


def _others(waits: Sequence[Wait], graph: WaitGraph, verbose: bool) -> Iterator[Text]:
    """Yield the blocked tasks that lead to no root."""
    if not waits:
        return
    shown = waits if verbose else waits[:_OTHERS]
    verb = "leads" if len(waits) == 1 else "lead"
    count = plural(len(waits), "blocked task")
    yield line(Span("OTHERS  ", "title"), f"{count} {verb} to no root")
    tree = WaitTree(graph, verbose)
    yield from tree.tasks([wait.pid for wait in shown], depth=1, locks=True)
    if len(shown) < len(waits):
        left = len(waits) - len(shown)
        words = Span(f"… {left:,} more", "dim")
        yield line("  ", words, advice("--by task lists them"))
