# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders processor sets, run queues and interrupts."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from msatools.cpus.model import (
    BoundTask,
    CpuSet,
    CpusReport,
    Irq,
    RunnableTask,
    RunQueue,
    SchedClass,
    SetTasks,
    Vector,
)
from msatools.render import plain
from msatools.render.blocks import (
    BOUND_MARKS,
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
    more,
    plural,
)
from msatools.render.cpus.columns import (
    INDENT,
    amount,
    is_part,
    kind_cell,
    numbers_text,
    percent,
)
from msatools.reports.units import duration, ranges

# --- Renders processor sets: a table of all, and the details of each.


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
    """Return the counts of device interrupts routed to a set and allowed on it."""
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


# --- the details of one set


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
    for cells in plain.lines(Table(columns, [_sets_task(t, verbose) for t in shown])):
        yield cut_line(INDENT * 2, *cells)
    for text in more(len(tasks) - len(shown), f"{how} task"):
        yield line(INDENT * 2, *text.spans)


def _sets_task(task: BoundTask, verbose: bool) -> Sequence[Cell]:
    cells: tuple[Cell, ...] = (
        str(task.pid),
        f"[{task.comm}]" if task.kthread else task.comm,
        numbers_text(task.cpus, verbose),
        Span(task.cgroup or NOT_KEPT, "dim"),
    )
    return (*cells, task.why) if task.why else cells


# --- Renders run queues: running task, waiting tasks and clock of each CPU.


_CLASSES: Mapping[str, SchedClass] = {
    "FIFO": "realtime",
    "RR": "realtime",
    "DEADLINE": "deadline",
}
"""Maps a policy to its scheduling class, if not the fair class."""

_LATE_NS = 100_000_000
"""Minimum lag of a clock to show: ten ticks at a low HZ."""

_NORMAL = (None, "idle")

_DELAYS = frozenset({"delay_tsc", "delay_loop", "__delay", "__const_udelay"})
"""Functions in which panic() waits on the CPU that panicked (kernel/panic.c)."""


def queue_lines(queues: Sequence[RunQueue], rows: int | None) -> Iterator[Text]:
    """Yield each CPU's running task, and below it the waiting tasks in order.

    :param rows: Maximum waiting tasks of each CPU; all if not given.
    """
    quiet: dict[str, list[int]] = {"idle": [], "offline": []}
    for queue in queues:
        if (why := _quiet(queue)) is not None:
            quiet[why].append(queue.cpu)
            continue
        yield line(Span(f"cpu {queue.cpu}", "title"), "  ", *_head(queue))
        yield from _clock(queue)
        yield from _waiting(queue.waiting, rows)
    for why, cpus in quiet.items():
        if cpus:
            words = "cpu" if len(cpus) == 1 else "cpus"
            yield line(Span(f"{words} {ranges(cpus)} {why}", "dim"))


def _quiet(queue: RunQueue) -> str | None:
    """Return the reason to omit a CPU's line; ``None`` to show it."""
    if queue.waiting or queue.panicked:
        return None
    if queue.lag_why == "offline":
        return "offline"
    is_idle = queue.current is not None and queue.current.sched_class == "idle"
    return "idle" if is_idle and queue.lag_why in _NORMAL else None


def _head(queue: RunQueue) -> Iterator[Cell]:
    parts = []
    if queue.waiting:
        throttled = sum(task.throttled for task in queue.waiting)
        words = f"{len(queue.waiting):,} waiting"
        parts.append(words + (f" ({throttled:,} throttled)" if throttled else ""))
    current = queue.current
    if current is None:
        parts.append(f"running: {NOT_KEPT}")
        yield ", ".join(parts)
        return
    is_idle = current.sched_class == "idle"
    parts.append("idle" if is_idle else "running")
    if queue.switched_ns is not None:
        parts[-1] += f" {BOUND_MARKS[current.wait_bound]}{duration(queue.switched_ns)}"
    yield ", ".join(parts)
    if not is_idle:
        yield f": {current.pid} {current.comm}  {_policy(current)}"
        yield Span(f"  {_cgroup(current)}", "dim")


