# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders prstat's report as tables."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from msgspec.structs import replace

from msatools.locks.report import Herd
from msatools.prstat.model import (
    ClassGroup,
    Load,
    PrstatReport,
    StackGroup,
    TaskGroup,
    TaskRow,
    Why,
)
from msatools.prstat.rows import TaskRows
from msatools.prstat.select import DELAY_OF
from msatools.prstat.states import StateTime
from msatools.render.blocks import (
    BOUND_MARKS,
    ESTIMATE,
    NOT_KEPT,
    Block,
    Cell,
    CellColumns,
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
    number_text,
    plural,
    user,
    verbatim,
)
from msatools.render.header import among_read, header, notes, times
from msatools.render.on import on_text, woken_words
from msatools.render.prstat.columns import TaskContext, cells, context, make_columns
from msatools.reports.units import duration, duration_range, short_size

DEFAULT = (
    *("PID", "USER", "SIZE", "RSS", "STATE", "PRI", "NICE", "TIME", "CPU"),
    *("NOW", "FOR", "PROCESS/NLWP"),
)
MICROSTATES = ("PID", "USR", "SYS", "TRP", "TFL", "DFL", "LCK", "SLP", "LAT")
"""Columns of prstat -m on Solaris."""

SLEEPS = ("IOW", "BLK", "INT", "COV")
DELAYS = ("BIO", "SWP", "RCL", "THR", "CMP", "COW", "IRQ")
DOINGS = ("NOW", "FOR", "ON", "VCX", "ICX", "MIN", "MAJ", "SCL", "SIG")
CHILDREN = ("PID", "CUSR", "CSYS", "CVCX", "CICX", "CMIN", "CMAJ", "PROCESS/NLWP")

INTERVAL_ROWS = 20
_LEGEND = "~ estimate  < at most  > at least  - not kept (SCL, SIG and TRP by no Linux)"
_MAX_PIDS = 8
_SEEN = {"one dump": "by one look", "confirmed": "all slept again in the interval"}


def _no_stack(report: PrstatReport) -> str:
    running = report.totals.classes.get("CPU", 0)
    if report.target.live and running == report.totals.threads:
        who = "It runs" if running == 1 else "They run"
        return f"{who}: the stack of a task that runs on a live kernel moves."
    return "No stack matches the selection."


def prstat_blocks(
    report: PrstatReport,
    *,
    microstates: bool = False,
    columns: tuple[str, ...] | None = None,
    rows: int | None = None,
    verbose: bool = False,
) -> Iterator[Block]:
    """Yield the blocks of an ``msa-prstat`` report.

    :param microstates: Whether to show the microstates (``-m``).
    :param columns: Columns to show, if not the default.
    :param rows: Number of rows or groups; if not given, an interval shows the first
        :data:`INTERVAL_ROWS` rows.
    """
    if report.why is not None:
        yield from _why(report.why)
        return
    yield from header(report.target, *_facts(report), verbose=verbose)
    if report.selects and not report.totals.threads:
        yield _nobody(report)
    elif report.load is not None:
        yield from _load(report, report.load, rows)
    elif report.states is not None:
        yield _states(report.states, rows)
    elif report.stacks is not None:
        if not report.stacks:
            yield line(_no_stack(report))
        stacks = [tuple(_stack(g, verbose)) for g in report.stacks[:rows]]
        more = _left(report.stacks, rows)
        yield Items(stacks, replace(more, is_chosen=more.is_chosen or verbose))
    else:
        shown = report.tasks
        if rows is None and report.interval_ns is not None:
            shown = shown[:INTERVAL_ROWS]
        names = columns or _names(report, microstates, shown)
        about = context(report, verbose)
        yield Table(
            make_columns(names, report),
            _Cells(shown, names, about),
            More("row", len(report.tasks) - len(shown), is_chosen=rows is not None),
            keeps_all=columns is not None,
        )
        if microstates and columns is None:
            yield line(Span(_LEGEND, "dim"), advice("--why COL says more", "; "))
        yield from _stuck(report, shown)
    if report.totals.threads:
        yield from _all_groups(report, rows)
        yield _total(report)
        yield _classes(report)
    for herd in report.herds:
        yield line(Span(_herd(herd, report.interval_ns), "warn"))
    yield from notes(report)


