# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders tables of locks, contended locks, waiters and holders; and chains."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msatools.locks.report import Contended, LockRow, LocksReport, OwnerSeen, Wait
from msatools.render.blocks import (
    NOT_KEPT,
    Block,
    Cell,
    Column,
    Items,
    More,
    Span,
    Table,
    Text,
    advice,
    cut_line,
    free_text,
    line,
    plural,
    state_cell,
)
from msatools.render.locks.tree import (
    FEW_OWNERS,
    MARKS,
    HeldLock,
    WaitGraph,
    age_text,
    doing_text,
    lock_text,
    owners_text,
    pids_text,
    place_text,
    task_text,
)
from msatools.render.on import on_text
from msatools.reports.units import duration

INTERVAL_ROWS = 20
"""Default number of rows or chains if the report covers an interval."""

HOPS = 12
_ALL_HOPS = 256


def shown_rows(total: int, report: LocksReport, rows: int | None, verbose: bool) -> int:
    """Return the number of rows to show; default: all, in an interval INTERVAL_ROWS."""
    if rows is None and report.interval_ns is not None and not verbose:
        rows = INTERVAL_ROWS
    return total if rows is None else min(rows, total)


_Row = tuple[Sequence[Cell], Sequence[int]]
"""The cells of a row, and the PIDs of its tasks."""

_AGE_COLUMN = Column("FOR", "right")


def table(
    view: str, report: LocksReport, graph: WaitGraph, rows: int | None, verbose: bool
) -> Iterator[Block]:
    columns, made = _TABLES[view](report, graph, verbose)
    if not made:
        yield line(_NONE[view])
        return
    shown = shown_rows(len(made), report, rows, verbose)
    yield Table(
        columns,
        [cells for cells, _ in made[:shown]],
        More("row", len(made) - shown, is_chosen=rows is not None),
    )
    pids = dict.fromkeys(pid for _, pids in made[:shown] for pid in pids)
    yield from _stacks(pids, graph, verbose)


