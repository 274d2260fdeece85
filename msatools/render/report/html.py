# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders a report as one self-contained HTML page."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib.resources import files
from pathlib import PurePath
from typing import TypeVar

from jinja2 import Environment
from markupsafe import Markup
from msgspec import Struct
from msgspec.structs import replace

from msatools import __version__
from msatools.kernel.report import Note, Report
from msatools.program.model import Target
from msatools.prstat.model import StackGroup
from msatools.render.blocks import Block, Column, Table, Text, escape, free_text, plural
from msatools.render.header import header, taken_from
from msatools.render.memstat.picture import Picture, picture, svg
from msatools.render.report.html_blocks import (
    TASK_CLASSES,
    HtmlTable,
    PageBlock,
    PageLegend,
    page_blocks,
    page_table,
    section_legend,
    verdict_legend,
)
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
from msatools.report.log import all_lines
from msatools.report.model import ReportSection, TriageReport, command_line
from msatools.report.rule import (
    ReportParts,
    fault_text,
    nested_text,
    unloaded_text,
    who_text,
)
from msatools.reports.units import duration_range

# --- The stacks of hung tasks, grouped by equal stack, for the page.
#
# Nothing is read here: msatools.report.report has collected the stacks.


MAX_STACKS = 40
MAX_FRAMES = 64
MAX_PIDS = 24


class HungStack(Struct, frozen=True):
    """A stack, and the tasks that have it."""

    count: str
    """Number of the tasks, as text."""

    task_class: str
    """The class of the tasks, as in column NOW of msa-prstat."""

    ages: str
    place: str
    """The function that called the wait; empty if unknown."""

    tasks: str
    """PIDs and names of the tasks."""

    frames: tuple[str, ...]
    """Innermost first."""

    left_out: str
    """Text on the frames left out; empty if there are none."""


def hung_stacks(parts: ReportParts | None) -> tuple[list[HungStack], int]:
    """Return the stacks of tasks in state D, and of tasks that block such tasks.

    Stacks that most tasks share come first.

    :return: The stacks, and the number of stacks left out.
    """
    if parts is None or parts.locks is None or not parts.stacks:
        return [], 0
    hung = {wait.pid for wait in parts.locks.waits if wait.state == "D"}
    for root in parts.locks.roots:
        if root.blocked_d and root.pid is not None:
            hung.add(root.pid)
    found = [(group, _only(group, hung)) for group in parts.stacks]
    found = [(group, tasks) for group, tasks in found if tasks]
    found.sort(key=lambda each: (-len(each[1]), -each[1][0][2]))
    callers = {wait.pid: wait.caller for wait in parts.locks.waits}
    shown = [_stack(group, tasks, callers) for group, tasks in found[:MAX_STACKS]]
    return shown, len(found) - len(shown)


_Task = tuple[int, str, int]
"""PID, name, and age in ns of what the task does now."""


def _only(group: StackGroup, hung: set[int]) -> list[_Task]:
    """Return the tasks of a group that are in *hung*, the longest wait first."""
    tasks = zip(group.pids, group.comms, group.ages_ns, strict=True)
    return sorted((each for each in tasks if each[0] in hung), key=lambda t: -t[2])


def _stack(
    group: StackGroup, wanted: list[_Task], callers: Mapping[int, str | None]
) -> HungStack:
    names = ", ".join(f"{pid} {comm}" for pid, comm, _ in wanted[:MAX_PIDS])
    left = len(wanted) - MAX_PIDS
    frames = len(group.frames) - MAX_FRAMES
    return HungStack(
        count=plural(len(wanted), "task"),
        task_class=group.task_class,
        ages=duration_range(wanted[-1][2], wanted[0][2]),
        # Tasks with one stack have one caller.
        place=callers.get(wanted[0][0]) or "",
        tasks=names + (f" and {left:,} more" if left > 0 else ""),
        frames=group.frames[:MAX_FRAMES],
        left_out=f"… {plural(frames, 'more frame')}" if frames > 0 else "",
    )


# --- Replaces paths in a report by file names.
#
# Readers of a page have the dump in another directory; without directories, the command
# lines can be copied and run beside the dump.


R = TypeVar("R", bound=Report)

_KERNEL = "vmcore"
"""The name to show for a path without a last component, such as ``/``."""


