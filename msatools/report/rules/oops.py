# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel had faults that it survived.

The task that was killed by one leaves its locks locked: who waits for them waits for
ever, and that is a consequence of the fault.
"""

from collections.abc import Iterator
from itertools import takewhile

from msgspec import Struct

from msatools.locks.report import LockRow
from msatools.report.causes import OOPSES
from msatools.report.events import Event
from msatools.report.frames import Frame, faulting
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import ago, cause_text, count_text, pid_text, tasks_text


class _Oopses(Struct, frozen=True):
    events: list[Event]
    parts: ReportParts
    left: list[LockRow]
    """Locks that are still locked, and may be so because of a fault: they name a task
    that it killed; or one that does not have them and began later, so that it may have
    the ``task_struct`` of one that was killed."""


def _when(parts: ReportParts) -> Iterator[_Oopses]:
    crash = parts.crash
    # Those that follow a panic are faults of panic() itself.
    before = list(takewhile(lambda event: not event.is_panic, parts.events))
    survived = [
        event
        for event in (parts.events if crash is None else before)
        if event.cause in OOPSES
        and not event.is_panic
        and not (crash and (event.message, event.cause) == (crash.message, crash.cause))
    ]
    if survived:
        yield _Oopses(survived, parts, _left(parts, survived))


def _left(parts: ReportParts, events: list[Event]) -> list[LockRow]:
    locks = parts.locks.locks if parts.locks is not None else ()
    left = [row for row in locks if row.refuted and not row.owners]
    began = _began_ns(parts)
    return [
        row
        for row in left
        if _names_killed(row, events)
        or any(began.get(own.pid, 0) > events[0].time_ns for own in row.refuted)
    ]


def _began_ns(parts: ReportParts) -> dict[int, int]:
    """Map each process to when it began, by CLOCK_MONOTONIC."""
    if parts.prstat is None or parts.taken_at_ns is None:
        return {}
    now_ns = parts.taken_at_ns
    return {task.pid: now_ns - task.lifetime_ns for task in parts.prstat.tasks}


def _names_killed(row: LockRow, events: list[Event]) -> bool:
    """Return whether a lock names a task that died in a fault as its owner."""
    killed = {_victim(event) for event in events}
    return any((own.pid, own.comm) in killed for own in row.refuted)


def _victim(event: Event) -> tuple[int | None, str | None]:
    """Return the PID and the name of the task that a fault was in."""
    trace = event.backtrace
    if event.pid is not None or trace is None:
        return event.pid, event.comm
    return trace.pid, trace.comm


def _words(oopses: _Oopses) -> str:
    first = oopses.events[0]
    frames = faulting(first.backtrace.frames, first.cause) if first.backtrace else []
    place = f" in {_function(frames[0])}" if frames else ""
    many = count_text(len(oopses.events), "fault")
    when = ago(oopses.parts, first.time_ns)
    waiters = sum(len(row.waiters) for row in oopses.left)
    wait = "waits" if waiters == 1 else "wait"
    after = f"; {count_text(waiters, 'task')} {wait} for a lock left locked"
    return (
        f"the kernel went on after {many}; the first, {when}: "
        f"{cause_text(first.cause)}{place}{after if waiters else ''}"
    )


def _function(frame: Frame) -> str:
    return frame.function + (f" [{frame.module}]" if frame.module else "")


def _evidence(oopses: _Oopses) -> Iterator[str]:
    for event in oopses.events[:3]:
        pid, comm = _victim(event)
        who = "" if pid is None else f", in {pid_text(pid, comm)}"
        yield f"{event.message}{who}"
    for row in oopses.left[:3]:
        had = "had" if _names_killed(row, oopses.events) else "may have had"
        waiters = tasks_text(((pid, None) for pid in row.waiters), 3)
        yield (
            f"the task that died {had} {row.type} {row.name or row.id}; "
            f"waiting: {waiters}"
        )


RULE = VerdictRule(
    code="oops",
    needs=(),
    when=_when,
    severity=lambda oopses: "critical" if oopses.left else "warning",
    confidence=lambda oopses: "likely" if oopses.left else "exact",
    words=_words,
    evidence=_evidence,
    see=lambda oopses: ("report", "--full"),
)