def _stacks(pids: Iterable[int], graph: WaitGraph, verbose: bool) -> Iterator[Text]:
    """Yield the stacks of tasks, equal stacks once."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for pid in pids:
        if stack := graph.stack(pid):
            alike.setdefault(stack, []).append(pid)
    for stack, sharers in alike.items():
        words = Span(f"STACK of {plural(len(sharers), 'task')}  ", "title")
        yield line(words, pids_text(sharers, verbose))
        for frame in stack:
            yield cut_line(f"    {frame}")


def _by_lock(
    report: LocksReport, graph: WaitGraph, verbose: bool
) -> tuple[tuple[Column, ...], list[_Row]]:
    within = report.interval_ns is not None
    columns = (
        Column("WAITERS", "right"),
        *((Column("CHANGE", "right"),) if within else ()),
        Column("OLDEST", "right"),
        free_text("LOCK", least=28),
        Column("READERS", "right", worth=0),
        free_text("OWNERS"),
        free_text("WAITING", worth=1, least=10),
    )
    rows: list[_Row] = []
    for lock in report.locks:
        delta, readers = lock.delta_waiters, lock.readers
        cells = (
            f"{len(lock.waiters):,}",
            *((NOT_KEPT if delta is None else f"{delta:+,}",) if within else ()),
            duration(lock.max_age_ns),
            lock_text(lock, verbose),
            NOT_KEPT if readers is None else f"{readers:,}",
            owners_text(lock.owners, verbose),
            pids_text(lock.waiters, verbose),
        )
        rows.append((cells, lock.waiters))
    return columns, rows


def _by_task(
    report: LocksReport, graph: WaitGraph, verbose: bool
) -> tuple[tuple[Column, ...], list[_Row]]:
    columns = (
        Column("PID/TID", "right"),
        Column("STATE"),
        Column("NOW", worth=1),
        _AGE_COLUMN,
        Column("MODE", worth=2),
        free_text("WAITS FOR", least=28),
        free_text("OWNERS"),
        free_text("IN", worth=0, least=12),
        free_text("COMMAND", least=12),
    )
    rows: list[_Row] = []
    for wait in report.waits:
        lock = graph.locks.get(wait.lock or "")
        what = _wanted(wait, graph, verbose)
        thread = f"{wait.tgid}/{wait.pid}" if wait.tgid != wait.pid else str(wait.pid)
        cells: Sequence[Cell] = (
            thread,
            state_cell(wait.state),
            wait.task_class,
            age_text(wait),
            wait.mode or NOT_KEPT,
            what or NOT_KEPT,
            NOT_KEPT if lock is None else owners_text(lock.owners, verbose),
            place_text(wait) or NOT_KEPT,
            wait.comm,
        )
        rows.append((cells, (wait.pid,)))
    return columns, rows


def _wanted(wait: Wait, graph: WaitGraph, verbose: bool) -> str | None:
    if locks := graph.wanted(wait):
        shown = locks if verbose else locks[:FEW_OWNERS]
        left = f" +{len(locks) - len(shown):,}" if len(shown) < len(locks) else ""
        return " or ".join(lock_text(lock, verbose) for lock in shown) + left
    return wait.why if wait.on is None else on_text(wait.on)


def _holders(
    report: LocksReport, graph: WaitGraph, verbose: bool
) -> tuple[tuple[Column, ...], list[_Row]]:
    columns = (
        Column("PID", "right"),
        Column("LOCKS", "right", worth=0),
        Column("DIRECT", "right", worth=1),
        Column("ALL", "right"),
        Column("STATE"),
        _AGE_COLUMN,
        free_text("COMMAND", least=12),
        free_text("HAS"),
        free_text("DOES"),
    )
    direct = {pid: len(graph.waiting_for(pid)) for pid in graph.held}
    behind = graph.behind
    order = sorted(graph.held, key=lambda pid: (-behind[pid], -direct[pid], pid))
    rows: list[_Row] = []
    for pid in order:
        held = graph.held[pid]
        state, age, does = _now(pid, graph)
        cells: Sequence[Cell] = (
            str(pid),
            f"{len(held):,}",
            f"{direct[pid]:,}",
            f"{behind[pid]:,}",
            state_cell(state),
            age,
            graph.comm(pid) or NOT_KEPT,
            _has(held, verbose),
            does,
        )
        rows.append((cells, (pid,)))
    return columns, rows


def _has(held: Sequence[HeldLock], verbose: bool) -> str:
    shown = held if verbose else held[:FEW_OWNERS]
    words = [
        f"{MARKS[item.owner.confidence]}{lock_text(item.lock, verbose)}"
        for item in shown
    ]
    left = len(held) - len(shown)
    return ", ".join(words) + (f" +{left:,}" if left else "")


def _now(pid: int, graph: WaitGraph) -> tuple[str | None, str, str]:
    """Return an owner's state, the age of that, and a description of its activity."""
    root, wait = graph.end(pid), graph.waits.get(pid)
    step = graph.step(pid)
    if wait is not None:
        does = doing_text(wait) if step is None else f"waits for {lock_text(step.lock)}"
        return wait.state, age_text(wait), root.reason if root is not None else does
    if root is None:
        return None, NOT_KEPT, NOT_KEPT
    age = NOT_KEPT if root.age_ns is None else duration(root.age_ns)
    return root.state, age, root.reason


_TABLES: Mapping[str, Callable[..., tuple[tuple[Column, ...], list[_Row]]]] = {
    "lock": _by_lock,
    "task": _by_task,
    "holders": _holders,
}


_NONE = {
    "lock": "No blocked task waits for a lock that is known.",
    "task": "No task is blocked.",
    "holders": "Nobody is known to hold a lock that others wait for.",
}


