# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks wait for a file system that was frozen."""

from collections.abc import Iterator
from dataclasses import dataclass

from msatools.locks.report import Root
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text
from msatools.reports.units import duration

_REASON = "frozen file system "


@dataclass(frozen=True)
class _FrozenRoot:
    root: Root


def _when(parts: ReportParts) -> Iterator[_FrozenRoot]:
    assert parts.locks is not None
    for root in parts.locks.roots:
        if root.kind == "external" and _REASON.strip() in root.reason:
            yield _FrozenRoot(root)


def _words(subject: _FrozenRoot) -> str:
    root = subject.root
    tasks = count_text(root.blocked_d + root.blocked_s, "task")
    return f"{tasks} behind the {root.reason} for up to {duration(root.max_age_ns)}"


def _evidence(subject: _FrozenRoot) -> Iterator[str]:
    pids = ", ".join(map(str, subject.root.waiters[:8]))
    yield f"waiting: {pids}"
    yield "thaw it with: fsfreeze -u MOUNTPOINT"


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
