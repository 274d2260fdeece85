# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the report of msa-zombies: parents that do not reap, causes and limits."""

from collections.abc import Iterator, Sequence
from typing import Literal

from msatools.render.blocks import (
    Block,
    Column,
    More,
    Span,
    Table,
    Text,
    advice,
    free_text,
)
from msatools.render.blocks import text as line
from msatools.render.cells import NOT_KEPT, plural, user
from msatools.render.header import header, losses, notes, times
from msatools.render.zombies.groups import (
    by_parent,
    each_zombie,
    explanation,
    has_names,
    heirs_tree,
    namespace_text,
    parent_text,
    tally,
)
from msatools.render.zombies.limits import limits_table
from msatools.render.zombies.words import (
    INITIAL_NAMESPACE,
    WHY,
    dead_for,
    endings_text,
    zombies_text,
)
from msatools.reports.units import duration, size
from msatools.zombies.exit_status import ending
from msatools.zombies.model import HeldMemory, Leak, TaskAsked, Zombie, ZombiesReport

View = Literal["parent", "verdict", "cgroup", "user", "ns", "tree", "leaks"]

_LEAKS = 20


def blocks(
    report: ZombiesReport,
    *,
    view: View = "parent",
    rows: int | None = None,
    verbose: bool = False,
    some: bool = False,
) -> Iterator[Block]:
    """Yield the blocks of an ``msa-zombies`` report.

    :param rows: Number of groups, rows or parents, if not the default.
    :param some: Whether only some zombies were requested.
    """
    yield from header(report.target, *_facts(report), verbose=verbose)
    if report.asked is not None:
        for task in report.asked:
            yield from _task(task, report, verbose)
    elif view == "leaks":
        yield from _leaks(report.leaks, rows, verbose)
    elif not report.zombies:
        asked = " matches the selection" if some else ""
        # A broken list may hide all of them.
        left_out = any(report.coverage.get(key) for key in _TASKS_LOST)
        among = " among the tasks that could be read" if left_out else ""
        yield line(f"No zombie{asked}{among}.")
    else:
        yield from _zombies(report, view, rows, verbose)
    yield from _changes(report)
    yield from _foot(report, verbose)


def _facts(report: ZombiesReport) -> Iterator[str]:
    yield from times(report)
    if report.asked is not None:
        return
    if "tasks" in report.coverage:
        yield plural(report.coverage["tasks"], "task")
    parents = {group.ppid for group in report.groups}
    of = f" of {plural(len(parents), 'parent')}" if parents else ""
    yield zombies_text(len(report.zombies)) + of


def _zombies(
    report: ZombiesReport, view: View, rows: int | None, verbose: bool
) -> Iterator[Block]:
    if view == "parent":
        yield from by_parent(report, rows, verbose)
    elif view == "tree":
        yield from heirs_tree(report, rows, verbose)
        return
    elif view != "leaks":
        yield from tally(view, report, rows, verbose)
    if verbose:
        yield from each_zombie(report, rows)
    yield from limits_table(
        report.limits or (), interval=report.interval_ns is not None, verbose=verbose
    )
    if report.held is not None and report.held.bytes:
        yield line(_held(report.held))


def _held(held: HeldMemory) -> str:
    words = f"memory: zombies hold {size(held.bytes)}"
    each = ", ".join(f"{name} {count:,}" for name, count in held.each_bytes.items())
    total = sum(held.each_bytes.values())
    return f"{words}, {total:,} bytes each: {each}" if each else words


def _changes(report: ZombiesReport) -> Iterator[Text]:
    if report.changes is None:
        return
    begun, reaped = report.changes.begun, report.changes.reaped
    verb = "was" if reaped == 1 else "were"
    words = f"{begun:,} began, {reaped:,} {verb} reaped"
    yield line(Span("Changes: ", "title"), words)


_TASKS_LOST = ("tasks_unreadable", "lists_broken")


