# SPDX-License-Identifier: LGPL-2.1-or-later

"""A report as one page of HTML, which needs nothing besides.

Text from the dump is escaped twice: what is not printable as in a terminal, and by the
template engine, which escapes by default. Only pictures that are made here are marked
as HTML.
"""

from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from msatools.records import dataclass
from msatools.render import plain
from msatools.render.blocks import Block, Column, Table, escape
from msatools.render.memstat.picture import Picture, svg
from msatools.render.report.report import (
    frames_text,
    machine_text,
    not_crashed_text,
    pages,
    shown_verdicts,
)
from msatools.render.report.wait_picture import wait_picture
from msatools.report.log_lines import all_lines
from msatools.report.model import TriageReport
from msatools.report.words import cause_text, fault_text, unloaded_text, who_text

MAX_LOG = 2000
"""Lines of the log on the page, the last ones."""

MAX_ROWS = 400
"""Rows of a table on the page."""

_TEMPLATE = "page.html.j2"


@dataclass(frozen=True)
class _Cell:
    text: str
    style: str
    align: str


@dataclass(frozen=True)
class _Table:
    """A table for the template."""

    columns: list[Column]
    rows: list[list[_Cell]]
    more: int


@dataclass(frozen=True)
class _Preformatted:
    """Lines of preformatted text for the template, as pieces with a style."""

    lines: list[list[_Cell]]


@dataclass(frozen=True)
class _Section:
    """A part of the page that folds."""

    name: str
    title: str
    summary: str
    blocks: list[_Table | _Preformatted]
    pictures: list[Markup]


def page(report: TriageReport) -> str:
    """Return the page of a report that has its parts."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["printable"] = escape
    source = files(__package__).joinpath(_TEMPLATE).read_text("utf-8")
    crash = report.crash
    text: str = environment.from_string(source).render(
        report=report,
        machine=machine_text(report.machine, report.target),
        crash=crash,
        frames=[*frames_text(crash.frames)] if crash else [],
        not_crashed="" if report.target.live else not_crashed_text(report),
        verdicts=shown_verdicts(report),
        cause=cause_text(crash.cause) if crash else "",
        fault=fault_text(crash) if crash else "",
        unloaded=unloaded_text(crash) if crash else "",
        who=who_text(crash) if crash else "",
        sections=[*_sections(report)],
        log=_log(report),
    )
    return text


def _log(report: TriageReport) -> list[str]:
    records = report.parts.log if report.parts is not None else ()
    return [*all_lines(records)][-MAX_LOG:]


_TITLES = {
    "memstat": "Memory",
    "prstat": "Tasks",
    "locks": "Who waits for whom",
    "zombies": "Zombies",
    "cpus": "CPUs",
}


def _sections(report: TriageReport) -> Iterator[_Section]:
    found = dict(pages(report))
    for name, section in report.sections.items():
        blocks = found.get(name, ())
        extra = _tasks_by_class(report) if name == "prstat" else ()
        yield _Section(
            name=name,
            title=_TITLES[name],
            summary=section.summary or f"no report: {section.error}",
            blocks=[*extra, *_blocks(blocks)],
            pictures=[_marked(picture) for picture in _pictures(report, name)],
        )


def _pictures(report: TriageReport, name: str) -> Iterator[Picture]:
    parts = report.parts
    if parts is None:
        return
    if (
        name == "memstat"
        and parts.memstat is not None
        and parts.memstat.map is not None
    ):
        from msatools.render.memstat.map_picture import picture

        target = report.target
        yield picture(parts.memstat.map, target.page_size, target.release)
    elif name == "locks" and parts.locks is not None:
        waits = wait_picture(parts.locks)
        if waits is not None:
            yield waits


def _marked(picture: Picture) -> Markup:
    """Return a picture as HTML: its texts are escaped where it is drawn."""
    return Markup(svg(picture).decode())


def _tasks_by_class(report: TriageReport) -> Iterator[_Table]:
    parts = report.parts
    if parts is None or parts.prstat is None:
        return
    rows = sorted(parts.prstat.totals.classes.items(), key=lambda item: -item[1])
    columns = (Column("CLASS"), Column("THREADS", "right"))
    table = Table(columns, [(name, f"{count:,}") for name, count in rows])
    yield _table(table)


def _blocks(blocks: Iterable[Block]) -> Iterator[_Table | _Preformatted]:
    """Yield tables as tables, and all between them as preformatted lines."""
    lines: list[list[_Cell]] = []
    for block in blocks:
        if isinstance(block, Table):
            if lines:
                yield _Preformatted(lines)
                lines = []
            yield _table(block)
        else:
            lines += (_pieces(line) for line in plain.lines(block))
    if lines:
        yield _Preformatted(lines)


def _pieces(line: plain.Line) -> list[_Cell]:
    return [_Cell(span.text, span.style or "", "") for span in line]


def _table(table: Table) -> _Table:
    columns = [*table.columns]
    rows = []
    for row in table.rows[:MAX_ROWS]:
        cells = zip(columns, row, strict=False)
        rows.append([_cell(cell, column.align) for column, cell in cells])
    return _Table(columns, rows, len(table.rows) - len(rows))


def _cell(cell: Any, align: str) -> _Cell:
    if isinstance(cell, str):
        return _Cell(escape(cell), "", align)
    return _Cell(escape(cell.text), cell.style or "", align)