def chains(
    report: LocksReport, graph: WaitGraph, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield each task's chain to its root."""
    shown = shown_rows(len(report.waits), report, rows, verbose)
    items = []
    for wait in report.waits[:shown]:
        name, state = f"{wait.pid} {wait.comm}  ", state_cell(wait.state)
        cells = name, state, f" {age_text(wait)}", *_chain(wait, graph, verbose)
        items.append((line(*cells),))
    left = len(report.waits) - shown
    yield Items(items, More("chain", left, is_chosen=rows is not None or verbose))
    yield from _stacks((wait.pid for wait in report.waits[:shown]), graph, verbose)


def _chain(wait: Wait, graph: WaitGraph, verbose: bool) -> Iterator[Cell]:
    """Yield the cells of a task's chain: each lock and its owner, up to the root."""
    if graph.step(wait.pid) is None:
        root = graph.end(wait.pid)
        yield f" -> {doing_text(wait)}" + ("" if root is None else f": {root.reason}")
        return
    pid, seen = wait.pid, {wait.pid}
    limit = _ALL_HOPS if verbose else HOPS
    for hop, step in enumerate(graph.way(wait.pid)):
        if hop == limit:
            yield Span("  …", "dim")
            if not verbose:
                yield advice("-v shows more", "  ")
            return
        if step.owner is None:
            root = graph.end(pid)
            reason = "no known owner" if root is None else root.reason
            yield f" -> {_without_name(step.lock, reason)}"
            return
        yield f" -> {lock_text(step.lock)}"
        pid = step.owner.pid
        others = f" (+{step.others:,})" if step.others else ""
        yield f" {MARKS[step.owner.confidence]}> {task_text(graph, pid)}{others}"
        if pid in seen:
            yield Span(" (again)", "warn")
            return
        seen.add(pid)
        if graph.step(pid) is None and (doing := _doing(pid, graph)):
            yield f": {doing}"


def _without_name(lock: LockRow, reason: str) -> str:
    """Return a lock and the reason, without the name that some reasons begin with."""
    name = lock_text(lock)
    if lock.name and reason.startswith(lock.name):
        return f"{name}{reason.removeprefix(lock.name)}"
    return f"{name}: {reason}"


def _doing(pid: int, graph: WaitGraph) -> str | None:
    """Describe a task that does not wait for a lock; ``None`` if nothing is known."""
    root, wait = graph.end(pid), graph.waits.get(pid)
    if root is not None:
        return root.reason
    return None if wait is None else doing_text(wait)


ROWS = 10
"""Default number of contended locks."""

_FEW_OWNERS = 2
_COLUMNS = (
    Column("WAITED", "right"),
    Column("MEAN", "right", worth=1),
    Column("MAX", "right", worth=0),
    Column("WAIT/S", "right"),
    free_text("LOCK"),
    free_text("OWNERS SEEN"),
)


def contention(
    report: LocksReport, locks: Sequence[Contended], rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield the table of locks that tasks waited for during an interval.

    :param rows: Number of rows, if not the default.
    """
    shown = locks[: rows or (None if verbose else ROWS)]
    seconds = (report.interval_ns or 0) / 1e9
    cells = [
        (
            f"{100 * lock.share:.0f} %",
            f"{lock.mean_queue:.1f}",
            f"{lock.max_queue:,}",
            _wait(lock, seconds),
            lock.lock if lock.name is None else f"{lock.lock} ({lock.name})",
            _owners(lock.owners, verbose),
        )
        for lock in shown
    ]
    left = len(locks) - len(shown)
    yield Table(_COLUMNS, cells, More("lock", left, is_chosen=rows is not None))


def _wait(lock: Contended, seconds: float) -> str:
    if not seconds:
        return NOT_KEPT
    wait, error = (
        duration(round(ns / seconds)) for ns in (lock.wait_ns, lock.error_ns)
    )
    return f"~{wait}+-{error}"


def _owners(owners: Sequence[OwnerSeen], verbose: bool) -> str:
    few = owners if verbose else owners[:_FEW_OWNERS]
    words = [f"{item.pid} {item.comm}: {item.where} x{item.looks:,}" for item in few]
    left = len(owners) - len(few)
    return ", ".join(words) + (f" +{left:,}" if left else "") or NOT_KEPT
