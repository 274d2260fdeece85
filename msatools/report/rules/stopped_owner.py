# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks wait for others that are stopped, traced or frozen."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.locks.report import LocksReport, Root
from msatools.report.model import Severity, VerdictConfidence
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.waits import HUNG_NS, is_long, stopped_age_ns, stopped_roots
from msatools.report.words import (
    count_text,
    is_vfork,
    root_text,
    tasks_text,
    waited_text,
)
from msatools.reports.units import duration

_NAMED = 3
_SHOWN = 6


class _StoppedRoots(Struct, frozen=True):
    roots: list[Root]
    locks: LocksReport
    is_live: bool

    @property
    def behind(self) -> set[int]:
        """IDs of the tasks that wait for them."""
        own = {root.pid for root in self.roots}
        return {pid for root in self.roots for pid in root.behind if pid not in own}


def _when(parts: ReportParts) -> Iterator[_StoppedRoots]:
    assert parts.locks is not None
    roots = [*stopped_roots(parts.locks)]
    if roots:
        yield _StoppedRoots(roots, parts.locks, parts.target.live)


def _severity(subject: _StoppedRoots) -> Severity:
    is_hung = any(
        wait.state == "D" and is_long(wait, HUNG_NS) and not is_vfork(wait)
        for wait in subject.locks.waits
        if wait.pid in subject.behind
    )
    return "critical" if is_hung else "warning"


def _confidence(subject: _StoppedRoots) -> VerdictConfidence:
    """Return that of the least sure of them."""
    known = {root.confidence or "likely" for root in subject.roots}
    order: tuple[VerdictConfidence, ...] = ("exact", "likely", "evidence")
    return max(known, key=order.index)


def _words(subject: _StoppedRoots) -> str:
    first, *others = subject.roots
    count, age_ns = len(subject.behind), max(map(stopped_age_ns, subject.roots))
    if not others:
        return f"{root_text(first)}: {waited_text(count, age_ns)}"
    named = tasks_text(((root.pid, root.comm) for root in subject.roots), _NAMED)
    return (
        f"{len(others) + 1} stopped or frozen tasks ({named}) keep "
        f"{count_text(count, 'other')} waiting, the longest for {duration(age_ns)}"
    )


def _evidence(subject: _StoppedRoots) -> Iterator[str]:
    for root in subject.roots[:_SHOWN]:
        since = f" for {duration(root.age_ns)}" if root.age_ns is not None else ""
        count = root.blocked_d + root.blocked_s
        waited = waited_text(count, stopped_age_ns(root))
        yield f"{root_text(root)}{since}; {waited}"
    can_go_on = any(root.reason.startswith("stopped") for root in subject.roots)
    if subject.is_live and can_go_on:
        yield "to let a stopped task go on: kill -CONT PID"


RULE = VerdictRule(
    code="stopped-owner",
    needs=("locks",),
    when=_when,
    severity=_severity,
    confidence=_confidence,
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("locks", "--chains"),
)
