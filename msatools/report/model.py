# SPDX-License-Identifier: LGPL-2.1-or-later

"""The report of msa-report: what happened, what is wrong, and what to look at next."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Struct

from msatools.kernel.report import ADDED, Report
from msatools.report.causes import Cause
from msatools.target.model import UNLISTED

if TYPE_CHECKING:
    from msatools.report.parts import ReportParts

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
    """Facts that it stands on, as text."""

    see: str
    """The command line that shows more."""


class NestedFault(Struct, frozen=True, kw_only=True):
    """A fault in what panic() calls."""

    cause: Cause
    """What kind of fault it was."""

    message: str
    """The line of the log that names it best."""

    function: str | None
    """The faulting function."""

    module: str | None
    """The module of that function; ``None`` for the kernel proper."""

    time_ns: int
    """When, by the log's clock."""


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
    """The line of the log that names it best."""

    function: str | None
    """The faulting function; of a stall, the one that waits or spins; for want of
    memory, the one that asked for it."""

    module: str | None
    """The module of that function; ``None`` for the kernel proper."""

    taints: str | None
    """Letters, such as ``OE``; empty if the kernel was not tainted."""

    cpu: int | None
    pid: int | None
    """ID of the task at fault; of a hung task, that which was hung."""

    comm: str | None
    frames: tuple[str, ...]
    """Its stack as in the kernel's log, the innermost frame first."""

    fingerprint: str
    """See docs/guides/fingerprints.md."""

    time_ns: int | None
    """When it crashed, by the log's clock."""

    is_jump: Annotated[bool, ADDED] = False
    """Whether that function jumped to what is no code."""

    unloaded: Annotated[Unloaded | None, ADDED] = None
    """What is known of the address, if modules were there and none is."""

    nested: Annotated[tuple[NestedFault, ...], ADDED] = ()
    """Faults in panic() itself, the oldest first: results of the crash, not causes."""


class Machine(Struct, frozen=True, kw_only=True):
    """The machine, and since when it ran."""

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
    """What one command has to say; either key is there."""

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
