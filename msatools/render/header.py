# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lines that all reports share, and tables of the differences between two."""

from collections.abc import Iterator, Sequence

from msatools.kernel.report import Report
from msatools.program.model import Crash, LogSpan, Source, Target
from msatools.render.blocks import (
    Block,
    Cell,
    Column,
    More,
    Span,
    Table,
    Text,
    free_text,
    line,
    plural,
)
from msatools.reports.diff import Moment, ReportDiff, RowChange, Side, Value
from msatools.reports.units import duration, size

# --- Lines that all reports share: target, losses and notes.


_KINDS = {
    **dict.fromkeys(("elf", "kdump"), "vmcore"),
    "raw": "memory",
    "kcore": "live",
    "qmp": "live guest",
    "log": "kernel log",
}
_LOSSES = ("_unreadable", "_broken", "_lost", "_incomplete", "_guessed", "_ended")


def header(target: Target, *facts: str, verbose: bool = False) -> Iterator[Text]:
    """Yield the lines at the head of a report.

    :param facts: facts about the reading, such as ``8 reads``
    :param verbose: whether to list the source of the types of each module
    """
    if target.log is not None:
        yield line(Span(_log(target, target.log), "title"))
        return
    release = target.release or "-"
    words = [release, taken_from(target), f"types: {target.types}"]
    if facts:
        words.append(", ".join(facts))
    yield line(Span("  ".join(words), "title"))
    if verbose:
        for source in target.sources:
            yield line(Span(f"types of {source.module}: {_origin(source)}"))
        yield line(Span("types of other modules: not asked for"))
    if target.truncated:
        yield line(Span(f"truncated: {_what_is_missing(target)}", "bad"))
    if target.torn:
        torn = plural(target.torn, "contradiction")
        yield line(Span(f"{torn}: taken from a running guest?", "bad"))
    if target.crash is not None:
        yield line(Span(_crash(target.crash), "bad"))


def _log(target: Target, log: LogSpan) -> str:
    """Return what a kernel's log is."""
    words = [f"a kernel log, {plural(log.lines, 'line')}"]
    if (log.first_line, log.last_line) != (1, log.lines) and log.boots > 1:
        words.append(f"boot {log.boot} of {log.boots} in {_lines(log)}")
    if log.begins is not None:
        words.append(f"from {log.begins} to {log.ends}")
    return ", ".join([*words, f"of kernel {target.release or '-'}"])


def _lines(log: LogSpan) -> str:
    return f"lines {log.first_line:,} to {log.last_line:,}"


def _what_is_missing(target: Target) -> str:
    if target.lacks_parts:
        return "the dump was split, and not all parts are in one directory"
    return "the file ends before the last of its pages"


def times(report: Report) -> Iterator[str]:
    """Yield the time of a report, and its interval."""
    if report.taken_at_ns is not None:
        yield f"now {report.taken_at_ns / 1e9:.3f} s"
    if report.interval_ns is not None:
        yield f"interval {report.interval_ns / 1e9:.3f} s"


def losses(report: Report) -> list[str]:
    """Return the losses of a report on tasks, except unreadable tasks, as text."""
    return [
        f"{count:,} {key.replace('_', ' ')}"
        for key, count in report.coverage.items()
        if count and key.endswith(_LOSSES) and key != "tasks_unreadable"
    ]


def among_read(report: Report) -> str:
    """Return a limit to "none": a broken list may hide all tasks; or nothing."""
    lost = any(map(report.coverage.get, ("tasks_unreadable", "lists_broken")))
    return " among the tasks that could be read" if lost else ""


def notes(report: Report) -> Iterator[Text]:
    """Yield a line for each note of a report."""
    for note in report.notes:
        yield line(Span(f"note: {note.text}", "warn"))


def _origin(source: Source) -> str:
    if source.path is None:
        return f"{source.types}, from the kernel itself"
    return f"{source.types}, from {source.path}"


def taken_from(target: Target) -> str:
    """Return the kind of a target's source, and its format."""
    details = [target.format] if target.format and target.log is None else []
    if target.dump_level is not None:
        details.append(f"level {target.dump_level}")
    return _KINDS[target.kind] + (f" ({', '.join(details)})" if details else "")


