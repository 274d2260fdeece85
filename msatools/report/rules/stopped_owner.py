# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks wait for one that is stopped, traced or frozen."""

import shlex
from collections.abc import Iterator

from msatools.locks.report import LocksReport, Root
from msatools.records import dataclass
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.waits import HUNG_NS, stopped_roots
from msatools.report.words import is_vfork, root_text, waited_text
from msatools.reports.units import duration


@dataclass(frozen=True)
class _StoppedRoot:
    root: Root
    locks: LocksReport
    is_live: bool


def _when(parts: ReportParts) -> Iterator[_StoppedRoot]:
    assert parts.locks is not None
    for root in stopped_roots(parts.locks):
        yield _StoppedRoot(root, parts.locks, parts.target.live)


def _severity(subject: _StoppedRoot) -> Severity:
    behind = {*subject.root.behind}
    is_hung = any(
        wait.state == "D" and wait.age_ns >= HUNG_NS and not is_vfork(wait)
        for wait in subject.locks.waits
        if wait.pid in behind
    )
    return "critical" if is_hung else "warning"


def _words(subject: _StoppedRoot) -> str:
    root = subject.root
    count = root.blocked_d + root.blocked_s
    return f"{root_text(root)}: {waited_text(count, root.max_age_ns)}"


def _evidence(subject: _StoppedRoot) -> Iterator[str]:
    root = subject.root
    if root.age_ns is not None:
        yield f"it has been so for {duration(root.age_ns)}"
    if subject.is_live and root.reason.startswith("stopped"):
        yield f"let it go on with: kill -CONT {shlex.quote(str(root.pid))}"


RULE = VerdictRule(
    code="stopped-owner",
    needs=("locks",),
    when=_when,
    severity=_severity,
    confidence=lambda subject: subject.root.confidence or "likely",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("locks", "--chains"),
)
