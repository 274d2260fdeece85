# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the report of msa-cpus: processor sets, the work of each CPU, and plans."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeGuard

from msatools.cpus.model import Cpu, CpuPlan, CpusReport, PlanRest
from msatools.render.blocks import (
    NOT_KEPT,
    Block,
    Cell,
    Column,
    More,
    Span,
    Table,
    Text,
    advice,
    cut_line,
    free_text,
    line,
    number_text,
    plural,
    share,
    verbatim,
)
from msatools.render.cpus.columns import (
    COLUMNS,
    CpuContext,
    context,
    default_columns,
    explanations,
    findings_lines,
    is_idle,
    is_part,
    make_columns,
    numbers_text,
    possible_cpus,
    state_cell,
    total_ns,
    write,
)
from msatools.render.cpus.stalls import stall_lines
from msatools.render.cpus.tables import (
    irq_tables,
    queue_lines,
    sets_in_full,
    sets_table,
)
from msatools.render.header import header, notes
from msatools.reports.units import ranges

__all__ = (
    "COLUMNS",
    "View",
    "cpus_blocks",
)

# --- A plan to isolate CPUs: commands to copy, between shell comments.


_SHOWN = 8


def plan_lines(plan: CpuPlan) -> Iterator[Block]:
    """Yield the lines of a plan; all but the commands begin with ``#``.

    No line is wrapped, because its second half would not be a comment.
    """
    apart, others = ranges(plan.cpus), ranges(plan.others)
    head = f"# To set CPU {apart} apart, and leave {others} for all else; not run here"
    yield _whole(Span(head, "title"))
    for step in plan.steps:
        yield line()
        yield _whole(f"# {step.name}: {step.text}")
        for command in step.commands:
            yield verbatim(f"# {command}" if step.name == "boot" else command)
    yield line()
    yield _whole(Span(f"# What stays on {apart} all the same:", "title"))
    for rest in plan.stays:
        yield _whole(f"# - {rest.text}{_numbers(rest)}")


def comments(lines: Iterable[Block]) -> Iterator[Block]:
    """Yield the lines of a report around a plan, as shell comments."""
    for each in lines:
        yield _whole("# ", *each.spans) if _has_text(each) else each


def _whole(*spans: Cell) -> Text:
    return Text(spans, narrow="keep")


def _has_text(block: Block) -> TypeGuard[Text]:
    return isinstance(block, Text) and bool(block.spans)


def _numbers(rest: PlanRest) -> str:
    """Return the numbers of interrupts or tasks that stay; empty if there are none."""
    if rest.irqs:
        return f" (irq {ranges(rest.irqs, _SHOWN)})"
    if rest.pids:
        return f" (pid {ranges(rest.pids, _SHOWN)})"
    return ""


# --- the report


View = Literal["cpus", "irqs", "info", "sets", "stalls", "stacks"]

_MANY = 128
"""Number of CPUs above which idle ones are summed up in a line."""


def cpus_blocks(
    report: CpusReport,
    *,
    view: View = "cpus",
    columns: Sequence[str] | None = None,
    rows: int | None = None,
    verbose: bool = False,
    some: bool = False,
) -> Iterator[Block]:
    """Yield the blocks of an ``msa-cpus`` report.

    :param columns: Columns of the table of CPUs, if not the default; ``all`` stands for
        :data:`msatools.render.cpus.columns.COLUMNS`.
    :param rows: Number of CPUs, interrupts, or tasks of a list, if not the default.
    :param some: Whether only some CPUs were requested.
    """
    head = header(report.target, *_facts(report), verbose=verbose)
    if report.plan is not None:
        yield from comments(head)
        yield from plan_lines(report.plan)
        yield from comments(_foot(report, verbose))
        return
    yield from head
    if view == "stalls" and (report.cpus or not some):
        if report.stalls is not None:
            yield from stall_lines(report.stalls, verbose=verbose)
        yield from _foot(report, verbose)
        return
    if view == "stacks" and (report.cpus or not some):
        yield from _stacks(report)
        yield from _foot(report, verbose)
        return
    yield from sets_table(report, limits=view == "sets", verbose=verbose)
    if some and not report.cpus:
        yield line("No CPU matches the selection.")
    elif view == "irqs":
        yield from irq_tables(report, rows=rows, verbose=verbose)
    elif view == "info":
        yield from _info(report, rows)
    elif view == "sets":
        yield from sets_in_full(report, rows=rows, verbose=verbose)
    else:
        yield from _cpus(report, columns, rows, verbose)
        if verbose:
            yield from queue_lines(report.run_queues, rows)
    yield from findings_lines(report.findings)
    yield from _foot(report, verbose)


def _facts(report: CpusReport) -> Iterator[str]:
    possible = possible_cpus(report)
    if is_part(report):
        yield f"{len(report.cpus):,} of {plural(possible, 'CPU')}"
    else:
        online = sum(cpu.online for cpu in report.cpus)
        of = f" of {possible:,}" if online < possible else ""
        yield f"{plural(online, 'CPU')} online{of}"
    if report.load is not None:
        yield "load " + " ".join(f"{average:.2f}" for average in report.load)
    if report.taken_at_ns is not None:
        yield f"now {report.taken_at_ns / 1e9:.3f} s"
    if report.interval_ns is not None:
        yield f"interval {report.interval_ns / 1e9:.3f} s, counts per second"


# --- the table of CPUs, as mpstat's