def folded(
    report: PrstatReport, weight: str, rows: int | None = None
) -> Iterator[Text]:
    """Yield stacks in the input format of flame graph tools, outermost first.

    :param weight: ``age``: microseconds of all waits; ``count``: threads.
    :param rows: Number of groups of threads with one stack, if not all.
    """
    if not report.stacks:
        # Flame graph tools skip lines that do not end with a number.
        yield line("# No stack matches the selection.")
    for group in (report.stacks or ())[:rows]:
        by_comm: dict[str, int] = {}
        for comm, age_ns in zip(group.comms, group.ages_ns, strict=True):
            amount = age_ns // 1000 if weight == "age" else 1
            by_comm[comm] = by_comm.get(comm, 0) + amount
        frames = ";".join(reversed(group.frames))
        for comm, amount in by_comm.items():
            # The format reserves these two characters.
            name = comm.replace(";", ":").replace(" ", "_")
            yield verbatim(f"{name};{frames} {amount}")


class _Cells(CellColumns):
    """Rows of cells, made on access."""

    def __init__(
        self, rows: Sequence[TaskRow], names: tuple[str, ...], about: TaskContext
    ) -> None:
        self._rows = rows
        self._names = names
        self._about = about

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence[Cell]]:
        for columns in self.batches():
            yield from zip(*columns, strict=True)

    def batches(self) -> Iterator[Sequence[Sequence[Cell]]]:
        return cells(self._names, self._rows, self._about)

    @overload
    def __getitem__(self, index: int) -> Sequence[Cell]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[Cell]]: ...
    def __getitem__(
        self, index: int | slice
    ) -> Sequence[Cell] | Sequence[Sequence[Cell]]:
        if isinstance(index, slice):
            return _Cells(self._rows[index], self._names, self._about)
        return next(iter(_Cells([self._rows[index]], self._names, self._about)))


def _names(
    report: PrstatReport, microstates: bool, shown: Sequence[TaskRow]
) -> tuple[str, ...]:
    """Return the default columns for the options and the kernel's accounting.

    :param shown: The rows to print; they say whether a task was stopped for a while.
    """
    if any(row.children is not None for row in report.tasks[:1]):
        return CHILDREN
    if not microstates:
        return DEFAULT
    names: tuple[str, ...] = MICROSTATES
    stops = bool({"STP", "TRC"} & report.totals.classes.keys())
    if not stops and report.interval_ns is not None:
        stops = any(row.waited and row.waited.stopped_ns for row in shown)
    if stops or report.accounting.schedstats:
        names += ("STP",)
    if "ZMB" in report.totals.classes:
        names += ("ZMB",)
    if report.interval_ns is not None:
        names += ("OFF-BY",)
    elif report.accounting.schedstats:
        names += SLEEPS
    if report.accounting.delayacct and report.interval_ns is None:
        # All threads have the same delays: those of this kernel.
        split = next((r.breakdown for r in report.tasks if r.breakdown), None)
        kept = set(split.delays) if split else set()
        names += tuple(name for name in DELAYS if DELAY_OF[name] in kept)
    return (*names, *DOINGS, "PROCESS/NLWP")


def _facts(report: PrstatReport) -> Iterator[str]:
    yield from times(report)
    switches = {
        "schedstats": report.accounting.schedstats,
        "delayacct": report.accounting.delayacct,
    }
    words = {True: "on", False: "off", None: "not kept"}
    yield ", ".join(f"{name} {words[is_on]}" for name, is_on in switches.items())


def _total(report: PrstatReport) -> Text:
    totals = report.totals
    states = ", ".join(f"{count:,} {name}" for name, count in totals.states.items())
    words = f"Total: {plural(totals.processes, 'process', 'processes')}, "
    words += plural(totals.threads, "thread")
    if states:
        words += f" ({states})"
    if totals.load_averages is not None:
        averages = ", ".join(f"{value:.2f}" for value in totals.load_averages)
        words += f", load averages: {averages}"
    return line(Span(words, "title"))


