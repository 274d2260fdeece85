# SPDX-License-Identifier: LGPL-2.1-or-later

"""A parent does not reap its children, and many are dead."""

from collections.abc import Iterator

from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text, pid_text
from msatools.reports.units import duration
from msatools.zombies.model import ZombieGroup

MANY = 50
"""Zombies of one parent; some few are common, and harmless."""

_OLD_NS = 10_000_000_000
"""A busy parent may reap many at a time, every few seconds."""


def _when(parts: ReportParts) -> Iterator[ZombieGroup]:
    assert parts.zombies is not None
    for group in parts.zombies.groups:
        if group.count >= MANY and group.max_age_ns >= _OLD_NS:
            yield group


def _words(group: ZombieGroup) -> str:
    parent = pid_text(group.ppid, group.parent_comm)
    return (
        f"{parent} has not reaped {count_text(group.count, 'zombie')}, the oldest for "
        f"{duration(group.max_age_ns)} ({group.verdict})"
    )


RULE = VerdictRule(
    code="zombies",
    needs=("zombies",),
    when=_when,
    severity="warning",
    confidence="likely",
    words=_words,
    evidence=lambda group: (group.evidence.text,),
    see=lambda group: ("zombies", "--parent", str(group.ppid), "-v"),
)
