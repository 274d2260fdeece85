# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of msa-report: what happened, what is wrong, and what to look at next."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from msgspec import Struct

from msatools.kernel.report import ADDED, Report
from msatools.model import Gauge, single
from msatools.program.model import UNLISTED, Target
from msatools.report.log import Cause

if TYPE_CHECKING:
    from msatools.report.rule import ReportParts

# --- Command lines to type, for the target that a report is of.


STDIN = "-"
"""The path of a log that came from standard input."""


def command_line(target: Target, name: str, arguments: Iterable[str] = ()) -> str:
    """Return the command line of ``msa-NAME`` on a target, quoted for a shell.

    :param arguments: Arguments after the target.
    """
    if target.kind == "log":
        # A log has data only for msa-report.
        name, arguments = "report", ("-v",)
    words = [f"msa-{name}", *_target_words(target), *arguments]
    return " ".join(shlex.quote(word) for word in words)


def _target_words(target: Target) -> list[str]:
    if target.path == STDIN:
        return [STDIN]
    if target.kind == "kcore":
        return []
    if target.kind == "qmp":
        return ["--qemu", target.path]
    # A bare number would be parsed as an interval.
    is_number = target.path.replace(".", "", 1).isdecimal()
    words = [f"./{target.path}" if is_number else target.path]
    vmlinux = next((s.path for s in target.sources if s.module == "kernel"), None)
    return [*words, *target.options, *(["-s", vmlinux] if vmlinux else [])]


# --- Options of msa-report.


class ReportOptions(Struct, frozen=True, kw_only=True):
    """Which parts of the kernel to read, and which results to keep."""

    crash_only: bool = False
    """Read only what is needed to know how the kernel crashed."""

    keep_parts: bool = False
    """Keep the reports of all commands."""

    memory_map: bool = False
    """Make a map of memory."""

    stacks: bool = False
    """Keep the stacks of all threads, too."""

    unconfined: bool = False
    """Whether the dump is read outside of the sandbox for want of seccomp."""


# --- the report


Severity = Literal["critical", "warning", "info"]
"""``critical``: the machine died of it, or does no work because of it."""

VerdictConfidence = Literal["exact", "likely", "evidence"]
"""``exact``: the kernel records it; ``likely``: by a hint that may be old;
``evidence``: circumstantial, by what tasks do."""

SECTIONS = ("memstat", "prstat", "locks", "zombies", "cpus")
"""The commands whose reports are read."""


class TriageVerdict(Struct, frozen=True, kw_only=True):
    """One thing that is wrong, or that happened."""

    code: str
    """One of the codes in docs/commands/report.md."""

    severity: Severity
    """``critical``: the machine died of it, or does no work because of it."""

    confidence: VerdictConfidence
    """``exact``: the kernel records it; ``likely``: by a hint that may be old;
    ``evidence``: circumstantial, by what tasks do."""

    text: str
    """One sentence."""

    evidence: tuple[str, ...]
    """Facts that support the verdict, as text."""

    see: str
    """The command line that shows more."""


class NestedFault(Struct, frozen=True, kw_only=True):
    """A fault in what panic() calls."""

    cause: Cause
    """What kind of fault it was."""

    message: str
    """The line of the log that describes the fault best."""

    function: str | None
    """The faulting function."""

    module: str | None
    """The module of that function; ``None`` for the kernel proper."""

    time_ns: int
    """Time of the fault, by the log's clock."""


class Unloaded(Struct, frozen=True, kw_only=True):
    """A bad address where a module was, or may have been."""

    address: str
    """In hexadecimal, as in the kernel's log."""

    last: str
    """The module that was unloaded last."""


class CrashDetails(Struct, frozen=True, kw_only=True):
    """How the kernel crashed."""

    cause: Cause
    """What kind of fault or request it was."""

    message: str | None
    """The line of the log that describes the crash best."""

    function: str | None
    """The faulting function; of a stall, the one that waits or spins; for want of
    memory, the one that asked for it."""

    module: str | None
    """The module of that function; ``None`` for the kernel proper."""

    taints: str | None
    """Letters, such as ``OE``; empty if the kernel was not tainted."""

    cpu: int | None
    pid: int | None
    """ID of the thread that ran when the kernel crashed; if it crashed because a task
    was hung, of that task. ``None`` if unknown."""

    comm: str | None
    frames: tuple[str, ...]
    """Its stack as in the kernel's log, the innermost frame first."""

    fingerprint: str
    """See docs/guides/fingerprints.md."""

    time_ns: int | None
    """When it crashed, by the kernel's clock; ``None`` if the log does not say."""

    is_jump: Annotated[bool, ADDED] = False
    """Whether the faulting function jumped to an address without code."""

    unloaded: Annotated[Unloaded | None, ADDED] = None
    """The address, if modules were loaded there and none is now; else ``None``."""

    nested: Annotated[tuple[NestedFault, ...], ADDED] = ()
    """Faults in panic() itself, the oldest first: results of the crash, not causes."""

    line: Annotated[int | None, ADDED] = None
    """The line of the text that the message is, from 1; of a log alone."""

    has_panicked: Annotated[bool, UNLISTED] = True
    """Whether the kernel certainly crashed; if a log ends in an oops, it only likely
    did."""


