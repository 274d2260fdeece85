# SPDX-License-Identifier: LGPL-2.1-or-later

"""A report as one page of HTML, which needs nothing besides.

Text from the dump is escaped twice: what is not printable as in a terminal, and by the
template engine, which escapes by default. Only pictures that are made here are marked
as HTML. The page's size is bounded, however much there is to say.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib.resources import files

from jinja2 import Environment
from markupsafe import Markup
from msgspec import Struct

from msatools import __version__
from msatools.render.blocks import Block, Column, Table, Text, escape, free_text
from msatools.render.header import header, taken_from
from msatools.render.memstat.picture import Picture, svg
from msatools.render.report.html_blocks import (
    PageBlock,
    PageTable,
    page_blocks,
    page_table,
)
from msatools.render.report.hung_stacks import HungStack, hung_stacks
from msatools.render.report.page_legend import (
    TASK_CLASSES,
    PageLegend,
    section_legend,
    verdict_legend,
)
from msatools.render.report.portable import portable
from msatools.render.report.report import (
    NO_NAME,
    frames_text,
    machine_text,
    no_verdict_text,
    not_crashed_text,
    pages,
    severity_text,
    shown_verdicts,
)
from msatools.render.report.wait_picture import wait_picture
from msatools.report.command_lines import command_line
from msatools.report.log_lines import all_lines
from msatools.report.model import TriageReport
from msatools.report.words import fault_text, nested_text, unloaded_text, who_text

MAX_LOG = 2000
"""Lines of the log on the page, the last ones."""

MAX_LOG_CHARACTERS = 400_000

MAX_FACTS = 40
"""Facts that one verdict stands on, and verdicts, and notes."""

_TEMPLATE = "page.html.j2"

_TITLES = {
    "memstat": "Memory",
    "prstat": "Tasks",
    "locks": "Who waits for whom",
    "zombies": "Zombies",
    "cpus": "CPUs",
}
_STYLES = {"critical": "bad", "warning": "warn"}


class _Headline(Struct, frozen=True):
    """What happened, in a line."""

    label: str
    """How bad it is, and its code; empty if nothing was found."""

    style: str
    text: str


class _Section(Struct, frozen=True):
    """A part of the page that folds."""

    name: str
    title: str
    summary: str
    is_open: bool
    blocks: Sequence[PageBlock]
    pictures: Sequence[Markup]
    legend: Sequence[PageLegend]
    command: str
    """The command line that shows all of it."""


def page(report: TriageReport, made: datetime | None = None) -> str:
    """Return the page of a report that has its parts.

    :param made: When it is made; now, if not given.
    """
    report = portable(report)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["printable"] = escape
    source = files(__package__).joinpath(_TEMPLATE).read_text("utf-8")
    crash, verdicts = report.crash, shown_verdicts(report)
    stacks, more_stacks = hung_stacks(report.parts)
    log, more_log = _log(report)
    text: str = environment.from_string(source).render(
        report=report,
        headline=headline(report),
        host=_host(report),
        made=(made or datetime.now(timezone.utc)).strftime("%Y-%m-%d %H:%M:%S UTC"),
        version=__version__,
        taken_from=taken_from(report.target),
        machine=machine_text(report),
        crash=crash,
        frames=[*frames_text(crash.frames)] if crash else [],
        nested=[nested_text(fault) for fault in crash.nested] if crash else [],
        not_crashed="" if report.target.live or crash else not_crashed_text(report),
        verdicts=verdicts[:MAX_FACTS],
        no_verdict="" if verdicts else no_verdict_text(report),
        severity=severity_text,
        styles=_STYLES,
        most=MAX_FACTS,
        legend=verdict_legend(verdicts),
        unloaded=unloaded_text(crash) if crash else "",
        who=who_text(crash) if crash else "",
        stacks=stacks,
        more_stacks=more_stacks,
        stack_legend=_stack_legend(stacks),
        sections=[*_sections(report)],
        log=log,
        more_log=more_log,
    )
    return text


def headline(report: TriageReport) -> _Headline:
    """Return what happened: the crash, or else the worst verdict, if there is one."""
    if report.crash is not None:
        return _Headline("crashed", "bad", fault_text(report.crash))
    verdicts = shown_verdicts(report)
    if not verdicts:
        errors = any(section.error is not None for section in report.sections.values())
        lost = errors or bool(report.unchecked)
        among = " in what could be read" if lost else ""
        return _Headline("", "", f"No problem found{among}")
    worst = verdicts[0]
    style = _STYLES.get(worst.severity, "dim")
    return _Headline(f"{severity_text(worst)}: {worst.code}", style, worst.text)


def _host(report: TriageReport) -> str:
    """Return the host's name; empty if it has none."""
    host = report.machine.host
    return "" if host is None or host == NO_NAME else host


def _log(report: TriageReport) -> tuple[list[str], int]:
    """Return the last lines of the log, and how many are left out before them."""
    records = report.parts.log if report.parts is not None else ()
    lines = [*all_lines(records)]
    shown: list[str] = []
    room = MAX_LOG_CHARACTERS
    for line in reversed(lines[-MAX_LOG:]):
        room -= len(line) + 1
        if room < 0:
            break
        shown.append(line)
    return shown[::-1], len(lines) - len(shown)


def _stack_legend(stacks: Sequence[HungStack]) -> list[PageLegend]:
    used = {stack.task_class for stack in stacks}
    entries = [(name, words) for name, words in TASK_CLASSES.items() if name in used]
    return [PageLegend("What the tasks do", entries)] if entries else []


# --- a section for each command


def _sections(report: TriageReport) -> Iterator[_Section]:
    brief, full = dict(pages(report)), dict(pages(report, verbose=True))
    sources = frozenset([*header(report.target, verbose=True)][1:])
    blamed = {
        verdict.see.split()[0].removeprefix("msa-")
        for verdict in shown_verdicts(report)
        if verdict.severity != "info"
    }

    def blocks(name: str, verbose: bool) -> Iterator[Block]:
        # Where the types are from, and what the dump lacks, is said once on the page.
        found = (full if verbose else brief).get(name, ())
        return (
            block
            for block in found
            if not (isinstance(block, Text) and block in sources)
        )

    for name, section in report.sections.items():
        made = page_blocks(partial(blocks, name))
        extra = [*_tasks_by_class(report)] if name == "prstat" else []
        yield _Section(
            name=name,
            title=_TITLES[name],
            summary=section.summary or f"no report: {section.error}",
            is_open=name in blamed,
            blocks=[*extra, *made],
            pictures=[_marked(picture) for picture in _pictures(report, name)],
            legend=section_legend(name, made, report.parts),
            command=command_line(report.target, name, ("-v",)),
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


def _tasks_by_class(report: TriageReport) -> Iterator[PageTable]:
    """Yield how many threads do what: it is the legend of the classes, too."""
    parts = report.parts
    if parts is None or parts.prstat is None:
        return
    rows = sorted(parts.prstat.totals.classes.items(), key=lambda item: -item[1])
    columns = (Column("NOW"), Column("THREADS", "right"), free_text("WHAT THEY DO"))
    yield page_table(
        Table(
            columns,
            [(name, f"{count:,}", TASK_CLASSES.get(name, "-")) for name, count in rows],
        )
    )
