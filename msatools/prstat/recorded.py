# SPDX-License-Identifier: LGPL-2.1-or-later

"""Recorded reports of prstat: data of all threads, from which rows are built later.

Pure. Loads are grouped here, too: the load averages count runnable threads and those in
uninterruptible sleep (kernel/sched/loadavg.c).

:mod:`msatools.prstat.prstat` builds other reports from the same parts.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from msatools.errors import DamagedDataError
from msatools.kernel.reader import distinct
from msatools.kernel.structs import Booleans
from msatools.locks.herds import MIN_WAITERS
from msatools.locks.report import WaitTarget
from msatools.model import is_model, values
from msatools.program.model import UNLISTED, Target
from msatools.prstat.model import Load, LoadGroup, PrstatReport, Totals
from msatools.prstat.rows import Kept, TaskRows, process_rows, thread_rows
from msatools.prstat.select import (
    Indices,
    Options,
    any_thread,
    group_by,
    group_by_class,
    order,
    selected,
)
from msatools.tasks.identity import comm_text
from msatools.tasks.sampler import AgeBound
from msatools.tasks.states import LETTERS
from msatools.tasks.waits import RUNNABLE, TaskClass, are_any


class RecordedPrstat(PrstatReport, frozen=True, kw_only=True):
    """A report without rows, with the data of all threads."""

    kept: Annotated[Kept, UNLISTED]


def recorded(report: PrstatReport, kept: Kept) -> RecordedPrstat:
    """Return a report without rows, and the data of all threads to build rows from."""
    return RecordedPrstat(**values(report), kept=kept)


def choose(report: RecordedPrstat, options: Options) -> PrstatReport:
    """Return the requested report, without views that need stacks."""
    kept = report.kept
    _check(kept)
    if not options.children:
        kept = replace(kept, reaped=None)
    rows = wanted_rows(kept, options)
    if options.selection.pids is not None:
        rows = rows.take(_named(rows, options.selection.pids, options.by_thread))
    wanted = threads_of(rows)
    parts = values(report)
    del parts["kept"]
    chosen = PrstatReport(**parts)
    tids = {*kept.columns["pid"][wanted].tolist()}
    return with_views(
        replace(
            chosen,
            tasks=rows.take(ordered(rows, options, report.target)[: options.rows]),
            per_thread=options.by_thread,
            selects=not options.selection.is_all,
            totals=count(kept, wanted, report.totals),
            herds=tuple(
                herd
                for herd in report.herds
                if len(tids & {*herd.members}) >= MIN_WAITERS
            ),
        ),
        rows,
        wanted,
        options,
    )


def wanted_rows(kept: Kept, options: Options) -> TaskRows:
    """Return the rows that match the selection, except for its PIDs."""
    rows = (thread_rows if options.by_thread else process_rows)(kept)
    chosen = selected(rows, options.selection)
    return rows if chosen.all() else rows.take(chosen)


def ordered(rows: TaskRows, options: Options, target: Target) -> Indices:
    """Return the indices of rows in the requested order."""
    stuck_first = options.stuck_first and not target.live
    return order(rows, options.sort, stuck_first=stuck_first)


def threads_of(rows: TaskRows) -> Booleans:
    """Return which threads belong to any of the rows."""
    bounds = rows.columns["threads_of"]
    edges = np.zeros(len(rows.kept.columns["pid"]) + 1, np.int64)
    np.add.at(edges, bounds[:, 0], 1)
    np.add.at(edges, bounds[:, 1], -1)
    inside: Booleans = np.cumsum(edges)[:-1] > 0
    return inside


def count(kept: Kept, wanted: Booleans, totals: Totals) -> Totals:
    """Return *totals* with the counts of the wanted threads filled in."""
    columns = kept.columns
    by_letter = Counter(columns["state"][wanted].tolist())
    by_class = Counter(columns["class"][wanted].tolist())
    return replace(
        totals,
        processes=len(distinct(columns["tgid"][wanted])),
        threads=int(np.count_nonzero(wanted)),
        states={name: by_letter[name] for name in LETTERS if by_letter[name]},
        classes={c.name: by_class[c] for c in TaskClass if by_class[c]},
    )


def with_views(
    report: PrstatReport, rows: TaskRows, wanted: Booleans, options: Options
) -> PrstatReport:
    """Add the requested views: load, groups and explanations of columns."""
    kept = rows.kept
    if options.load:
        report = replace(report, load=collect_load(kept, rows.ons, wanted))
    if options.users:
        report = replace(report, users=group_by("user", rows))
    if options.cgroups:
        report = replace(report, cgroups=group_by("cgroup", rows))
    if options.by:
        groups = {
            kind: group_by_class(rows) if kind == "class" else group_by(kind, rows)
            for kind in options.by
        }
        report = replace(report, by=groups)
    if options.why:
        # A legend takes milliseconds to import.
        from msatools.legends.prstat import explain

        accounting, is_bound = report.accounting, kept.latency_is_bound
        reasons = (
            reason
            for name in options.why
            for reason in explain(name, accounting, is_bound)
        )
        report = replace(report, why=tuple(dict.fromkeys(reasons)))
    return report


def _named(rows: TaskRows, pids: Iterable[int], by_thread: bool) -> Booleans:
    """Return which rows have a thread with one of the *pids*.

    The first thread of a process stands for all of them, as in prstat -L -p.
    """
    named = np.isin(rows.kept.columns["pid"], list(pids))
    if by_thread:
        named |= np.isin(rows.kept.columns["tgid"], list(pids))
    return any_thread(rows, named)


def _check(kept: Kept) -> None:
    """Check that all data read from a file is of the same threads.

    :raises DamagedDataError: if not
    """
    count = len(kept.columns["pid"])
    if any(len(values) != count for values in _arrays(kept)):
        raise DamagedDataError("columns are not of the same threads")
    if any(len(values) != count for values in (kept.ons, kept.callers)):
        raise DamagedDataError("waits are not of the same threads")
    for name, known in (
        ("class", [*TaskClass]),
        ("class_age_bound", [*AgeBound]),
        ("cgroup", range(-1, len(kept.paths))),
    ):
        if not np.isin(kept.columns[name], known).all():
            raise DamagedDataError(f"a number of {name} that is not known")


def _arrays(value: Any) -> Iterable[Any]:
    """Yield all arrays in an array, dict or model."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)
    elif is_model(value):
        for item in values(value).values():
            yield from _arrays(item)


