# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel crashed."""

from collections.abc import Iterator, Sequence

from msatools.report.frames import parse_frame, plain_name
from msatools.report.model import CrashDetails
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import fault_text, nested_text, unloaded_text, who_text

_FRAMES = 4
_NESTED = 3


def _when(parts: ReportParts) -> Iterator[CrashDetails]:
    if parts.crash is not None:
        yield parts.crash


def _words(crash: CrashDetails) -> str:
    if crash.cause == "nmi":
        return (
            "the kernel crashed: stopped by an NMI, from an operator or the hardware; "
            "the code that it interrupted is not at fault"
        )
    return f"the kernel crashed: {fault_text(crash)}, {who_text(crash)}"


def _evidence(crash: CrashDetails) -> Iterator[str]:
    if crash.message is not None:
        yield crash.message
    if gone := unloaded_text(crash):
        yield gone
    if crash.frames and crash.cause != "nmi":
        yield f"stack: {' < '.join(_faulting(crash))}"
    yield f"fingerprint {crash.fingerprint}"
    yield from map(nested_text, crash.nested[:_NESTED])


def _faulting(crash: CrashDetails) -> Sequence[str]:
    """Return the first frames from the faulting function on."""
    frames = [parse_frame(text) for text in crash.frames]
    names = [plain_name(frame.function) if frame else "" for frame in frames]
    first = names.index(crash.function) if crash.function in names else 0
    return crash.frames[first : first + _FRAMES]


def _see(crash: CrashDetails) -> tuple[str, ...]:
    if crash.cause == "hung-task" and crash.pid:
        return ("locks", "-p", str(crash.pid), "--stacks")
    # Tasks of other crashes run.
    return ("cpus", "-v")


RULE = VerdictRule(
    code="panic",
    needs=(),
    when=_when,
    severity="critical",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=_see,
)
