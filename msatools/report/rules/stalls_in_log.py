# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel's own watchdogs reported stalls: rules for the code of each.

What stands still now has a verdict by itself, which says more (standing_still).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msatools.report.causes import Cause
from msatools.report.events import Event
from msatools.report.frames import faulting
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.rules.standing_still import pools_of, stalls_of
from msatools.report.words import ago, cause_text, count_text

CODES: dict[str, tuple[Cause, ...]] = {
    "cpu-stalled": ("soft-lockup", "hard-lockup"),
    "rcu-stalled": ("rcu-stall",),
    "workqueue-stalled": ("workqueue-stall",),
}
"""Codes of verdicts, and the reports in the log that they come from."""

_RECENT_NS = 60_000_000_000
"""A stall that goes on is reported again within so long."""


@dataclass(frozen=True)
class _LoggedStalls:
    events: list[Event]
    parts: ReportParts

    @property
    def goes_on(self) -> bool:
        now = self.parts.taken_at_ns
        last = self.events[-1].time_ns
        return now is None or now - last < _RECENT_NS


def _when(
    code: str, causes: tuple[Cause, ...]
) -> Callable[[ReportParts], Iterator[_LoggedStalls]]:
    def when(parts: ReportParts) -> Iterator[_LoggedStalls]:
        found = [
            event
            for event in parts.events
            if event.cause in causes and not event.is_panic
        ]
        if found and not _stands_still(parts, code):
            yield _LoggedStalls(found, parts)

    return when


def _stands_still(parts: ReportParts, code: str) -> bool:
    if code == "workqueue-stalled":
        return bool(pools_of(parts))
    return any(stalls_of(parts, code))


def _severity(subject: _LoggedStalls) -> Severity:
    return "critical" if subject.goes_on else "warning"


def _words(subject: _LoggedStalls) -> str:
    last = subject.events[-1]
    times = count_text(len(subject.events), "time")
    when = ago(subject.parts, last.time_ns)
    at = f"CPU {last.cpu}: " if last.cpu is not None else ""
    frames = faulting(last.backtrace.frames, last.cause) if last.backtrace else []
    place = f" in {frames[0].text}" if frames else ""
    return f"{at}{cause_text(last.cause)}{place}, reported {times}, last {when}"


def _evidence(subject: _LoggedStalls) -> Iterator[str]:
    last = subject.events[-1]
    yield last.message
    for trace in last.backtraces[:3]:
        if trace.frames:
            cpu = "-" if trace.cpu is None else trace.cpu
            frames = " < ".join(frame.text for frame in trace.frames[:4])
            yield f"CPU {cpu} {trace.comm or ''}: {frames}"


RULES = tuple(
    VerdictRule(
        code=code,
        needs=(),
        when=_when(code, causes),
        severity=_severity,
        confidence="exact",
        words=_words,
        evidence=_evidence,
        see=lambda subject: ("cpus", "-v"),
    )
    for code, causes in CODES.items()
)
