# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the report of msa-report, and (``--full``) the report of each command."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain, groupby, islice

from msgspec.structs import replace

from msatools.kernel.report import Loss
from msatools.legends.report import CONFIDENCE
from msatools.render.blocks import (
    Block,
    Items,
    More,
    Span,
    Style,
    Text,
    advice,
    cut_line,
    line,
    plural,
)
from msatools.render.header import header, notes
from msatools.report.model import (
    CrashDetails,
    ReportSection,
    Severity,
    TriageReport,
    TriageVerdict,
)
from msatools.report.rule import (
    DOUBTS,
    fault_text,
    nested_text,
    unloaded_text,
    who_text,
)
from msatools.reports.units import duration, size

VERDICTS = 10
"""Default maximum of verdicts shown in full."""

_ALIKE = 3
"""Maximum verdicts of one code to show in full, if not all verdicts are."""

_FRAMES = 12
NO_NAME = "(none)"
"""The kernel's default host name (UTS_NODENAME)."""

_NOTES = 6
_NESTED = 3
_MORE = advice("-v shows them")
_STYLES: dict[Severity, Style] = {"critical": "bad", "warning": "warn", "info": "dim"}


def report_blocks(
    report: TriageReport,
    *,
    rows: int | None = None,
    verbose: bool = False,
    full: bool = False,
) -> Iterator[Block]:
    """Yield the blocks of an ``msa-report`` report.

    :param rows: Maximum number of verdicts, if not the default.
    :param verbose: Whether to show whole stacks.
    :param full: Whether to append the report of each command.
    """
    # The crash has its own lines.
    yield from header(replace(report.target, crash=None), verbose=verbose)
    yield line(machine_text(report))
    if report.crash is not None:
        yield from _crash(report.crash, verbose)
    elif not report.target.live:
        yield line(not_crashed_text(report))
    yield from _verdicts(report, rows)
    yield line()
    for names, section in groupby_section(report.sections):
        yield from _section(names, section)
    if report.next:
        yield line()
        yield line(Span("NEXT", "title"))
        for step in report.next:
            # Never wrapped, so that the command can be copied.
            words = f"  {step.command}", Span(f"   # {step.why}", "dim")
            yield Text(words, narrow="keep")
    if report.log:
        yield line()
        yield line(Span("LOG, the last lines that matter", "title"))
        yield from (cut_line(f"  {logged}") for logged in report.log)
    yield from _notes(report, verbose)
    if full and report.parts is not None:
        yield from _full(report)


def _notes(report: TriageReport, verbose: bool) -> Iterator[Text]:
    found = [*notes(report)]
    shown = found if verbose else found[:_NOTES]
    yield from shown
    if left := len(found) - len(shown):
        yield line(Span(f"… {plural(left, 'more note')}", "dim"), _MORE)


def crash_text(report: TriageReport) -> str:
    """Return the fingerprint of the crash, or words that there was no crash."""
    if report.crash is None:
        return "the kernel has not crashed"
    return report.crash.fingerprint


def not_crashed_text(report: TriageReport) -> str:
    """Return the line for a dump or log without a known crash."""
    if report.target.kind == "log":
        return "It has no crash: none came, or the log ends before it."
    if report.coverage.get(Loss.LOG.value):
        return "Cannot tell whether it crashed: parts of the kernel log are unreadable."
    return "It had not crashed: the dump was taken of a running kernel."


def machine_text(report: TriageReport) -> str:
    """Return a line on the machine: host, uptime, CPUs, memory, load, time, taints."""
    machine = report.machine
    words = [machine.host] if machine.host not in (None, NO_NAME) else []
    if machine.uptime_ns is not None:
        words.append(f"up {duration(machine.uptime_ns)}")
    if machine.cpus is not None:
        words.append(plural(machine.cpus, "CPU"))
    if machine.ram_bytes is not None:
        words.append(f"{size(machine.ram_bytes)} managed")
    if machine.load is not None:
        words.append("load " + " ".join(f"{each:.2f}" for each in machine.load))
    if machine.time_ns is not None:
        when = _time_of_day(machine.time_ns)
        dumped = "dumped" if report.crash is None else "crashed"
        if report.target.kind == "log":
            dumped = "log ends"
        words.append(f"{'now' if report.target.live else dumped} {when}")
    if machine.taints:
        words.append(f"tainted {machine.taints}")
    return ", ".join(words) or "-"


