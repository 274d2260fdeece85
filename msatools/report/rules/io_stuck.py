# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks have waited long for a device, or for a server of a file system."""

from collections import defaultdict
from collections.abc import Iterator

from msgspec import Struct, field

from msatools.locks.report import LocksReport, Root
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.waits import HUNG_NS, served_age_ns, stuck_roots, uninterruptible
from msatools.report.words import count_text, tasks_text, waited_text
from msatools.tasks.functions import function_text

_GROUPS, _NAMED = 3, 3

_SUSPENDED = "(suspended)"
"""In the reason of a disk of the device mapper (:mod:`msatools.locks.externals`)."""


class _StuckDevice(Struct):
    """One device or server."""

    reason: str
    locks: LocksReport
    roots: list[Root] = field(default_factory=list)

    @property
    def tasks(self) -> set[int]:
        """IDs of the tasks in state D that wait for it."""
        behind = {pid for root in self.roots for pid in root.behind}
        return behind & uninterruptible(self.locks)

    @property
    def max_age_ns(self) -> int:
        return max(served_age_ns(self.locks, root) for root in self.roots)


def _when(parts: ReportParts) -> Iterator[_StuckDevice]:
    assert parts.locks is not None
    by_reason: dict[str, _StuckDevice] = {}
    for root in stuck_roots(parts.locks):
        subject = _StuckDevice(root.reason, parts.locks)
        by_reason.setdefault(root.reason, subject).roots.append(root)
    yield from sorted(by_reason.values(), key=lambda each: -len(each.tasks))


def _severity(subject: _StuckDevice) -> Severity:
    return "critical" if subject.max_age_ns >= HUNG_NS else "warning"


def _words(subject: _StuckDevice) -> str:
    waited = waited_text(len(subject.tasks), subject.max_age_ns)
    return f"{subject.reason}: {waited}"


def _evidence(subject: _StuckDevice) -> Iterator[str]:
    waits, tasks = defaultdict(list), subject.tasks
    for wait in subject.locks.waits:
        if wait.pid in tasks:
            where = function_text(wait.caller, wait.module)
            waits[where or wait.task_class].append(wait)
    groups = sorted(waits.items(), key=lambda item: -len(item[1]))
    for caller, alike in groups[:_GROUPS]:
        named = tasks_text(((wait.pid, wait.comm) for wait in alike), _NAMED)
        yield f"{count_text(len(alike), 'task')} in {caller}: {named}"
    if _SUSPENDED in subject.reason:
        yield "a suspended disk holds its I/O until it is resumed: dmsetup resume NAME"
    if left := sum(len(alike) for _, alike in groups[_GROUPS:]):
        yield f"… {count_text(left, 'more task')}"


def _see(subject: _StuckDevice) -> tuple[str, ...]:
    if subject.roots[0].external in ("device", "swap"):
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
