# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks wait for a file system that was frozen."""

import shlex
from collections.abc import Iterator

from msatools.locks.report import LocksReport, Root
from msatools.records import dataclass
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text, pid_text
from msatools.reports.units import duration

_REASON = "frozen file system "
"""How the reasons of such roots begin (:mod:`msatools.locks.reasons`)."""

_NAMED = 8


@dataclass(frozen=True)
class _FrozenRoot:
    root: Root
    locks: LocksReport
    is_live: bool


def _when(parts: ReportParts) -> Iterator[_FrozenRoot]:
    assert parts.locks is not None
    for root in parts.locks.roots:
        # The only task that waits for it is the root itself.
        if root.reason.removeprefix("a ").startswith(_REASON.strip()):
            yield _FrozenRoot(root, parts.locks, parts.target.live)


def _words(subject: _FrozenRoot) -> str:
    root = subject.root
    own = root.kind == "task"
    tasks = count_text(root.blocked_d + root.blocked_s + own, "task")
    age_ns = max(root.max_age_ns, root.age_ns or 0)
    what = root.reason.removeprefix("a ")
    return f"{tasks} behind the {what} for up to {duration(age_ns)}"


def _evidence(subject: _FrozenRoot) -> Iterator[str]:
    behind = {*subject.root.behind}
    waits = [wait for wait in subject.locks.waits if wait.pid in behind]
    named = ", ".join(pid_text(wait.pid, wait.comm) for wait in waits[:_NAMED])
    yield f"behind it: {named}{', …' if len(waits) > _NAMED else ''}"
    place = subject.root.reason.removeprefix(_REASON)
    if subject.is_live and place.startswith("/"):
        yield f"thaw it with: fsfreeze -u {shlex.quote(place)}"


RULE = VerdictRule(
    code="frozen-filesystem",
    needs=("locks",),
    when=_when,
    severity="warning",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("locks", "--chains", "--state", "D"),
)