def _foot(report: ZombiesReport, verbose: bool) -> Iterator[Text]:
    lost = losses(report)
    # The coverage of a single task needs no line.
    if report.asked is None or lost or verbose:
        coverage = report.coverage
        scanned = coverage.get("tasks_scanned", coverage.get("tasks", 0))
        words = f"coverage: {plural(scanned, 'task')} scanned, "
        words += f"{coverage.get('tasks_unreadable', 0):,} unreadable"
        yield line("; ".join([words, *lost]))
    if report.reads is not None:
        yield line(_cost(report, report.reads))
    yield from notes(report)


def _cost(report: ZombiesReport, reads: int) -> str:
    words = f"cost: {plural(reads, 'read')} of the kernel's memory"
    if report.read_bytes is not None:
        words += f", {report.read_bytes:,} bytes"
    if report.elapsed_ns is not None:
        words += f", {duration(report.elapsed_ns)}"
    return words


# --- one task


def _task(task: TaskAsked, report: ZombiesReport, verbose: bool) -> Iterator[Text]:
    group = next((group for group in report.groups if task.pid in group.pids), None)
    parent = parent_text(task.ppid, task.parent_comm, group)
    name = f"{task.pid} {task.comm}"
    if task.verdict is None:
        words = f"  {task.state} for {duration(task.age_ns)}, no zombie; parent "
        yield line(Span(name, "title"), words, parent)
        yield line(advice(f"--parent {task.pid} lists its dead children", "    "))
        return
    zombie = next((row for row in report.zombies if row.pid == task.pid), None)
    age = dead_for(task.age_ns, zombie.age_bound if zombie else "estimate")
    words = f"  a zombie for {age}: {WHY[task.verdict]} ({task.verdict}); parent "
    yield line(Span(name, "title"), words, parent)
    if zombie is not None:
        yield line("    ", _about(zombie, has_names(report)))
    if group is not None:
        yield from explanation(group, verbose)


def _about(zombie: Zombie, names: bool) -> str:
    """Return a zombie's exit status, owners, and what else keeps it."""
    parts = [
        f"ended with {endings_text({ending(zombie.exit_code): 1})}",
        f"user {user(zombie.uid, names)}",
    ]
    if zombie.cgroup is not None:
        parts.append(f"cgroup {zombie.cgroup}")
    if zombie.namespace not in (None, INITIAL_NAMESPACE):
        parts.append(f"PID namespace {namespace_text(zombie)}")
    if zombie.threads:
        verb = "lives" if zombie.threads == 1 else "live"
        parts.append(f"{plural(zombie.threads, 'thread')} of it {verb} on")
    if zombie.tracer is not None:
        parts.append(f"tracer {zombie.tracer}")
    return "; ".join(parts)


# --- struct pids that leak


def _leaks(
    leaks: Sequence[Leak] | None, rows: int | None, verbose: bool
) -> Iterator[Block]:
    if leaks is None:
        yield line("Whether struct pids leak is unknown.")
        return
    if not leaks:
        yield line("No struct pid has more references than holders that can be named.")
        return
    shown = leaks[:rows] if rows or verbose else leaks[:_LEAKS]
    columns = (
        Column("PID", "right"),
        Column("STRUCT PID"),
        Column("REFERENCES", "right"),
        Column("UNNAMED", "right"),
        free_text("ITS TASK", least=12),
        free_text("HOLDERS THAT CAN BE NAMED"),
    )
    yield Table(
        columns,
        [
            (
                str(leak.pid),
                f"{leak.address:#x}",
                f"{leak.references:,}",
                f"{leak.references - sum(leak.named.values()):,}",
                leak.task or "none any more",
                ", ".join(f"{n:,} {name}" for name, n in leak.named.items())
                or NOT_KEPT,
            )
            for leak in shown
        ],
        More("struct pid", len(leaks) - len(shown), is_chosen=rows is not None),
    )