def portable(report: TriageReport) -> TriageReport:
    """Return a report with file names instead of paths."""
    names = _names(report.target)
    parts = report.parts

    def command(line: str) -> str:
        for path, name in names.items():
            line = _replaced(line, shlex.quote(path), shlex.quote(name))
        return line

    def words(text: str) -> str:
        for path, name in names.items():
            text = _replaced(text, path, name)
            # Other files in the same directory, such as parts of a split dump.
            folder = str(PurePath(path).parent)
            if folder not in ("/", "."):
                text = re.sub(rf"(?<![\w./-]){re.escape(folder)}/", "", text)
        return text

    def section(found: ReportSection) -> ReportSection:
        return (
            found if found.error is None else replace(found, error=words(found.error))
        )

    return replace(
        _portable_part(report, names),
        verdicts=tuple(
            replace(verdict, see=command(verdict.see)) for verdict in report.verdicts
        ),
        next=tuple(
            replace(step, command=command(step.command)) for step in report.next
        ),
        notes=tuple(Note(note.code, words(note.text)) for note in report.notes),
        sections={name: section(each) for name, each in report.sections.items()},
        parts=None if parts is None else _portable_parts(parts, names),
    )


def _names(target: Target) -> Mapping[str, str]:
    """Map the paths of the dump and of debug info to the names to show instead."""
    if target.kind == "kcore":
        return {}
    paths = [target.path, *(each.path for each in target.sources if each.path)]
    names = {path: PurePath(path).name or _KERNEL for path in paths}
    dump = names[target.path]
    if dump.startswith("-") or dump.replace(".", "", 1).isdecimal():
        # A command would take the bare name for an option or an interval.
        names[target.path] = f"./{dump}"
    return {path: name for path, name in names.items() if path != name}


def _replaced(text: str, path: str, name: str) -> str:
    """Return a text with *name* for each *path* that is not part of a longer path."""
    return re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w/-])", lambda _: name, text)


def _portable_parts(parts: ReportParts, names: Mapping[str, str]) -> ReportParts:
    def part(report: R | None) -> R | None:
        return None if report is None else _portable_part(report, names)

    return replace(
        parts,
        target=_portable_target(parts.target, names),
        memstat=part(parts.memstat),
        prstat=part(parts.prstat),
        locks=part(parts.locks),
        zombies=part(parts.zombies),
        cpus=part(parts.cpus),
    )


def _portable_part(report: R, names: Mapping[str, str]) -> R:
    return replace(report, target=_portable_target(report.target, names))


def _portable_target(target: Target, names: Mapping[str, str]) -> Target:
    return replace(
        target,
        path=names.get(target.path, target.path),
        sources=tuple(
            replace(source, path=source.path and names.get(source.path, source.path))
            for source in target.sources
        ),
    )


# --- A report as one self-contained HTML page of bounded size.
#
# Text from the dump is escaped twice: unprintable characters by the filter "printable",
# and HTML by the template engine (autoescape). Only the pictures, whose texts are
# escaped when drawn, are marked as HTML.


MAX_LOG = 2000
"""Maximum lines of the log on the page: the last ones."""

MAX_LOG_CHARACTERS = 400_000

MAX_FACTS = 40
"""Maximum number of verdicts, of facts for one verdict, and of notes."""

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
    """The crash or the worst verdict, in one line."""

    label: str
    """``crashed``, or severity and code of the verdict; empty if there is none."""

    style: str
    text: str


class _Section(Struct, frozen=True):
    """A collapsible section of the page, for one command."""

    name: str
    title: str
    summary: str
    is_open: bool
    blocks: Sequence[PageBlock]
    pictures: Sequence[Markup]
    legend: Sequence[PageLegend]
    command: str
    """The command line that shows the whole report of the command."""


def page(report: TriageReport, made: datetime | None = None) -> str:
    """Return the HTML page of a report; sections need ``report.parts``.

    :param made: Time to show as that of the page; ``None`` for now.
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
    """Return the crash, or else the worst verdict, or that no problem was found."""
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
    """Return the last lines of the log, and the number of lines left out."""
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
        # The page has one header; the lines on types and losses are not repeated.
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
        target = report.target
        yield picture(parts.memstat.map, target.page_size, target.release or "-")
    elif name == "locks" and parts.locks is not None:
        waits = wait_picture(parts.locks)
        if waits is not None:
            yield waits


def _marked(picture: Picture) -> Markup:
    """Return a picture as HTML that is not escaped again: :func:`svg` escapes texts."""
    return Markup(svg(picture).decode())


def _tasks_by_class(report: TriageReport) -> Iterator[HtmlTable]:
    """Yield a table of the threads in each class, with the meaning of the classes."""
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
