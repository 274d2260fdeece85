# SPDX-License-Identifier: LGPL-2.1-or-later

"""A CPU is busy with what no task of that name does, or RCU callbacks pile up on it."""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from msatools.cpus.model import Diagnostic, RunnableTask, RunQueue
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import pid_text
from msatools.reports.units import duration

_BACKLOG = "callback: "
"""How the evidence of findings on RCU callbacks begins."""


class _Backlog(Struct, frozen=True):
    found: Diagnostic
    thread: RunnableTask | None
    """The thread that is to call them, if that waits for a CPU."""

    queue: RunQueue | None
    """The CPU that it waits for."""


def _storms(parts: ReportParts) -> Iterator[Diagnostic]:
    assert parts.cpus is not None
    for found in parts.cpus.findings:
        if found.code == "storm" and not _is_backlog(found):
            yield found


def _is_backlog(found: Diagnostic) -> bool:
    return any(line.startswith(_BACKLOG) for line in found.evidence)


def _backlogs(parts: ReportParts) -> Iterator[_Backlog]:
    assert parts.cpus is not None
    for found in parts.cpus.findings:
        if found.code == "storm" and _is_backlog(found):
            yield _Backlog(found, *_thread(parts, found.cpus[0]))


def _thread(
    parts: ReportParts, cpu: int
) -> tuple[RunnableTask | None, RunQueue | None]:
    """Return the thread that calls a CPU's callbacks, and the CPU that it waits for.

    ``rcuop/N`` has those of an offloaded CPU (kernel/rcu/tree_nocb.h), ``rcuc/N`` those
    of a kernel that was booted with threads for them.
    """
    assert parts.cpus is not None
    names = {f"rcuop/{cpu}", f"rcuc/{cpu}", f"ksoftirqd/{cpu}"}
    for queue in parts.cpus.run_queues:
        for task in queue.waiting:
            if task.comm in names:
                return task, queue
    return None, None


def _backlog_severity(subject: _Backlog) -> Severity:
    return "info" if subject.thread is None else "warning"


def _backlog_evidence(subject: _Backlog) -> Iterator[str]:
    thread, queue = subject.thread, subject.queue
    if thread is None or queue is None:
        return
    who = pid_text(thread.pid, thread.comm)
    waited = "" if thread.wait_ns is None else f" for {duration(thread.wait_ns)}"
    runs = ""
    if queue.current is not None:
        runs = f", which runs {pid_text(queue.current.pid, queue.current.comm)}"
    yield f"{who} is to call them, and has waited{waited} for cpu{queue.cpu}{runs}"


RULES: tuple[VerdictRule[Any], ...] = (
    VerdictRule(
        code="cpu-storm",
        needs=("cpus",),
        when=_storms,
        severity="info",
        confidence="evidence",
        words=lambda found: found.text,
        evidence=lambda found: (),
        see=lambda found: ("cpus", "-v"),
    ),
    VerdictRule(
        code="rcu-backlog",
        needs=("cpus",),
        when=_backlogs,
        severity=_backlog_severity,
        confidence="evidence",
        words=lambda subject: subject.found.text,
        evidence=_backlog_evidence,
        see=lambda subject: ("cpus", "--stalls"),
    ),
)