def collect_load(
    kept: Kept,
    ons: Sequence[WaitTarget | None],
    wanted: npt.NDArray[np.bool_],
) -> Load:
    """Group the wanted threads that contribute to the load, by what they do.

    :param kept: Data of all threads, with their callers.
    :param ons: What each thread waits on.
    """
    columns = kept.columns
    classes, comms, ages = (columns[n] for n in ("class", "comm", "class_age_ns"))
    # Class OTH in state R: the dump lacks the registers of the thread's CPU.
    running = are_any(classes, RUNNABLE)
    running |= (classes == TaskClass.OTH) & (columns["state"] == "R")
    # The kernel counts no throttled task as running (account_entity_dequeue()).
    throttled = np.array(
        [on is not None and on.kind == "quota" for on in ons], np.bool_
    )
    runs = running & wanted & ~throttled
    blocked = columns["loads"] & ~runs & ~columns["is_dead"] & wanted
    groups: dict[tuple[str, int, str, str | None, WaitTarget | None], list[int]] = (
        defaultdict(list)
    )
    for row in np.flatnonzero(runs | blocked).tolist():
        # Running threads share a group, whichever CPU they are on.
        on = None if runs[row] else ons[row]
        key = (
            "R" if runs[row] else "D",
            int(classes[row]),
            comm_text(comms[row]),
            None if runs[row] else kept.callers[row],
            on,
        )
        groups[key].append(row)
    found = [
        LoadGroup(
            state=state,
            task_class=TaskClass(task_class).name,
            comm=comm,
            on=on,
            function=function,
            pids=tuple(sorted(columns["pid"][rows].tolist())),
            max_age_ns=int(ages[rows].max()),
        )
        for (state, task_class, comm, function, on), rows in groups.items()
    ]
    found.sort(key=lambda group: (-len(group.pids), -group.max_age_ns))
    return Load(
        runnable=int(np.count_nonzero(runs)),
        uninterruptible=int(np.count_nonzero(blocked)),
        groups=tuple(found),
    )
