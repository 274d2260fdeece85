# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the differences between two reports of any command (``--diff``) as tables."""

from collections.abc import Iterator, Sequence

from msatools.kernel.report import Note
from msatools.render.blocks import (
    Block,
    Cell,
    Column,
    More,
    Span,
    Table,
    free_text,
    line,
)
from msatools.render.header import taken_from
from msatools.reports.diff import AnySide, ReportDiff, RowChange, Value
from msatools.reports.units import duration, size

ROWS = 20
"""Default number of rows of each table."""

_MARKS = {"came": "+", "gone": "-", "changed": ""}


def diff_blocks(diff: ReportDiff, rows: int | None) -> Iterator[Block]:
    """
    Yield the blocks of ``--diff``.

    :param rows: Maximum rows of each table; None for :data:`ROWS`.
    """
    sides = diff.before, diff.after
    yield from heading("REPORT", sides, diff.elapsed_ns, diff.notes)
    for name, changes in diff.changes.items():
        yield line()
        yield line(Span(f"Changes in {name}", "title"), f"  {_sum(changes)}")
        if changes:
            shown = changes[: rows or ROWS]
            left = len(changes) - len(shown)
            yield _table(shown, More("row", left, is_chosen=rows is not None))


def heading(
    title: str,
    sides: tuple[AnySide, AnySide],
    elapsed_ns: int | None,
    notes: Sequence[Note],
    *more: tuple[Column, Sequence[Cell]],
) -> Iterator[Block]:
    """
    Yield the table of the two files, the time between them, and all notes.

    :param title: Header of the column with the names of the files.
    :param notes: Notes of the comparison.
    :param more: Further columns, each with its cells for the first and second file.
    """
    columns = (
        free_text(title, keeps="end"),
        free_text("KERNEL", worth=0),
        free_text("OF", worth=1, keeps="end"),
        Column("UP", "right"),
        *(column for column, _ in more),
    )
    rows = [
        (side.file, *_moment(side), *(cells[i] for _, cells in more))
        for i, side in enumerate(sides)
    ]
    yield Table(columns, rows)
    if elapsed_ns is not None:
        yield line(f"{duration(elapsed_ns)} from one to the other")
    for note in notes:
        yield line(Span(f"note: {note.text}", "warn"))
    for which, side in zip(("first", "second"), sides, strict=True):
        for note in side.notes:
            yield line(Span(f"note of the {which}: {note.text}", "warn"))


def _moment(side: AnySide) -> tuple[Cell, ...]:
    """Return the cells for the kernel of a report, its source, and its uptime."""
    target, taken = side.target, side.taken_at_ns
    return (
        target.release or "-",
        f"{taken_from(target)} {target.path}",
        "-" if taken is None else duration(taken),
    )


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
        # Worth falls from left to right: the last columns are left out first.
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