def _cpus(
    report: CpusReport, columns: Sequence[str] | None, rows: int | None, verbose: bool
) -> Iterator[Block]:
    cpus, off = list(report.cpus), []
    if not (verbose or is_part(report)) and any(cpu.online for cpu in cpus):
        off = [cpu.cpu for cpu in cpus if not cpu.online]
        cpus = [cpu for cpu in cpus if cpu.online]
    names = default_columns(cpus) if columns is None else _named(columns)
    about = context(report, names, verbose)
    idle: list[int] = []
    if len(cpus) > _MANY and not (columns is not None or rows or verbose):
        idle = [cpu.cpu for cpu in cpus if _does_nothing(cpu)]
        cpus = [cpu for cpu in cpus if not _does_nothing(cpu)]
    shown = cpus[:rows]
    if shown:
        cells = [[write(name, cpu, about) for name in names] for cpu in shown]
        yield Table(
            make_columns(names),
            cells,
            More("CPU", len(cpus) - len(shown), is_chosen=rows is not None),
            keeps_all=columns is not None,
        )
    if idle:
        words = f"… {plural(len(idle), 'CPU')} idle 100 %: {numbers_text(idle)}"
        it = "it" if len(idle) == 1 else "them"
        yield line(Span(words, "dim"), advice(f"-v shows {it}"))
    if off:
        yield line(Span(f"offline: {numbers_text(off)}", "dim"))
    if columns is not None:
        yield from explanations(names)


def _named(columns: Sequence[str]) -> Sequence[str]:
    return COLUMNS if "all" in columns else columns


def _does_nothing(cpu: Cpu) -> bool:
    """Return whether a CPU is idle now and was idle 100 % of the time."""
    if not is_idle(cpu) or cpu.runq or "inactive" in cpu.state:
        return False
    idle, total = cpu.idl_ns, total_ns(cpu)
    return idle is not None and total is not None and share(idle, total) == "100"


# --- stacks


def _stacks(report: CpusReport) -> Iterator[Block]:
    if report.stacks is None:
        yield line("Stacks of CPUs are only known in a dump.")
    online = {cpu.cpu for cpu in report.cpus if cpu.online}
    for stack in report.stacks or ():
        who = "" if stack.pid is None else f"  pid {stack.pid} {stack.comm}"
        yield line(f"CPU {stack.cpu}{who}")
        if stack.frames is None:
            why = "its stack is not known" if stack.cpu in online else "offline"
            yield line(Span(f"    {why}", "dim"))
        for frame in stack.frames or ():
            yield cut_line(f"    {frame}")


# --- the table of processors, as psrinfo's


def _info(report: CpusReport, rows: int | None) -> Iterator[Block]:
    if words := _topology(report):
        yield line(words)
    about = context(report, (), full=True)
    cpus = report.cpus[:rows]
    has_dies = any(cpu.processor.die for cpu in report.cpus)
    columns = [
        Column("CPU", "right"),
        free_text("STATE", least=12),
        Column("NODE", "right"),
        Column("PACKAGE", "right"),
        *([Column("DIE", "right", worth=2)] if has_dies else []),
        Column("CORE", "right"),
        Column("THREAD", "right", worth=4),
        free_text("SIBLINGS", worth=3, least=8),
        Column("CAPACITY", "right", worth=1),
        free_text("HOTPLUG", least=10),
        free_text("IDLE-STATE", worth=0, least=10),
        Column("TICK"),
    ]
    yield Table(
        tuple(columns),
        [_processor(cpu, about, has_dies) for cpu in cpus],
        More("CPU", len(report.cpus) - len(cpus), is_chosen=rows is not None),
    )


def _topology(report: CpusReport) -> str:
    """Return the counts of packages, cores, threads and nodes; empty if unknown."""
    known = [cpu.processor for cpu in report.cpus if cpu.online]
    packages = {processor.package for processor in known}
    cores = {processor.siblings for processor in known}
    if not known or None in packages or () in cores:
        return ""
    parts = [
        plural(len(packages), "package"),
        plural(len(cores), "core"),
        plural(len(known), "thread"),
    ]
    if nodes := {processor.node for processor in known} - {None}:
        parts.append(plural(len(nodes), "NUMA node"))
    return ", ".join(parts)


def _processor(cpu: Cpu, about: CpuContext, has_dies: bool) -> Sequence[Cell]:
    processor = cpu.processor
    dies = [processor.die] if has_dies else []
    location = [processor.node, processor.package, *dies]
    hotplug = processor.hotplug or NOT_KEPT
    if processor.hotplug_target is not None:
        hotplug += f" -> {processor.hotplug_target}"
    return (
        str(cpu.cpu),
        state_cell(cpu, about),
        *map(number_text, (*location, processor.core, processor.thread)),
        numbers_text(processor.siblings) if processor.siblings else NOT_KEPT,
        number_text(processor.capacity),
        Span(hotplug, "warn") if processor.hotplug_target is not None else hotplug,
        _idle_state(cpu),
        _TICKS[processor.tick_stopped if cpu.online else None],
    )


_TICKS = {True: "stopped", False: "on", None: NOT_KEPT}


def _idle_state(cpu: Cpu) -> str:
    name, depth = cpu.processor.idle_state, cpu.processor.idle_depth
    if name is None:
        return number_text(depth)
    return name if depth is None else f"{name} ({depth})"


# --- coverage and notes, below the report

_LOSSES = ("_unreadable", "_broken", "_lost", "_unknown", "_differ")


def _foot(report: CpusReport, verbose: bool) -> Iterator[Text]:
    counts = {key: number for key, number in report.coverage.items() if number}
    lost = {key: number for key, number in counts.items() if key.endswith(_LOSSES)}
    # Complete coverage needs no line in each interval.
    if lost or verbose:
        parts = [
            ", ".join(
                f"{number:,} {key.replace('_', ' ')}" for key, number in some.items()
            )
            for some in (
                {key: n for key, n in counts.items() if key not in lost},
                lost or {"lost": 0},
            )
        ]
        yield line("coverage: " + "; ".join(part for part in parts if part))
    yield from notes(report)