def _clock(queue: RunQueue) -> Iterator[Text]:
    """Yield a line on a CPU's activity, clock and panic, if there is any to show."""
    words = [] if queue.doing is None else [queue.doing]
    if queue.panicked and _DELAYS.intersection((queue.doing or "").split()):
        words = ["waits in panic()"]
    if queue.lag_why not in _NORMAL:
        words.append(str(queue.lag_why))
    if queue.lag_ns is not None and queue.lag_ns >= _LATE_NS:
        words.append(f"its clock is {duration(queue.lag_ns)} behind")
    if queue.ticked_ns is not None:
        words.append(f"last tick {duration(queue.ticked_ns)} ago")
    cells: list[Cell] = [", ".join(words)] if words else []
    if queue.lag_why in ("interrupts off", "not run by its host"):
        cells = [Span(", ".join(words), "bad")]
    if queue.panicked:
        cells += ["; "] if words else []
        cells.append(Span("the CPU that panicked", "bad"))
    if cells:
        # If tasks wait, the tree's vertical line continues.
        yield line(Span("|    " if queue.waiting else "     ", "dim"), *cells)


def _waiting(tasks: Sequence[RunnableTask], rows: int | None) -> Iterator[Text]:
    shown = tasks[:rows]
    columns = (Column("", "right"), Column(""), Column(""), Column(""), Column(""))
    _, *lines = plain.lines(Table(columns, list(map(_queues_task, shown))))
    left = len(tasks) - len(shown)
    for number, cells in enumerate(lines, 1):
        is_last = number == len(shown) and not left
        yield cut_line(Span("`- " if is_last else "|- ", "dim"), *cells)
    for text in more(left, "task"):
        yield line(Span("`- ", "dim"), *text.spans)


def _queues_task(task: RunnableTask) -> Sequence[Cell]:
    waits = NOT_KEPT
    if task.wait_ns is not None:
        waits = BOUND_MARKS[task.wait_bound] + duration(task.wait_ns)
    return (
        str(task.pid),
        task.comm,
        _policy(task),
        f"waits {waits}" + (", throttled" if task.throttled else ""),
        Span(_cgroup(task), "dim"),
    )


def _cgroup(task: RunnableTask) -> str:
    """Return the control group of a task; empty for the root group."""
    return "" if task.cgroup in (None, "/") else str(task.cgroup)


def _policy(task: RunnableTask) -> str:
    """Return the policy and priority of a task: ``RR 40``, ``OTHER nice 5``."""
    words = "SCHED_IDLE" if task.policy == "IDLE" else task.policy
    if task.rt_priority is not None:
        words += f" {task.rt_priority}"
    if task.nice:
        words += f" nice {task.nice}"
    if task.sched_class != _CLASSES.get(task.policy, "fair"):
        # The task has inherited a priority, or the class has no policy.
        words += f" ({task.sched_class})"
    if task.deadline_ns is not None:
        due = duration(abs(task.deadline_ns))
        words += f", {due} late" if task.deadline_ns < 0 else f", due in {due}"
    return words


# --- Renders device interrupts, architecture interrupts and softirqs, by CPU.


_CPUS = 16
"""Maximum number of CPUs with a column each."""

_WIDTH = 120
"""Maximum width of a table with a column for each CPU."""

_NAME_WIDTH = 32
_WHY_NO_TIME = "time per interrupt: Linux keeps none"


def irq_tables(
    report: CpusReport, *, rows: int | None, verbose: bool
) -> Iterator[Block]:
    """Yield the tables of device interrupts, architecture interrupts and softirqs.

    :param rows: Maximum number of device interrupts; all if not given.
    :param verbose: Whether to list interrupts without any count, too.
    """
    yield from _devices(report, rows, verbose)
    for header, vectors in (
        ("VECTOR", report.vectors),
        ("SOFTIRQ", report.softirqs),
    ):
        shown = [row for row in vectors or () if verbose or row.total != 0]
        if shown:
            yield line()
            yield _vectors(header, shown, report)
    if verbose:
        yield line(Span(_WHY_NO_TIME, "dim"))


def _devices(report: CpusReport, rows: int | None, verbose: bool) -> Iterator[Block]:
    if report.irqs is None:
        yield line("Interrupts of devices were not read.")
        return
    ranked = sorted(report.irqs, key=lambda irq: (-(irq.total or 0), irq.irq))
    wanted = [irq for irq in ranked if verbose or irq.total != 0]
    if not wanted:
        yield line("No device has interrupted.")
    else:
        shown = wanted[:rows]
        left = len(wanted) - len(shown)
        more = More("interrupt", left, is_chosen=rows is not None)
        yield replace(_device_table(shown, report, verbose), more=more)
    if still := len(ranked) - len(wanted):
        it = "it" if still == 1 else "them"
        words = Span(f"… {plural(still, 'interrupt')} did not come", "dim")
        yield line(words, advice(f"-v shows {it}"))


