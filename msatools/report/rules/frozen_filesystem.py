# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks wait for a file system that was frozen."""

from collections.abc import Iterator
from dataclasses import dataclass

from msatools.locks.report import Root
from msatools.report.parts import Parts
from msatools.report.rule import Rule
from msatools.report.words import count_text
from msatools.reports.units import duration

_REASON = "frozen file system "


@dataclass(frozen=True)
class _Subject:
    root: Root


def _when(parts: Parts) -> Iterator[_Subject]:
    assert parts.locks is not None
    for root in parts.locks.roots:
        if root.kind == "external" and _REASON.strip() in root.reason:
            yield _Subject(root)


def _words(subject: _Subject) -> str:
    root = subject.root
    tasks = count_text(root.blocked_d + root.blocked_s, "task")
    return f"{tasks} behind the {root.reason} for up to {duration(root.max_age_ns)}"


def _evidence(subject: _Subject) -> Iterator[str]:
    pids = ", ".join(map(str, subject.root.waiters[:8]))
    yield f"waiting: {pids}"
    yield "thaw it with: fsfreeze -u MOUNTPOINT"


RULE = Rule(
    code="frozen-filesystem",
    needs=("locks",),
    when=_when,
    severity="warning",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("locks", "--chains", "--state", "D"),
)
