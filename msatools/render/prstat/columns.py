# SPDX-License-Identifier: LGPL-2.1-or-later

"""The columns of prstat's tables: their cells, with marks of accuracy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from msatools.locks.report import WaitTarget
from msatools.prstat.model import Children, PrstatReport, Split, TaskRow, Waited
from msatools.prstat.rows import TaskRows, translated
from msatools.prstat.select import DELAY_OF
from msatools.render.blocks import (
    BOUND_MARKS,
    ESTIMATE,
    LOWER,
    NOT_KEPT,
    UPPER,
    Cell,
    Column,
    number_text,
    share,
    state_cell,
    user,
)
from msatools.render.on import on_text
from msatools.reports.units import clock, count, duration, short_size

_PATH_WIDTH = 28


class TaskContext(Struct, frozen=True):
    """Inputs of cells in addition to their row."""

    names: bool
    """Whether user names can be looked up: only on the machine itself."""

    per_thread: bool
    precise_cputime: bool
    full: bool
    """Whether to show long cells in full."""


def context(report: PrstatReport, full: bool) -> TaskContext:
    """Return the context for the cells of a report."""
    return TaskContext(
        names=report.target.kind == "kcore",
        per_thread=report.per_thread,
        precise_cputime=report.accounting.precise_cputime,
        full=full,
    )


Write = Callable[[TaskRow, TaskContext], Cell]


class OfFields(NamedTuple):
    """Makes the cells of a column from a few fields of each row, without the rows."""

    names: tuple[str, ...]
    make: Callable[..., Cell]
    """Called with the context and the fields; perhaps once for all rows alike."""


_AT_ONCE = 1024
"""Rows whose cells are made at once."""


def make_columns(names: tuple[str, ...], report: PrstatReport) -> tuple[Column, ...]:
    """Return the columns with these names, with headers for this report."""
    return tuple(
        Column(
            _header(name, report),
            "left" if name in _LEFT else "right",
            worth=_WORTH.get(name),
            least=_LEAST.get(name),
            keeps="end" if name == "CGROUP" else "start",
        )
        for name in names
    )


def _header(name: str, report: PrstatReport) -> str:
    if name == "PID" and report.per_thread:
        return "PID/TID"
    if name == "PROCESS/NLWP" and report.per_thread:
        return "THREAD"
    return name


def cells(
    names: Sequence[str], rows: Sequence[TaskRow], about: TaskContext
) -> Iterator[Sequence[Sequence[Cell]]]:
    """Yield batches of rows, each as a sequence of cells for every column."""
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        of_rows = any(not isinstance(_WRITERS[name], OfFields) for name in names)
        made = [*part] if of_rows else ()
        yield [_column(name, part, made, about) for name in names]


def _column(
    name: str, rows: Sequence[TaskRow], made: Sequence[TaskRow], about: TaskContext
) -> Sequence[Cell]:
    """Return the cells of a column.

    :param made: The same rows, built once for all columns that are made of whole rows.
    """
    writer = _WRITERS[name]
    if not isinstance(writer, OfFields):
        return [writer(row, about) for row in made]
    if isinstance(rows, TaskRows):
        values = rows.fields(writer.names)
    else:
        values = [[getattr(row, field) for row in rows] for field in writer.names]
    make = partial(writer.make, about)
    return [*map(make, *values)] if len(values) > 1 else translated(values[0], make)


def _pid(about: TaskContext, pid: int, tgid: int) -> str:
    return f"{tgid}/{pid}" if about.per_thread and pid != tgid else str(pid)


def _size(_: TaskContext, value: int | None) -> str:
    return NOT_KEPT if value is None else short_size(value)


def _marked(mark: str, text: str) -> str:
    # A bound or estimate that rounds to 0 is exact at this precision.
    return text if text in ("0.0", NOT_KEPT) else mark + text


def _part(ns: int, row: TaskRow) -> str:
    """Return a time as a share of the lifetime of all threads of a row.

    As in prstat -m: the shares of a process sum to 100 for any number of threads.
    """
    spent = row.user_ns + row.system_ns + row.latency_ns
    return share(ns, spent + row.off_cpu_ns + row.zombie_ns)


def _cpu_split(ns: int, row: TaskRow, about: TaskContext) -> str:
    exact = row.kthread or about.precise_cputime
    return _marked("" if exact else ESTIMATE, _part(ns, row))


def _latency(row: TaskRow, _: TaskContext) -> str:
    mark = UPPER if row.latency_bound == "upper" else ""
    return _marked(mark, _part(row.latency_ns, row))


def _off(row: TaskRow, _: TaskContext) -> str:
    text = _part(row.off_cpu_ns, row)
    is_lower = row.latency_bound == "upper"
    # If latency rounds to 0, the rest is not a bound but exact.
    is_whole = _part(row.latency_ns, row) == "0.0"
    return (LOWER if is_lower and not is_whole else "") + text


def _wait(get: Callable[[Waited], int]) -> Write:
    def write_wait(row: TaskRow, _: TaskContext) -> str:
        if row.waited is None:
            return NOT_KEPT
        text = _part(get(row.waited), row)
        if row.waited.is_estimate:
            return _marked(ESTIMATE, text)
        if _part(row.waited.untold_ns, row) == "0.0":
            return text
        # The time without a known cause may belong to this state.
        return NOT_KEPT if text == "0.0" else LOWER + text

    return write_wait


def _fault(get: Callable[[Waited], int]) -> Write:
    write_wait = _wait(get)

    def write_fault(row: TaskRow, about: TaskContext) -> Cell:
        text = write_wait(row, about)
        most = _longest_faults(row)
        if most is None or (text != NOT_KEPT and not str(text).startswith(LOWER)):
            return text
        return _marked(UPPER, _part(min(most, row.off_cpu_ns), row))

    return write_fault


def _longest_faults(row: TaskRow) -> int | None:
    """Return the maximum ns in page faults: all delays by block I/O, if known."""
    if row.breakdown is None:
        return None
    delays = [row.breakdown.delays.get(kind) for kind in ("blkio", "swapin")]
    return None if None in delays else sum(delay or 0 for delay in delays)


def _sleep_rest(row: TaskRow, _: TaskContext) -> str:
    """Return the share of time off the CPU but for faults, locks and stops."""
    waited = row.waited
    if waited is None:
        return NOT_KEPT
    rest = row.off_cpu_ns - waited.code_faults_ns - waited.data_faults_ns
    text = _part(rest - waited.locks_ns - waited.stopped_ns, row)
    if _part(waited.untold_ns, row) != "0.0":
        # The time without a known cause may belong to another state.
        return _marked(UPPER, text)
    return _marked(ESTIMATE, text) if waited.is_estimate else text


def _age(_: TaskContext, bound: str, age_ns: int) -> str:
    return BOUND_MARKS[bound] + duration(age_ns)


def _on(about: TaskContext, on: WaitTarget | None) -> str:
    if on is None:
        return NOT_KEPT
    return on_text(on if about.full else _with_short_paths(on))


def _with_short_paths(on: WaitTarget) -> WaitTarget:
    """Cut the beginning of long paths, also of sockets; other texts are short."""
    paths = {"path": on.path, "local": on.local, "peer": on.peer}
    short = {
        name: f"...{path[3 - _PATH_WIDTH :]}"
        for name, path in paths.items()
        if path and len(path) > _PATH_WIDTH
    }
    return replace(on, **short) if short else on


def _command(about: TaskContext, comm: str, threads: int | None) -> str:
    return comm if about.per_thread or threads is None else f"{comm}/{threads}"


def _off_per_switch(row: TaskRow, _: TaskContext) -> str:
    if not row.sleeps:
        return NOT_KEPT
    mark = LOWER if row.latency_bound == "upper" else ""
    return mark + duration(row.off_cpu_ns // row.sleeps)


def _off_by_class(row: TaskRow, _: TaskContext) -> str:
    if row.off_cpu is None:
        return NOT_KEPT
    parts = []
    for part in row.off_cpu:
        text = _part(part.ns, row)
        if text == "0.0":
            continue
        error = _part(part.error_ns, row)
        name = "TFL" if part.on_code else part.task_class or "?"
        parts.append(f"{name} {text}" if error == "0.0" else f"{name} ~{text}+-{error}")
    return ", ".join(parts) or NOT_KEPT


def _sleep(get: Callable[[Split], int | None]) -> Write:
    def write_sleep(row: TaskRow, about: TaskContext) -> str:
        value = None if row.breakdown is None else get(row.breakdown)
        if value is None:
            return NOT_KEPT
        is_whole = _coverage(row, about) in ("100", NOT_KEPT)
        return ("" if is_whole else LOWER) + _part(value, row)

    return write_sleep


def _stopped(row: TaskRow, about: TaskContext) -> Cell:
    if row.breakdown is not None and row.breakdown.stopped_ns is not None:
        return _part(row.breakdown.stopped_ns, row)
    return _wait(lambda waited: waited.stopped_ns)(row, about)


def _delay(kind: str) -> Write:
    def write_delay(row: TaskRow, _: TaskContext) -> str:
        value = None if row.breakdown is None else row.breakdown.delays.get(kind)
        return NOT_KEPT if value is None else _part(value, row)

    return write_delay


def _coverage(row: TaskRow, _: TaskContext) -> str:
    if row.breakdown is None or row.breakdown.coverage is None:
        return NOT_KEPT
    if _part(row.off_cpu_ns, row) == "0.0":
        # There was no time off the CPU that statistics could explain.
        return NOT_KEPT
    return f"{100 * row.breakdown.coverage:.0f}"


def _child(get: Callable[[Children], str]) -> Write:
    def write_child(row: TaskRow, _: TaskContext) -> str:
        return NOT_KEPT if row.children is None else get(row.children)

    return write_child


_WRITERS: Mapping[str, Write | OfFields] = {
    "PID": OfFields(("pid", "tgid"), _pid),
    "TGID": OfFields(("tgid",), lambda about, tgid: str(tgid)),
    "PPID": OfFields(("ppid",), lambda about, ppid: number_text(ppid)),
    "USER": OfFields(("uid",), lambda about, uid: user(uid, about.names)),
    "SIZE": OfFields(("size_bytes",), _size),
    "RSS": OfFields(("rss_bytes",), _size),
    "STATE": OfFields(("state",), lambda about, state: state_cell(state)),
    "PRI": OfFields(("pri",), lambda about, pri: str(pri)),
    "NICE": OfFields(("nice",), lambda about, nice: str(nice)),
    "PSR": OfFields(("cpu",), lambda about, cpu: str(cpu)),
    "TIME": OfFields(
        ("user_ns", "system_ns"),
        lambda about, user_ns, system_ns: clock(user_ns + system_ns),
    ),
    "CPU": OfFields(
        ("user_ns", "system_ns", "lifetime_ns"),
        lambda about, user_ns, system_ns, life_ns: share(user_ns + system_ns, life_ns),
    ),
    "NLWP": OfFields(("threads",), lambda about, threads: number_text(threads)),
    "COMMAND": OfFields(("comm",), lambda about, comm: comm),
    "PROCESS/NLWP": OfFields(("comm", "threads"), _command),
    "CGROUP": OfFields(("cgroup",), lambda about, path: path or NOT_KEPT),
    "NOW": OfFields(("task_class",), lambda about, name: name),
    "FOR": OfFields(("class_age_bound", "class_age_ns"), _age),
    "ON": OfFields(("on",), _on),
    "USR": lambda row, about: _cpu_split(row.user_ns, row, about),
    "SYS": lambda row, about: _cpu_split(row.system_ns, row, about),
    "LAT": _latency,
    "OFF": _off,
    "OFF-BY": _off_by_class,
    "TFL": _fault(lambda waited: waited.code_faults_ns),
    "DFL": _fault(lambda waited: waited.data_faults_ns),
    "LCK": _wait(lambda waited: waited.locks_ns),
    "SLP": _sleep_rest,
    "ZMB": lambda row, about: _marked(ESTIMATE, _part(row.zombie_ns, row)),
    "IOW": _sleep(lambda split: split.iowait_ns),
    "BLK": _sleep(lambda split: split.blocked_ns),
    "INT": _sleep(lambda split: split.sleep_ns),
    "STP": _stopped,
    "COV": _coverage,
    **{name: _delay(kind) for name, kind in DELAY_OF.items()},
    "VCX": OfFields(("nvcsw",), lambda about, number: count(number)),
    "ICX": OfFields(("nivcsw",), lambda about, number: count(number)),
    "MIN": OfFields(("min_flt",), lambda about, number: count(number)),
    "MAJ": OfFields(("maj_flt",), lambda about, number: count(number)),
    "SCL": lambda row, about: NOT_KEPT,
    "SIG": lambda row, about: NOT_KEPT,
    "TRP": lambda row, about: NOT_KEPT,
    "OFF/VCX": _off_per_switch,
    "LIFE": OfFields(("lifetime_ns",), lambda about, ns: duration(ns)),
    "CUSR": _child(lambda children: clock(children.user_ns)),
    "CSYS": _child(lambda children: clock(children.system_ns)),
    "CVCX": _child(lambda children: count(children.nvcsw)),
    "CICX": _child(lambda children: count(children.nivcsw)),
    "CMIN": _child(lambda children: count(children.min_flt)),
    "CMAJ": _child(lambda children: count(children.maj_flt)),
}

COLUMNS = tuple(_WRITERS)
"""Names of all columns."""

_LEAST_WORTH = (
    # No Linux keeps these.
    *("TRP", "SCL", "SIG"),
    *("CMP", "COW", "THR", "IRQ", "CMIN", "CICX"),
    *("MIN", "ICX", "NICE", "PRI", "PSR", "COV", "MAJ", "VCX", "SIZE"),
    *("TFL", "DFL", "RCL", "SWP", "INT", "BIO", "BLK", "IOW"),
    *("STP", "ZMB", "USER", "TIME", "LCK", "SLP"),
)
"""Columns to leave out if a table is too wide, the first to go first."""

_WORTH = {name: worth for worth, name in enumerate(_LEAST_WORTH)}

_LEAST = {"COMMAND": 15, "PROCESS/NLWP": 16, "CGROUP": 16, "ON": 16, "OFF-BY": 16}
"""Maps columns of long text to the minimum width that cells may be cut to."""

_LEFT = frozenset(
    ("USER", "STATE", "COMMAND", "PROCESS/NLWP", "CGROUP", "NOW", "ON", "OFF-BY")
)