def _device_table(irqs: Sequence[Irq], report: CpusReport, verbose: bool) -> Table:
    columns = [Column("IRQ", "right"), free_text("NAME", least=12)]
    if verbose:
        columns.append(free_text("CHIP", worth=0, least=8))
        columns.append(free_text("HANDLER", worth=1, least=8))
    columns += [
        free_text("AFFINITY", worth=3, least=12),
        free_text("GOES-TO", worth=4, least=7),
        Column("COUNT", "right"),
        Column("SHARE", "right"),
    ]
    rows = [
        _CpuRow(_device(irq, report.interval_ns, verbose), irq.counts, irq.total)
        for irq in irqs
    ]
    return _by_cpu(columns, rows, report)


def _device(irq: Irq, interval_ns: int | None, verbose: bool) -> Sequence[Cell]:
    affinity = numbers_text(irq.affinity, verbose)
    return (
        str(irq.irq),
        _name(irq, verbose),
        *((irq.chip or NOT_KEPT, _handlers(irq)) if verbose else ()),
        affinity + _remarks(irq),
        numbers_text(irq.effective, verbose),
        amount(irq.total, interval_ns),
        percent(irq.share),
    )


def _handlers(irq: Irq) -> str:
    """Return the functions of an interrupt's handlers, each once."""
    return ", ".join(dict.fromkeys(irq.functions)) or NOT_KEPT


def _remarks(irq: Irq) -> str:
    words = ["managed"] * irq.managed + ["disabled"] * irq.disabled
    return f" ({', '.join(words)})" if words else ""


def _name(irq: Irq, verbose: bool) -> str:
    if len(irq.name) > _NAME_WIDTH and not verbose:
        return f"{irq.name[: _NAME_WIDTH - 1]}…"
    return irq.name or NOT_KEPT


def _vectors(header: str, vectors: Sequence[Vector], report: CpusReport) -> Table:
    columns = (Column(header), Column("COUNT", "right"))
    rows = [
        _CpuRow(
            (vector.name, amount(vector.total, report.interval_ns)),
            vector.counts,
            vector.total,
            (vector.text,),
        )
        for vector in vectors
    ]
    return _by_cpu(columns, rows, report, free_text("WHAT", worth=1))


# --- by CPU


class _CpuRow(Struct, frozen=True):
    """A row of a table with counts by CPU, and the cells before and after them."""

    cells: Sequence[Cell]
    counts: Mapping[int, int]
    total: int | None
    last: Sequence[Cell] = ()


def _by_cpu(
    columns: Sequence[Column],
    rows: Sequence[_CpuRow],
    report: CpusReport,
    *last: Column,
) -> Table:
    """Return a table with a column a CPU, or of the busiest CPU if too wide."""
    numbers = [cpu.cpu for cpu in report.cpus]
    cpus = [cpu for cpu in numbers if any(cpu in row.counts for row in rows)]
    cells = [(*row.cells, _most(row), *row.last) for row in rows]
    summed_up = Table((*columns, Column("MOST ON"), *last), cells)
    if len(cpus) <= _CPUS:
        by_cpu = [Column(f"cpu{cpu}", "right") for cpu in cpus]
        cells = [
            (*row.cells, *_counts(row, cpus, report.interval_ns), *row.last)
            for row in rows
        ]
        table = Table((*columns, *by_cpu, *last), cells, narrower=summed_up)
        if _width(table) <= _WIDTH:
            return table
    return summed_up


def _counts(
    row: _CpuRow, cpus: Sequence[int], interval_ns: int | None
) -> Sequence[Cell]:
    if row.total != 0 and not row.counts:
        # There is no count by CPU, or it could not be read.
        return [NOT_KEPT] * len(cpus)
    return [amount(row.counts.get(cpu, 0), interval_ns) for cpu in cpus]


def _most(row: _CpuRow) -> str:
    if not row.counts or not row.total:
        return NOT_KEPT
    cpu, count = max(row.counts.items(), key=lambda item: (item[1], -item[0]))
    share = 100 * count // row.total
    return f"cpu{cpu} {share or '<1'} %"


def _width(table: Table) -> int:
    return max(sum(len(span.text) for span in spans) for spans in plain.lines(table))
