# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks have waited long for a device, or for a server of a file system."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import field

from msatools.locks.report import LocksReport, Root
from msatools.records import dataclass
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.rules.hung_tasks import HUNG_NS
from msatools.report.words import count_text, pid_text
from msatools.reports.units import duration

LONG_NS = 10_000_000_000
"""Requests that take longer are stuck: disks answer in milliseconds."""

_IO = "I/O on "
_REASONS = (_IO, "swap on ", "FUSE server")
"""How the reasons of such roots begin (:mod:`msatools.locks.reasons`)."""


@dataclass
class _StuckDevice:
    """One device or server."""

    reason: str
    locks: LocksReport
    roots: list[Root] = field(default_factory=list)

    @property
    def tasks(self) -> set[int]:
        return {pid for root in self.roots for pid in root.behind}

    @property
    def max_age_ns(self) -> int:
        return max(root.max_age_ns for root in self.roots)


def _when(parts: ReportParts) -> Iterator[_StuckDevice]:
    assert parts.locks is not None
    by_reason: dict[str, _StuckDevice] = {}
    for root in parts.locks.roots:
        if root.reason.startswith(_REASONS):
            subject = _StuckDevice(root.reason, parts.locks)
            by_reason.setdefault(root.reason, subject).roots.append(root)
    blocked = _blocked(parts.locks)
    stuck = [
        each
        for each in by_reason.values()
        if each.max_age_ns >= LONG_NS and each.tasks & blocked
    ]
    yield from sorted(stuck, key=lambda each: -len(each.tasks))


def _blocked(locks: LocksReport) -> set[int]:
    return {wait.pid for wait in locks.waits if wait.state == "D"}


def _severity(subject: _StuckDevice) -> Severity:
    return "critical" if subject.max_age_ns >= HUNG_NS else "warning"


def _words(subject: _StuckDevice) -> str:
    tasks = count_text(len(subject.tasks & _blocked(subject.locks)), "task")
    return (
        f"{subject.reason}: {tasks} in uninterruptible sleep for it, for up to "
        f"{duration(subject.max_age_ns)}"
    )


def _evidence(subject: _StuckDevice) -> Iterator[str]:
    waits = defaultdict(list)
    for wait in subject.locks.waits:
        if wait.pid in subject.tasks and wait.state == "D":
            waits[wait.caller or wait.task_class].append(wait)
    for caller, alike in sorted(waits.items(), key=lambda item: -len(item[1]))[:3]:
        named = ", ".join(pid_text(wait.pid, wait.comm) for wait in alike[:3])
        yield f"{count_text(len(alike), 'task')} in {caller}: {named}"


def _see(subject: _StuckDevice) -> tuple[str, ...]:
    if subject.reason.startswith(_IO):
        return ("locks", "--io")
    return ("locks", "--chains", "--state", "D")


RULE = VerdictRule(
    code="io-stuck",
    needs=("locks",),
    when=_when,
    severity=_severity,
    confidence="evidence",
    words=_words,
    evidence=_evidence,
    see=_see,
)
