# SPDX-License-Identifier: LGPL-2.1-or-later

"""Processor sets: a table of all, and all there is to say of each."""

from collections.abc import Iterator, Sequence

from msatools.cpus.model import BoundTask, CpuSet, CpusReport, SetTasks
from msatools.render import plain
from msatools.render.blocks import Block, Cell, Column, Span, Table, Text
from msatools.render.blocks import text as line
from msatools.render.cells import NOT_KEPT, more, plural
from msatools.render.cpus.words import INDENT, is_part, kind_cell, numbers_text

_TASKS = 10


def sets_table(report: CpusReport, *, limits: bool, verbose: bool) -> Iterator[Block]:
    """Yield a table of the sets, unless the default one is the only one.

    :param limits: Whether to list sets that only limit their tasks, too.
    """
    sets = [one for one in report.sets if limits or verbose or one.kind != "limit"]
    if all(one.name == "default" for one in sets):
        return
    has_reasons = any(one.reason for one in sets)
    headers = ["SET", "CPUS", "KIND", "FROM", "IRQS"] + ["WHY"] * has_reasons
    all_irqs = _all_irqs(report)
    rows: list[Sequence[Cell]] = []
    for one in sets:
        cpus, irqs = numbers_text(one.cpus, verbose), irqs_text(one, all_irqs)
        cells: list[Cell] = [one.name, cpus, kind_cell(one), one.source, irqs]
        rows.append([*cells, Span(one.reason, "bad")] if one.reason else cells)
    yield Table(tuple(map(Column, headers)), rows)


def irqs_text(one: CpuSet, all_irqs: frozenset[int]) -> str:
    """Write how many interrupts of devices go to a set, and how many may."""
    if all_irqs and all_irqs.issubset(one.irqs_allowed):
        return "all"
    words = f"{len(one.irqs_routed):,} routed"
    if one.irqs_allowed:
        words += f", {len(one.irqs_allowed):,} allowed"
    if one.irqs_managed:
        words += f" ({one.irqs_managed:,} managed)"
    return words


def sets_in_full(
    report: CpusReport, *, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield all that there is to say of each set.

    :param rows: How many tasks of each list, if others than usual.
    """
    all_irqs = _all_irqs(report)
    for one in report.sets:
        yield line()
        head = Span(one.name, "title")
        yield line(head, "  ", kind_cell(one), f"  {one.source}")
        if one.kind == "invalid":
            why = one.reason or "the kernel does not say why"
            yield line(INDENT, Span(f"not in force: {why}", "bad"))
        for words in (_cpus(one, verbose), _memory(one), _irqs(one, all_irqs, verbose)):
            yield line(INDENT, words)
        if one.tasks is not None:
            yield from _tasks(one.tasks, rows, verbose)


def _all_irqs(report: CpusReport) -> frozenset[int]:
    """Return the interrupts that may go to any CPU; none if not all sets are shown."""
    if is_part(report):
        return frozenset()
    return frozenset().union(*(one.irqs_allowed for one in report.sets))


# --- one set


def _cpus(one: CpuSet, verbose: bool) -> str:
    parts = [f"CPUs {numbers_text(one.cpus, verbose)}"]
    for words, cpus in (("asked for", one.asked), ("exclusive", one.exclusive)):
        if cpus is not None and cpus != one.cpus:
            parts.append(f"{words} {numbers_text(cpus, verbose)}")
    return "; ".join(parts)


def _memory(one: CpuSet) -> str:
    nodes = "node" if len(one.nodes) == 1 else "nodes"
    parts = [f"memory {nodes} {numbers_text(one.nodes)}"]
    if one.root_domain is not None:
        parts.append(f"root domain {one.root_domain:#x}")
    if one.balanced is not None:
        parts.append("balanced" if one.balanced else "not balanced")
    return "; ".join(parts)


def _irqs(one: CpuSet, all_irqs: frozenset[int], verbose: bool) -> str:
    parts = []
    for numbers, words in ((one.irqs_routed, "routed"), (one.irqs_allowed, "allowed")):
        which = f" ({numbers_text(numbers, verbose)})" if numbers else ""
        parts.append(f"{len(numbers):,} {words}{which}")
    if all_irqs and all_irqs.issubset(one.irqs_allowed):
        parts[-1] = f"all {parts[-1]}"
    if one.irqs_managed:
        parts.append(f"{one.irqs_managed:,} of them managed")
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
        yield line(INDENT * 2, *cells)
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