def _stuck(report: PrstatReport, shown: Sequence[TaskRow]) -> Iterator[Text]:
    """Yield the number of threads in state D, if a dump's table lacks some of them."""
    count = report.totals.states.get("D", 0)
    if report.target.live or not count or count <= _stuck_rows(shown):
        return
    words = f"{plural(count, 'thread')} in state D: -L --state D lists "
    yield line(Span(words + ("it" if count == 1 else "them"), "warn"))


def _stuck_rows(rows: Sequence[TaskRow]) -> int:
    if isinstance(rows, TaskRows):
        return int(np.count_nonzero(rows.columns["state"] == "D"))
    return sum(row.state == "D" for row in rows)


def _classes(report: PrstatReport) -> Text:
    classes = report.totals.classes
    return line(
        "Now: " + (", ".join(f"{n:,} {name}" for name, n in classes.items()) or "-")
    )


def _herd(herd: Herd, interval_ns: int | None) -> str:
    owner = NOT_KEPT if herd.owner is None else str(herd.owner)
    how = _SEEN[herd.confidence]
    name = f" ({herd.name})" if herd.name else ""
    ages = duration_range(herd.min_age_ns, herd.max_age_ns)
    words = (
        f"HERD {herd.lock}{name}: {herd.waiters:,} waiters woken together, asleep for "
        f"{ages} after {herd.nvcsw_median:,} "
        f"sleeps each (median); owner {owner}; {how}"
    )
    return "; ".join([words, *woken_words(herd, interval_ns)])


def _nobody(report: PrstatReport) -> Text:
    """Return the line for a selection that matches no task."""
    return line(f"No task matches the selection{among_read(report)}.")


_TITLES = {
    "user": "USER",
    "cgroup": "CGROUP",
    "container": "CONTAINER",
    "ns": "PID NAMESPACE",
    "comm": "COMMAND",
}


def _all_groups(report: PrstatReport, limit: int | None) -> Iterator[Block]:
    """Yield the tables of all requested groups.

    :param limit: Maximum groups of each table.
    """
    requested = (("user", report.users), ("cgroup", report.cgroups))
    for kind, groups in (*requested, *(report.by or {}).items()):
        if groups is None:
            continue
        shown, more = groups[:limit], _left(groups, limit)
        if kind == "class":
            of_classes = [group for group in shown if isinstance(group, ClassGroup)]
            yield _by_class(of_classes, more)
        else:
            of_tasks = [group for group in shown if isinstance(group, TaskGroup)]
            yield _groups(report, of_tasks, _TITLES[kind], more)


def _left(groups: Sequence[object], limit: int | None) -> More:
    left = 0 if limit is None else len(groups) - limit
    return More("group", left, is_chosen=limit is not None)


def _by_class(groups: Sequence[ClassGroup], more: More) -> Table:
    has_times = any(group.ns is not None for group in groups)
    times = ("TIME", "ERROR") if has_times else ()
    headers = ("NPROC", "NLWP", "FOR, SUMMED", "LONGEST", *times)
    columns = (*(Column(name, "right") for name in headers), Column("CLASS"))
    rows = [
        (
            str(group.processes),
            str(group.threads),
            duration(group.age_ns) if group.threads else NOT_KEPT,
            duration(group.max_age_ns) if group.threads else NOT_KEPT,
            *(_class_times(group) if has_times else ()),
            group.key,
        )
        for group in groups
    ]
    return Table(columns, rows, more)


def _class_times(group: ClassGroup) -> tuple[str, str]:
    if not group.error_ns:
        return duration(group.ns or 0), "0"
    return ESTIMATE + duration(group.ns or 0), duration(group.error_ns)


