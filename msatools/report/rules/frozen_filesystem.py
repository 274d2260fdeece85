# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks wait for a file system that was frozen."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from msatools.locks.report import Root
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text
from msatools.reports.units import duration

_REASON = "frozen file system "
"""How the reasons of such roots begin (:mod:`msatools.locks.reasons`)."""


@dataclass(frozen=True)
class _FrozenRoot:
    root: Root
    is_live: bool


def _when(parts: ReportParts) -> Iterator[_FrozenRoot]:
    assert parts.locks is not None
    for root in parts.locks.roots:
        if root.kind == "external" and root.reason.startswith(_REASON.strip()):
            yield _FrozenRoot(root, parts.target.live)


def _words(subject: _FrozenRoot) -> str:
    root = subject.root
    tasks = count_text(root.blocked_d + root.blocked_s, "task")
    return f"{tasks} behind the {root.reason} for up to {duration(root.max_age_ns)}"


def _evidence(subject: _FrozenRoot) -> Iterator[str]:
    pids = ", ".join(map(str, subject.root.waiters[:8]))
    yield f"waiting: {pids}"
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
