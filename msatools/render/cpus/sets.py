# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders processor sets: a table of all, and the details of each."""

from collections.abc import Iterator, Sequence

from msatools.cpus.model import BoundTask, CpuSet, CpusReport, SetTasks
from msatools.render import plain
from msatools.render.blocks import (
    Block,
    Cell,
    Column,
    Span,
    Table,
    Text,
    free_text,
    one_line,
)
from msatools.render.blocks import text as line
from msatools.render.cells import NOT_KEPT, more, plural
from msatools.render.cpus.words import INDENT, is_part, kind_cell, numbers_text

_TASKS = 10


def sets_table(report: CpusReport, *, limits: bool, verbose: bool) -> Iterator[Block]:
    """Yield a table of the sets, unless the default one is the only one.

    :param limits: Whether to include sets that only limit their tasks.
    """
    sets = [
        cpuset for cpuset in report.sets if limits or verbose or cpuset.kind != "limit"
    ]
    if all(cpuset.name == "default" for cpuset in sets):
        return
    has_reasons = any(cpuset.reason for cpuset in sets)
    columns = [
        free_text("SET", keeps="end"),
        free_text("CPUS", least=12),
        free_text("KIND", least=8),
        free_text("FROM", worth=1, least=8),
        free_text("IRQS", worth=0, least=8),
        *([free_text("WHY", least=20)] if has_reasons else []),
    ]
    all_irqs = _all_irqs(report)
    rows: list[Sequence[Cell]] = []
    for cpuset in sets:
        cpus, irqs = numbers_text(cpuset.cpus, verbose), irqs_text(cpuset, all_irqs)
        cells: list[Cell] = [cpuset.name, cpus, kind_cell(cpuset), cpuset.source, irqs]
        rows.append([*cells, Span(cpuset.reason, "bad")] if cpuset.reason else cells)
    yield Table(tuple(columns), rows)


def irqs_text(cpuset: CpuSet, all_irqs: frozenset[int]) -> str:
    """Return the number of device interrupts routed to a set, and of allowed ones."""
    if all_irqs and all_irqs.issubset(cpuset.irqs_allowed):
        return "all"
    words = f"{len(cpuset.irqs_routed):,} routed"
    if cpuset.irqs_allowed:
        words += f", {len(cpuset.irqs_allowed):,} allowed"
    if cpuset.irqs_managed:
        words += f" ({cpuset.irqs_managed:,} managed)"
    return words


def sets_in_full(
    report: CpusReport, *, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield the details of each set.

    :param rows: Number of tasks of each list, if not the default.
    """
    all_irqs = _all_irqs(report)
    for cpuset in report.sets:
        yield line()
        head = Span(cpuset.name, "title")
        yield line(head, "  ", kind_cell(cpuset), f"  {cpuset.source}")
        if cpuset.kind == "invalid":
            why = cpuset.reason or "the kernel does not say why"
            yield line(INDENT, Span(f"not in force: {why}", "bad"))
        for words in (
            _cpus(cpuset, verbose),
            _memory(cpuset),
            _irqs(cpuset, all_irqs, verbose),
        ):
            yield line(INDENT, words)
        if cpuset.tasks is not None:
            yield from _tasks(cpuset.tasks, rows, verbose)


def _all_irqs(report: CpusReport) -> frozenset[int]:
    """Return the interrupts of all sets; empty if only some CPUs were selected."""
    if is_part(report):
        return frozenset()
    return frozenset().union(*(cpuset.irqs_allowed for cpuset in report.sets))


# --- cpuset set


def _cpus(cpuset: CpuSet, verbose: bool) -> str:
    parts = [f"CPUs {numbers_text(cpuset.cpus, verbose)}"]
    for words, cpus in (("asked for", cpuset.asked), ("exclusive", cpuset.exclusive)):
        if cpus is not None and cpus != cpuset.cpus:
            parts.append(f"{words} {numbers_text(cpus, verbose)}")
    return "; ".join(parts)


def _memory(cpuset: CpuSet) -> str:
    nodes = "node" if len(cpuset.nodes) == 1 else "nodes"
    parts = [f"memory {nodes} {numbers_text(cpuset.nodes)}"]
    if cpuset.root_domain is not None:
        parts.append(f"root domain {cpuset.root_domain:#x}")
    if cpuset.balanced is not None:
        parts.append("balanced" if cpuset.balanced else "not balanced")
    return "; ".join(parts)


def _irqs(cpuset: CpuSet, all_irqs: frozenset[int], verbose: bool) -> str:
    parts = []
    for numbers, words in (
        (cpuset.irqs_routed, "routed"),
        (cpuset.irqs_allowed, "allowed"),
    ):
        which = f" ({numbers_text(numbers, verbose)})" if numbers else ""
        parts.append(f"{len(numbers):,} {words}{which}")
    if all_irqs and all_irqs.issubset(cpuset.irqs_allowed):
        parts[-1] = f"all {parts[-1]}"
    if cpuset.irqs_managed:
        parts.append(f"{cpuset.irqs_managed:,} of them managed")
    return f"interrupts: {', '.join(parts)}"


def _tasks(tasks: SetTasks, rows: int | None, verbose: bool) -> Iterator[Text]:
    words = f"tasks: {plural(tasks.members, 'thread')}"
    if tasks.percpu_threads:
        words += f", and {tasks.percpu_threads:,} of the kernel for one CPU each"
    yield line(INDENT, words)
    yield from _listed("pinned", tasks.pinned, rows, verbose)
    yield from _listed("straying", tasks.straying, rows, verbose)


def _listed(
    how: str, tasks: Sequence[BoundTask], rows: int | None, verbose: bool
) -> Iterator[Text]:
    if not tasks:
        return
    yield line(INDENT, Span(f"{len(tasks):,} {how}", "title"))
    shown = tasks[:rows] if rows or verbose else tasks[:_TASKS]
    headers = ["COMMAND", "CPUS", "CGROUP"] + ["WHY"] * any(t.why for t in shown)
    columns = (Column("PID", "right"), *map(Column, headers))
    for cells in plain.lines(Table(columns, [_task(t, verbose) for t in shown])):
        yield one_line(INDENT * 2, *cells)
    for text in more(len(tasks) - len(shown), f"{how} task"):
        yield line(INDENT * 2, *text.spans)


def _task(task: BoundTask, verbose: bool) -> Sequence[Cell]:
    cells: tuple[Cell, ...] = (
        str(task.pid),
        f"[{task.comm}]" if task.kthread else task.comm,
        numbers_text(task.cpus, verbose),
        Span(task.cgroup or NOT_KEPT, "dim"),
    )
    return (*cells, task.why) if task.why else cells