def _groups(
    report: PrstatReport, groups: Sequence[TaskGroup], title: str, more: More
) -> Table:
    ram = report.totals.ram_bytes
    names = title == "USER" and report.target.kind == "kcore"

    def label(key: str) -> str:
        return user(int(key), names) if names and key != NOT_KEPT else key

    headers = ("NPROC", "NLWP", "SIZE", "RSS", "MEMORY", "TIME", "CPU")
    columns = tuple(Column(name, "right") for name in headers)
    key = Column(title, least=24, keeps="end", is_key=True)
    rows = [
        (
            str(group.processes),
            str(group.threads),
            short_size(group.size_bytes),
            short_size(group.rss_bytes),
            f"{100 * group.rss_bytes / ram:.1f}%" if ram else NOT_KEPT,
            duration(group.cpu_ns),
            f"{100 * group.cpu_share:.1f}%",
            label(group.key),
        )
        for group in groups
    ]
    return Table((*columns, key), rows, more)


def _load(report: PrstatReport, load: Load, limit: int | None) -> Iterator[Block]:
    averages = report.totals.load_averages
    shown = " ".join(f"{v:.2f}" for v in averages) if averages else NOT_KEPT
    yield line(
        f"Load averages {shown}; now {load.runnable + load.uninterruptible}: "
        f"{load.runnable} running or runnable, {load.uninterruptible} in state D; "
        f"{plural(report.totals.cpus, 'CPU')} online"
    )
    rows = [
        (
            str(len(group.pids)),
            group.state,
            group.task_class,
            duration(group.max_age_ns),
            group.comm,
            NOT_KEPT if group.on is None else on_text(group.on),
            group.function or NOT_KEPT,
            _pids(group.pids),
        )
        for group in load.groups[:limit]
    ]
    if not rows:
        return
    columns = (
        Column("COUNT", "right"),
        Column("STATE"),
        Column("NOW"),
        Column("OLDEST", "right"),
        free_text("COMMAND", least=12),
        free_text("ON"),
        free_text("FUNCTION", worth=1, least=12),
        free_text("PIDS", worth=0, least=10),
    )
    yield Table(columns, rows, _left(load.groups, limit))


def _pids(pids: Sequence[int]) -> str:
    shown = " ".join(map(str, pids[:_MAX_PIDS]))
    return shown if len(pids) <= _MAX_PIDS else f"{shown} +{len(pids) - _MAX_PIDS}"


def _states(states: Sequence[StateTime], limit: int | None) -> Table:
    rows = [_state(state) for state in states[:limit]]
    left = len(states) - len(rows)
    columns = (
        Column("STATE"),
        Column("FROM"),
        Column("TIME", "right"),
        Column("NOW", "right"),
        Column("FOR, SUMMED", "right", worth=0),
        free_text("WHERE IT COMES FROM, OR WHY THERE IS NONE", least=24),
    )
    return Table(columns, rows, More("state", left, is_chosen=limit is not None))


def _state(state: StateTime) -> Sequence[Cell]:
    time = NOT_KEPT
    if state.ns is not None:
        time = BOUND_MARKS.get(state.bound, "") + duration(state.ns)
    threads, since = state.now_threads, state.now_ns
    return (
        Span(state.name, "title"),
        state.family,
        time,
        number_text(threads),
        NOT_KEPT if since is None or not threads else duration(since),
        state.reason,
    )


def _stack(group: StackGroup, verbose: bool) -> Iterator[Text]:
    ages = duration_range(group.min_age_ns, group.max_age_ns)
    comms = sorted(set(group.comms))
    names = ", ".join(comms if verbose else comms[:_MAX_PIDS])
    pids = " ".join(map(str, group.pids)) if verbose else _pids(group.pids)
    count = plural(len(group.pids), "thread")
    head = f"{count}  {group.task_class}  {ages}"
    yield line(Span(head, "title"), f"  {names}: {pids}")
    for frame in group.frames:
        yield cut_line(f"    {frame}")
    yield line()


def _why(reasons: Sequence[Why]) -> Iterator[Block]:
    from msatools.render.legend import why_lines

    for reason in reasons:
        yield from why_lines(reason.field, "", reason.text, reason.bound)
