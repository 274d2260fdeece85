# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks wait for a file system that was frozen."""

import shlex
from collections.abc import Iterator

from msgspec import Struct

from msatools.locks.report import LocksReport, Root
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.waits import HUNG_NS, frozen_roots
from msatools.report.words import tasks_text, waited_text

_REASON = "frozen file system "
"""How the reasons of such roots begin (:mod:`msatools.locks.reasons`)."""

_NAMED = 8


class _FrozenRoot(Struct, frozen=True):
    root: Root
    locks: LocksReport
    is_live: bool


def _when(parts: ReportParts) -> Iterator[_FrozenRoot]:
    assert parts.locks is not None
    for root in frozen_roots(parts.locks):
        yield _FrozenRoot(root, parts.locks, parts.target.live)


def _age_ns(root: Root) -> int:
    # A root may be the only task that waits for it.
    return max(root.max_age_ns, root.age_ns or 0)


def _severity(subject: _FrozenRoot) -> Severity:
    is_hung = subject.root.blocked_d and _age_ns(subject.root) >= HUNG_NS
    return "critical" if is_hung else "warning"


def _words(subject: _FrozenRoot) -> str:
    root = subject.root
    count = root.blocked_d + root.blocked_s + (root.kind == "task")
    place = root.reason.removeprefix("a ").removeprefix(_REASON.strip()).strip()
    waited = waited_text(count, _age_ns(root))
    return f"{place or 'a file system'} is frozen: {waited}"


def _evidence(subject: _FrozenRoot) -> Iterator[str]:
    behind = {*subject.root.behind}
    waits = [wait for wait in subject.locks.waits if wait.pid in behind]
    named = tasks_text(((wait.pid, wait.comm) for wait in waits), _NAMED)
    yield f"waiting: {named}"
    yield "by fsfreeze, a snapshot or a backup: the kernel does not record by whom"
    place = subject.root.reason.removeprefix(_REASON)
    if subject.is_live and place.startswith("/"):
        yield f"if that has ended, thaw it with: fsfreeze -u {shlex.quote(place)}"


RULE = VerdictRule(
    code="frozen-filesystem",
    needs=("locks",),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("locks", "--chains", "--state", "D"),
)
