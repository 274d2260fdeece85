# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules on stalls, of which there are two for most codes.

One is on what stands still now, by the kernel's structures. The other is on what the
kernel's own watchdogs have logged; it is silent where the first one speaks, which says
more.
"""

from collections.abc import Callable, Iterator

from msgspec import Struct

from msatools.cpus.model import RunnableTask
from msatools.cpus.stalls.model import Stall, StallCode
from msatools.locks.report import Root
from msatools.report.causes import Cause
from msatools.report.events import Event
from msatools.report.frames import faulting
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.waits import starved_roots
from msatools.report.words import (
    ago,
    cause_text,
    count_text,
    pid_text,
    waits_for_text,
)
from msatools.reports.units import duration

_MOST_LINES = 6
"""Lines of a chain that are evidence; ``msa-cpus --stalls`` has all."""

_ROOTS = 3

_RECENT_NS = 60_000_000_000
"""A stall that goes on is reported again within so long."""

# --- what stands still now


class _PresentStall(Struct, frozen=True):
    stall: Stall
    parts: ReportParts


def present_stalls(code: StallCode) -> VerdictRule[_PresentStall]:
    """Return the rule on what has stood still for the kernel's own limit."""
    return VerdictRule(
        code=code,
        needs=("cpus",),
        when=lambda parts: (
            _PresentStall(stall, parts) for stall in _stalls_of(parts, code)
        ),
        severity="critical",
        confidence=lambda subject: subject.stall.confidence,
        words=lambda subject: subject.stall.text,
        evidence=_stall_evidence,
        see=lambda subject: ("cpus", "--stalls"),
    )


def _stalls_of(parts: ReportParts, code: str) -> Iterator[Stall]:
    """Yield what stands still, the worst first."""
    found = parts.cpus.stalls if parts.cpus is not None else None
    if found is not None:
        yield from (
            each for each in found.found if each.over_limit and each.code == code
        )


def _stall_evidence(subject: _PresentStall) -> Iterator[str]:
    stall, parts = subject.stall, subject.parts
    since = "unknown" if stall.for_ns is None else duration(stall.for_ns)
    waiting = f"; {count_text(stall.waiting, 'task')} waiting" if stall.waiting else ""
    yield f"for {since}; the limit is {duration(stall.limit_ns)}{waiting}"
    yield from stall.chain[:_MOST_LINES]
    yield from behind_starved(parts, lambda task: not task.throttled, *stall.cpus)


def behind_starved(
    parts: ReportParts, is_starved: Callable[[RunnableTask], bool], *cpus: int
) -> Iterator[str]:
    """Yield who waits for tasks that get no CPU: hung-tasks does not list them."""
    for root in starved_roots(parts, is_starved, *cpus)[:_ROOTS]:
        waiting = root.blocked_d + root.blocked_s
        who = pid_text(root.pid, root.comm)
        yield f"{waits_for_text(waiting, who)}, the longest {duration(root.max_age_ns)}"


def pools_of(parts: ReportParts) -> Iterator[Root]:
    """Yield the pools of workers whose pending work nobody begins."""
    if parts.locks is not None:
        yield from (root for root in parts.locks.roots if root.pool is not None)


# --- what the watchdogs have logged


class LoggedStalls(Struct, frozen=True):
    """Reports of one kind in the kernel's log, the latest last."""

    events: list[Event]
    is_fatal: bool
    """Whether the kernel crashed because of it."""

    is_over: bool
    """Whether it is known that nothing stands still any more."""

    parts: ReportParts

    @property
    def goes_on(self) -> bool:
        """Whether it goes on, as far as is known."""
        now = self.parts.taken_at_ns
        return not self.is_over and (
            now is None or now - self.events[-1].time_ns < _RECENT_NS
        )


def logged_stalls(code: str, causes: tuple[Cause, ...]) -> VerdictRule[LoggedStalls]:
    """Return the rule on stalls that the kernel's own watchdogs reported."""

    def when(parts: ReportParts) -> Iterator[LoggedStalls]:
        found = [
            event
            for event in parts.events
            if event.cause in causes and not event.is_panic
        ]
        if found and not _is_present(parts, code):
            is_fatal = parts.crash is not None and parts.crash.cause in causes
            yield LoggedStalls(found, is_fatal, _is_over(parts, code), parts)

    return VerdictRule(
        code=code,
        needs=(),
        when=when,
        severity=_severity,
        confidence="exact",
        words=_words,
        evidence=_evidence,
        see=lambda subject: ("cpus", "-v"),
    )


def _is_present(parts: ReportParts, code: str) -> bool:
    if code == "workqueue-stalled":
        return any(pools_of(parts))
    return any(_stalls_of(parts, code))


def _is_over(parts: ReportParts, code: str) -> bool:
    """Return whether what would stand still now was looked at."""
    if code == "workqueue-stalled":
        return parts.locks is not None
    return parts.cpus is not None and parts.cpus.stalls is not None


def _severity(subject: LoggedStalls) -> Severity:
    return "critical" if subject.is_fatal or subject.goes_on else "warning"


def _words(subject: LoggedStalls) -> str:
    last = subject.events[-1]
    times = count_text(len(subject.events), "time")
    when = ago(subject.parts, last.time_ns)
    at = f"CPU {last.cpu}: " if last.cpu is not None else ""
    frames = faulting(last.backtrace.frames, last.cause) if last.backtrace else []
    place = f" in {frames[0].text}" if frames else ""
    over = "" if subject.is_fatal or not subject.is_over else "; it is over"
    return f"{at}{cause_text(last.cause)}{place}, reported {times}, last {when}{over}"


def _evidence(subject: LoggedStalls) -> Iterator[str]:
    last = subject.events[-1]
    yield last.message
    for trace in last.backtraces[:3]:
        if trace.frames:
            cpu = "-" if trace.cpu is None else trace.cpu
            frames = " < ".join(frame.text for frame in trace.frames[:4])
            yield f"CPU {cpu} {trace.comm or ''}: {frames}"