def _crash(crash: Crash) -> str:
    words = [f"crashed: {crash.message or 'the kernel log does not say why'}"]
    if crash.cpu is not None:
        words.append(f"CPU {crash.cpu}")
    if crash.pid is not None:
        words.append(f"pid {crash.pid} {crash.comm or '-'}")
    return ", ".join(words)


# --- Renders the differences between two reports of a command as tables.


ROWS = 20
"""Default number of rows of each table."""

_MARKS = {"came": "+", "gone": "-", "changed": ""}


def diff_blocks(diff: ReportDiff, rows: int | None) -> Iterator[Block]:
    """
    Yield the blocks of ``--diff``.

    :param rows: Maximum rows of each table; None for :data:`ROWS`.
    """
    columns = (
        free_text("REPORT", keeps="end"),
        free_text("KERNEL", worth=0),
        free_text("OF", worth=1, keeps="end"),
        Column("UP", "right"),
    )
    sides = (diff.before, diff.after)
    yield Table(columns, [(side.file, *moment(side)) for side in sides])
    if diff.elapsed_ns is not None:
        yield line(f"{duration(diff.elapsed_ns)} from one to the other")
    for note in diff.notes:
        yield line(Span(f"note: {note.text}", "warn"))
    yield from _notes(sides)
    for name, changes in diff.changes.items():
        yield line()
        yield line(Span(f"Changes in {name}", "title"), f"  {_sum(changes)}")
        if changes:
            shown = changes[: rows or ROWS]
            left = len(changes) - len(shown)
            yield _table(shown, More("row", left, is_chosen=rows is not None))


def moment(side: Moment) -> tuple[Cell, ...]:
    """Return the cells for the kernel of a report, its source, and its uptime."""
    target, taken = side.target, side.taken_at_ns
    return (
        target.release or "-",
        f"{taken_from(target)} {target.path}",
        "-" if taken is None else duration(taken),
    )


def _notes(sides: Sequence[Side]) -> Iterator[Block]:
    for which, side in zip(("first", "second"), sides, strict=True):
        for note in side.notes:
            yield line(Span(f"note of the {which}: {note.text}", "warn"))


def _sum(changes: Sequence[RowChange]) -> str:
    counts = {kind: sum(change.change == kind for change in changes) for kind in _MARKS}
    return ", ".join(f"{n:,} {kind}" for kind, n in counts.items() if n) or "none"


def _table(changes: Sequence[RowChange], more: More) -> Table:
    first = changes[0]
    counts = [n for n in first.deltas if any(c.deltas.get(n) for c in changes)]
    facts = list(dict.fromkeys(name for change in changes for name in change.facts))
    columns = (
        Column("", is_key=True),
        *(_key(_title(name)) for name in first.key),
        # Those that come first are worth most.
        *(Column(_title(n), "right", -i) for i, n in enumerate(counts)),
        *(free_text(_title(n), -i, least=12) for i, n in enumerate(facts)),
    )
    return Table(
        columns,
        [
            (
                _MARKS[change.change],
                *(_value_text(value) for value in change.key.values()),
                *(_delta(name, change.deltas.get(name)) for name in counts),
                *(_fact(change, name) for name in facts),
            )
            for change in changes
        ],
        more,
    )


def _key(title: str) -> Column:
    return Column(title, "right", least=24, keeps="end", is_key=True)


def _title(name: str) -> str:
    for unit in ("_ns", "_bytes"):
        name = name.removesuffix(unit)
    return name.upper()


def _value_text(value: Value) -> str:
    return "-" if value is None else str(value)


def _delta(name: str, delta: int | None) -> str:
    if delta is None:
        return "-"
    if not delta:
        return "0"
    if name.endswith("_ns"):
        return f"{'+' if delta > 0 else '-'}{duration(abs(delta))}"
    if name.endswith("_bytes"):
        return f"{'+' if delta > 0 else '-'}{size(abs(delta))}"
    return f"{delta:+,}"


def _fact(change: RowChange, name: str) -> str:
    fact = change.facts.get(name)
    if fact is None:
        return ""
    if change.change == "changed":
        return f"{_value_text(fact.before)} -> {_value_text(fact.after)}"
    return _value_text(fact.after if change.change == "came" else fact.before)
