# SPDX-License-Identifier: LGPL-2.1-or-later

"""Lines that all reports share: target, losses and notes."""

from collections.abc import Iterator

from msatools.kernel.report import Report
from msatools.program.model import Crash, LogSpan, Source, Target
from msatools.render.blocks import Span, Text, line, plural

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
    """Describe a kernel log: its lines, boot, period and kernel."""
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
    """Yield the time and the interval of a report, as far as known."""
    if report.taken_at_ns is not None:
        yield f"now {report.taken_at_ns / 1e9:.3f} s"
    if report.interval_ns is not None:
        yield f"interval {report.interval_ns / 1e9:.3f} s"


def losses(report: Report) -> list[str]:
    """Return a report's counts of lost data, as text, except unreadable tasks."""
    return [
        f"{count:,} {key.replace('_', ' ')}"
        for key, count in report.coverage.items()
        if count and key.endswith(_LOSSES) and key != "tasks_unreadable"
    ]


def among_read(report: Report) -> str:
    """Return words that qualify "No task" if tasks were lost; otherwise empty."""
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
