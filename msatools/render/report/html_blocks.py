# SPDX-License-Identifier: LGPL-2.1-or-later

"""Converts blocks to tables and lines of the HTML page, with legends of marks."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from msatools.legends import Group, cpus, locks, memstat, model, prstat, report, zombies
from msatools.legends.prstat import FIELDS, why
from msatools.prstat.model import PrstatReport
from msatools.render import plain
from msatools.render.blocks import (
    Advice,
    Block,
    Cell,
    Column,
    Span,
    Style,
    Table,
    escape,
    plural,
)
from msatools.render.memstat.report import GROUPS, REST
from msatools.report.model import TriageVerdict
from msatools.report.rule import DOUBTS, ReportParts

# --- Converts blocks for the HTML page: to tables, and lines of preformatted text.
#
# Hints at options (-v shows them) are dropped: the page shows all rows and lines up to
# its bounds, and the number left out.


MAX_ROWS = 400
"""Maximum rows of a table on the page."""

MAX_LINES = 600
"""Maximum lines and rows of a section on the page."""

LONG = 48
"""Maximum characters of a cell that is never wrapped."""

MAX_CHARACTERS = 1000
"""Maximum characters of a line or cell on the page."""


class PagePiece(Struct, frozen=True):
    """A piece of text in one style; its characters are printable."""

    text: str
    style: Style | Literal[""] = ""


class PageLine(Struct, frozen=True):
    """A line of preformatted text."""

    pieces: Sequence[PagePiece]
    indent: int
    """Indentation in columns, which wrapped lines keep."""


class PageText(Struct, frozen=True):
    """Lines of preformatted text."""

    lines: Sequence[PageLine]


class PageCell(Struct, frozen=True):
    """A cell of a table."""

    text: str
    style: Style | Literal[""]
    kind: Literal["", "right", "words"]
    """``right``: a number; ``words``: text that may be wrapped."""

    indent: int
    """Levels of indentation: 0 for a group of classes of memory, 1 for its classes."""


class PageRow(Struct, frozen=True):
    """A row of a table, and lines below it."""

    cells: Sequence[PageCell]
    notes: Sequence[PageLine]


class HtmlTable(Struct, frozen=True):
    """A table of the HTML page, with a line on rows left out."""

    columns: Sequence[Column]
    rows: Sequence[PageRow]
    left_out: str
    """Text on the rows left out; empty if there are none."""


PageBlock = HtmlTable | PageText


def page_blocks(make: Callable[[bool], Iterable[Block]]) -> list[PageBlock]:
    """Return the blocks of a section.

    :param make: Makes the blocks, with all details if called with ``True``. The page
        shows them with details unless lines exceed :data:`MAX_LINES`.
    """
    for verbose in (True, False):
        made, left = _bounded(make(verbose))
        if not left:
            return made
    return [*made, PageText([_line((Span(f"… {left}", "dim"),))])]


def _bounded(blocks: Iterable[Block]) -> tuple[list[PageBlock], str]:
    """Return blocks of at most MAX_LINES lines, and text on the lines left out."""
    made: list[PageBlock] = []
    lines: list[PageLine] = []
    room, left = MAX_LINES, 0
    for block in blocks:
        if isinstance(block, Table):
            if lines:
                made.append(PageText(lines))
                lines = []
            shown = page_table(block, max(room, 1))
            made.append(shown)
            room -= len(shown.rows)
            continue
        for line in plain.lines(block):
            if room > 0:
                lines.append(_line(line))
            else:
                left += 1
            room -= 1
    if lines:
        made.append(PageText(lines))
    return made, f"{plural(left, 'more line')}" if left else ""


def page_table(table: Table, most: int = MAX_ROWS) -> HtmlTable:
    """Return a table of at most *most*, and at most :data:`MAX_ROWS`, rows."""
    rows = [
        PageRow(
            [
                _cell(cell, column)
                for cell, column in zip(row, table.columns, strict=False)
            ],
            [
                _line(line)
                for note in table.notes.get(index, ())
                for line in plain.lines(note)
            ],
        )
        for index, row in enumerate(table.rows[: min(most, MAX_ROWS)])
    ]
    left, what = len(table.rows) - len(rows), "row"
    if table.more is not None:
        left, what = left + max(table.more.left, 0), table.more.what
    left_out = f"… {plural(left, f'more {what}')}" if left else ""
    return HtmlTable(table.columns, rows, left_out)


def _cell(cell: Cell, column: Column) -> PageCell:
    span = cell if isinstance(cell, Span) else Span(cell)
    text = escape(span.text).rstrip()
    bare = text.lstrip(" ")
    kind: Literal["", "right", "words"] = ""
    if column.least is not None and len(bare) > LONG:
        kind = "words"
    return PageCell(
        text=_cut(bare),
        style=span.style or "",
        kind="right" if column.align == "right" else kind,
        indent=(len(text) - len(bare) + 1) // 2,
    )


def _line(line: plain.Line) -> PageLine:
    """Return a line for the page, without its :class:`Advice`."""
    room = MAX_CHARACTERS
    pieces = []
    for span in line:
        text = "" if isinstance(span, Advice) else span.text
        if text and room > 0:
            pieces.append(PagePiece(_cut(text, room), span.style or ""))
        room -= len(text)
    joined = "".join(piece.text for piece in pieces)
    return PageLine(pieces, len(joined) - len(joined.lstrip(" ")))


def _cut(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def texts(blocks: Iterable[PageBlock]) -> Iterator[str]:
    """Yield the text of each line and cell."""
    for block in blocks:
        if isinstance(block, HtmlTable):
            for row in block.rows:
                yield from (cell.text for cell in row.cells)
                yield from map(_joined, row.notes)
        else:
            yield from map(_joined, block.lines)


def _joined(line: PageLine) -> str:
    return "".join(piece.text for piece in line.pieces)


# --- Legends of the page: meanings of the marks and codes that a section shows.
#
# Entries of msatools.legends for other names are left out.


def _meanings(*groups: Group) -> Mapping[str, str]:
    """Map names to meanings; for a name in several groups, to that in the first."""
    found: dict[str, str] = {}
    for group in groups:
        for entry in group.entries:
            found.setdefault(entry.name, entry.meaning)
    return found


SEVERITIES = _meanings(report.SEVERITIES)
DOUBT_WORDS = _meanings(report.CONFIDENCE)
TASK_STATES = _meanings(model.STATES)
TASK_CLASSES = _meanings(prstat.CLASSES)
VALUE_MARKS = _meanings(model.BOUNDS)
OWNER_MARKS = {**_meanings(model.OWNERS), "-": model.KEPT.meaning}
LOCK_WORDS = _meanings(locks.LINES, locks.MODES)
CPU_STATES = _meanings(cpus.STATES)
CPU_COLUMNS = _meanings(cpus.COLUMNS, cpus.SET_COLUMNS)
MEMORY_COLUMNS = _meanings(memstat.COLUMNS, memstat.DIFFS)
MEMORY_CLASSES = {
    entry.key: entry.meaning for entry in memstat.CLASSES.entries if entry.key
}
ZOMBIE_COLUMNS = _meanings(zombies.COLUMNS, zombies.LIMIT_COLUMNS)


class PageLegend(Struct, frozen=True):
    """Entries under a title: a mark, code or header, and what it means."""

    title: str
    entries: Sequence[tuple[str, str]]


def verdict_legend(verdicts: Sequence[TriageVerdict]) -> list[PageLegend]:
    """Return the legend of the severities and confidences of verdicts."""
    severities = {verdict.severity for verdict in verdicts}
    doubts = {DOUBTS[verdict.confidence] for verdict in verdicts}
    return _legends(
        ("Severity", _chosen(SEVERITIES, severities)),
        (
            "How sure it is, if the kernel itself does not record it",
            _chosen(DOUBT_WORDS, doubts),
        ),
    )


def section_legend(
    name: str, blocks: Sequence[PageBlock], parts: ReportParts | None
) -> list[PageLegend]:
    """Return the legend of a section; *name* is its command, such as ``locks``."""
    headers = {
        column.header
        for block in blocks
        if isinstance(block, HtmlTable)
        for column in block.columns
    }
    shown = [*texts(blocks)]
    if parts is None:
        return []
    if name == "memstat" and parts.memstat is not None:
        used = {count.name for count in parts.memstat.classes if count.pages}
        odd = {word for word in ("UNEXPLAINED",) if any(word in text for text in shown)}
        return _legends(
            ("Columns", _chosen(MEMORY_COLUMNS, headers | odd)),
            ("Classes", [*_memory_classes(used)]),
        )
    if name == "prstat" and parts.prstat is not None:
        return _legends(
            ("Columns", [*_prstat_columns(parts.prstat, headers)]),
            ("Marks before a value", _marks(VALUE_MARKS, shown)),
            ("States", _chosen(TASK_STATES, parts.prstat.totals.states)),
        )
    if name == "locks" and parts.locks is not None:
        waits, roots = parts.locks.waits, parts.locks.roots
        states = {wait.state for wait in waits} | {root.state or "" for root in roots}
        modes = {wait.mode[0].upper() for wait in waits if wait.mode}
        words = {word for word in LOCK_WORDS if len(word) > 1}
        used = {word for word in words if any(_has(word, text) for text in shown)}
        return _legends(
            (
                "Words, and letters before a task",
                _chosen(LOCK_WORDS, used | modes),
            ),
            ("Marks before a lock or its owner", _marks(OWNER_MARKS, shown)),
            ("States, after a task", _chosen(TASK_STATES, states)),
        )
    if name == "zombies":
        return _legends(
            ("Columns", _chosen(ZOMBIE_COLUMNS, headers)),
            (
                "Marks before a value",
                _marks(VALUE_MARKS, shown) if headers else [],
            ),
        )
    if name == "cpus" and parts.cpus is not None:
        states = {state for cpu in parts.cpus.cpus for state in cpu.state}
        seen = {state for state in CPU_STATES if any(_has(state, t) for t in shown)}
        return _legends(
            ("Columns", _chosen(CPU_COLUMNS, headers)),
            ("States", _chosen(CPU_STATES, states & seen | seen & {"panicked"})),
        )
    return []


def _legends(*found: tuple[str, Sequence[tuple[str, str]]]) -> list[PageLegend]:
    return [PageLegend(title, entries) for title, entries in found if entries]


def _chosen(known: Mapping[str, str], used: Iterable[str]) -> Sequence[tuple[str, str]]:
    """Return the entries of *known* that are used, in the order of *known*."""
    wanted = frozenset(used)
    return [(code, words) for code, words in known.items() if code in wanted]


def _memory_classes(used: set[str]) -> Iterator[tuple[str, str]]:
    for row in (*(row for _, rows in GROUPS for row in rows), *REST):
        if row.name in used and row.name in MEMORY_CLASSES:
            yield row.label, MEMORY_CLASSES[row.name]


def _prstat_columns(
    report: PrstatReport, headers: set[str]
) -> Iterator[tuple[str, str]]:
    for name in FIELDS:
        if name in headers:
            # No column of the page has a bound that depends on the kernel's latency.
            yield name, why(name, report.accounting, latency_is_bound=False).text


def _marks(known: Mapping[str, str], shown: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (mark, words)
        for mark, words in known.items()
        if any(_has_mark(mark, text) for text in shown)
    ]


def _has_mark(mark: str, text: str) -> bool:
    """Return whether a text has a mark before a word, or alone if the mark is ``-``."""
    if mark == "-":
        return text.strip() == "-" or bool(re.search(r"\bowner -(?!\S)|^\s*- ", text))
    return bool(re.search(rf"(?<![^\s(,]){re.escape(mark)}(?=[\w/\s])", text))


def _has(word: str, text: str) -> bool:
    return bool(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text))