class Machine(Struct, frozen=True, kw_only=True):
    """The machine that the kernel runs or ran on."""

    host: str | None
    """Name of the host, in the initial namespace."""

    build: str | None
    """The version of the kernel's build: ``#1 SMP Debian 6.12.117-1``."""

    uptime_ns: int | None
    """Time since boot, with suspend."""

    time_ns: int | None
    """Time of day then, in ns since 1970 (CLOCK_REALTIME)."""

    cpus: int | None
    """Number of online CPUs, with those that the panic stopped."""

    ram_bytes: int | None
    """Memory that the kernel manages."""

    load: tuple[float, ...] | None
    """Averages over 1, 5 and 15 minutes."""

    taints: str | None
    """Letters, such as ``OE``; empty if the kernel is not tainted."""


class ReportSection(Struct, frozen=True, kw_only=True):
    """Summary of one command's report, or the error for which there is none."""

    summary: Annotated[str | None, ADDED] = None
    """One line."""

    error: Annotated[str | None, ADDED] = None
    """Why it has no report."""


class NextStep(Struct, frozen=True, kw_only=True):
    """A command line to go on with."""

    command: str
    """To be typed into a shell."""

    why: str
    """What it shows."""


class TriageReport(Report, frozen=True, kw_only=True):
    """What happened to a kernel, and what is wrong with it."""

    schema: ClassVar[str] = "msatools.report/1"

    machine: Machine
    verdicts: tuple[TriageVerdict, ...]
    """The worst first."""

    checked: Annotated[int | None, ADDED] = None
    """Number of codes whose conditions were tested; ``None`` in older recordings."""

    unchecked: Annotated[tuple[str, ...], ADDED] = ()
    """Codes that could not be tested, as parts of the kernel are missing, or a rule has
    a fault."""

    crash: CrashDetails | None
    """How the kernel crashed; ``None`` if it did not."""

    log: tuple[str, ...]
    """The last lines of the kernel's log that matter, as dmesg prints them."""

    sections: Mapping[str, ReportSection]
    """What each command says, by name."""

    next: tuple[NextStep, ...]
    """Command lines to go on with, the most useful first."""

    parts: Annotated["ReportParts | None", UNLISTED] = None
    """The reports of all commands; ``None`` in a recording."""


class RecordedTriage(TriageReport, frozen=True, kw_only=True):
    """A report in a recording, which has no reports of other commands."""

    parts: Annotated[None, UNLISTED] = None


# --- Gauges of msa-report. Pure.


def gauges(report: TriageReport) -> Iterator[Gauge]:
    """Yield the gauges of a report: verdicts by code and severity, and the machine."""
    found = Counter(verdict.severity for verdict in report.verdicts)
    yield Gauge(
        name="msatools_report_verdicts",
        help="Verdicts by severity.",
        labels=("severity",),
        values={(severity,): found[severity] for severity in get_args(Severity)},
    )
    codes: Counter[tuple[str, ...]] = Counter(
        (verdict.code,) for verdict in report.verdicts
    )
    yield Gauge(
        name="msatools_report_code_verdicts",
        help="Verdicts by code; those that there are not have no line.",
        labels=("code",),
        values=codes,
    )
    yield single(
        "msatools_report_crashed",
        "Whether the kernel has crashed.",
        report.crash is not None,
    )
    failed = [each for each in report.sections.values() if each.error is not None]
    yield single(
        "msatools_report_failed_sections",
        "Commands that have no report.",
        len(failed),
    )
    machine = report.machine
    uptime_ns = machine.uptime_ns
    yield single(
        "msatools_report_uptime_seconds",
        "Time since boot.",
        None if uptime_ns is None else uptime_ns / 1e9,
    )
    yield single("msatools_report_online_cpus", "CPUs that are online.", machine.cpus)
    yield single(
        "msatools_report_memory_bytes",
        "Memory that the kernel manages.",
        machine.ram_bytes,
    )