def _time_of_day(time_ns: int) -> str:
    try:
        then = datetime.fromtimestamp(time_ns // 10**9, timezone.utc)
    except (OverflowError, OSError, ValueError):
        return "-"
    return f"{then:%Y-%m-%d %H:%M:%S} UTC"


def _crash(crash: CrashDetails, verbose: bool) -> Iterator[Text]:
    yield line(Span(f"CRASHED: {fault_text(crash)}", "bad"), f"  {who_text(crash)}")
    if crash.message is not None:
        where = f" (line {crash.line})" if crash.line else ""
        yield line(f"  {crash.message}{where}")
    if gone := unloaded_text(crash):
        yield line(f"  {gone}")
    frames = [*frames_text(crash.frames)]
    shown = frames if verbose else frames[:_FRAMES]
    for frame in shown:
        yield cut_line(f"    {frame}")
    if left := len(frames) - len(shown):
        yield line(Span(f"    … {plural(left, 'more frame')}", "dim"), _MORE)
    yield line(Span(f"  fingerprint {crash.fingerprint}", "dim"))
    nested = crash.nested if verbose else crash.nested[:_NESTED]
    for fault in nested:
        yield line(f"  {nested_text(fault)}")
    if left := len(crash.nested) - len(nested):
        yield line(Span(f"  … {plural(left, 'more fault')}", "dim"), _MORE)


def frames_text(frames: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a stack; equal consecutive frames share a line."""
    for frame, alike in groupby(frames):
        count = len([*alike])
        yield frame if count == 1 else f"{frame}  ({count} times)"


def _verdicts(report: TriageReport, rows: int | None) -> Iterator[Block]:
    yield line()
    found = shown_verdicts(report)
    if not found:
        yield line(no_verdict_text(report))
        return
    full, short = page_parts([verdict.code for verdict in found], rows or VERDICTS)
    more = More("verdict", is_chosen=rows is not None)
    items = [[*_verdict(found[index])] for index in full]
    names = [[found[index].code] for index in full]
    if short:
        # The last item: it is the first to be left out on a small screen.
        items.append([*_rest(found, len(full), short)])
        names.append([found[index].code for index in sorted(chain(*short))])
    critical = sum(found[index].severity == "critical" for index in full)
    yield Items(items, more, names, max(critical, 1))
    yield from _marks(report)


def _rest(
    found: Sequence[TriageVerdict], in_full: int, short: Sequence[Sequence[int]]
) -> Iterator[Text]:
    """Yield the lines of verdicts that are shown in short."""
    others = plural(len(found) - in_full, "further verdict")
    how = advice(f"-n {len(found)} shows all in full")
    yield line(Span(f"… {others}, in short", "dim"), how)
    for alike in short:
        yield _in_short([found[index] for index in alike])


def page_parts(codes: Sequence[str], most: int) -> tuple[list[int], list[list[int]]]:
    """Choose the verdicts to show in full; the others share a line for each code.

    If there are too many, the first few of each code are shown in full: of ten disks
    that do not answer, the tenth matters less than another problem.

    :param codes: The codes of the verdicts, the worst first.
    :param most: Maximum number of verdicts in full.
    :return: Indexes of those in full, and of the others by code.
    """
    full = [*range(min(len(codes), most))]
    if len(codes) > most:
        of_code: Counter[str] = Counter()
        full = []
        for index, code in enumerate(codes):
            if len(full) < most and of_code[code] < _ALIKE:
                of_code[code] += 1
                full.append(index)
        others = (index for index in range(len(codes)) if index not in full)
        full = sorted([*full, *islice(others, most - len(full))])
    short: dict[str, list[int]] = {}
    for index in sorted({*range(len(codes))} - {*full}):
        short.setdefault(codes[index], []).append(index)
    return full, [*short.values()]


def _in_short(alike: Sequence[TriageVerdict]) -> Text:
    """Return the line for verdicts of one code: the first, and how many follow."""
    first, left = alike[0], len(alike) - 1
    more = f"; and {left:,} more" if left else ""
    return cut_line(
        Span(f"{severity_text(first)}: {first.code}", _STYLES[first.severity]),
        f"  {first.text}{more}",
    )


def _marks(report: TriageReport) -> Iterator[Text]:
    """Yield a line that explains the marks of confidence in the report."""
    used = {verdict.confidence for verdict in report.verdicts}
    words = [
        f"({entry.name}) {entry.meaning}"
        for entry in CONFIDENCE.entries
        if (entry.key or entry.name) in used and entry.name != "exact"
    ]
    texts = [section.summary or "" for section in report.sections.values()]
    texts += (each.text for each in report.verdicts)
    texts += (line for each in report.verdicts for line in each.evidence)
    if any(re.search(r"(^| )~\d", each) for each in texts):
        words.append("~ before a PID means likely")
    if words:
        yield line(Span("; ".join(words), "dim"))


def no_verdict_text(report: TriageReport) -> str:
    """Return the line for a report without verdicts other than the crash."""
    other = "other " if report.crash is not None else ""
    count = report.checked
    checks = "automatic checks" if count is None else plural(count, "automatic check")
    lost = ""
    if report.target.kind == "log":
        lost = f" {len(report.unchecked)} more need a dump."
    elif report.unchecked:
        codes = ", ".join(report.unchecked)
        lost = f" Not tested, as something is missing: {codes}."
    return (
        f"No {other}problem found by the {checks}. They do not cover everything: if "
        f"you came with a symptom, go on below.{lost}"
    )


def shown_verdicts(report: TriageReport) -> list[TriageVerdict]:
    """Return the verdicts but that of the crash, which has its own lines."""
    return [verdict for verdict in report.verdicts if verdict.code != "panic"]


def severity_text(verdict: TriageVerdict) -> str:
    """Return the severity of a verdict, and its confidence unless it is exact."""
    doubt = DOUBTS[verdict.confidence]
    return f"{verdict.severity} ({doubt})" if doubt else verdict.severity


def _verdict(verdict: TriageVerdict) -> Iterator[Text]:
    label = f"{severity_text(verdict)}: {verdict.code}"
    yield line(Span(label, _STYLES[verdict.severity]), f"  {verdict.text}")
    for fact in verdict.evidence:
        yield line(f"    {fact}")


def groupby_section(
    sections: Mapping[str, ReportSection],
) -> Iterator[tuple[str, ReportSection]]:
    """Yield each section, with the names of all consecutive sections equal to it."""
    for _, alike in groupby(sections.items(), key=lambda item: item[1]):
        names, found = zip(*alike, strict=True)
        yield ", ".join(names), found[0]


def _section(name: str, section: ReportSection) -> Iterator[Text]:
    if section.error is not None:
        yield line(Span(f"{name}: {section.error}", "warn"))
    else:
        yield line(Span(f"{name}: ", "title"), section.summary or "-")


def _full(report: TriageReport) -> Iterator[Block]:
    """Yield the report of each command, under a title."""
    parts = report.parts
    assert parts is not None
    for name, page in pages(report):
        yield line()
        yield line(Span(f"--- msa-{name}", "title"))
        yield from page


def pages(
    report: TriageReport, *, verbose: bool = False
) -> Iterator[tuple[str, Iterator[Block]]]:
    """Yield the name and the blocks of each command that has a report.

    :param verbose: Whether to show all details, except of msa-memstat.
    """
    # Few reports need these modules, which are slow to import.
    from msatools.render.cpus.report import cpus_blocks
    from msatools.render.locks.report import locks_blocks
    from msatools.render.memstat.report import memstat_blocks
    from msatools.render.prstat.report import prstat_blocks
    from msatools.render.zombies.report import zombies_blocks

    parts = report.parts
    if parts is None:
        return
    if parts.memstat is not None:
        yield "memstat", memstat_blocks(replace(parts.memstat, by=None))
    if parts.prstat is not None:
        yield "prstat", prstat_blocks(parts.prstat, rows=_PAGE, verbose=verbose)
    if parts.locks is not None:
        yield "locks", locks_blocks(parts.locks, verbose=verbose)
    if parts.zombies is not None:
        yield "zombies", zombies_blocks(parts.zombies, verbose=verbose)
    if parts.cpus is not None:
        yield "cpus", cpus_blocks(parts.cpus, verbose=verbose)


_PAGE = 20
"""Maximum rows of msa-prstat's table."""
