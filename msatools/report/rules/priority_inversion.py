# SPDX-License-Identifier: LGPL-2.1-or-later

"""A more urgent task waits for one that gets no CPU."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.cpus.diagnostics import LONG_NS
from msatools.locks.report import Inversion, LocksReport
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import pid_text
from msatools.reports.units import duration


class _NamedInversion(Struct, frozen=True):
    inversion: Inversion
    names: dict[int, str]


def _names(locks: LocksReport) -> dict[int, str]:
    names = {wait.pid: wait.comm for wait in locks.waits}
    for lock in locks.locks:
        names |= {owner.pid: owner.comm for owner in lock.owners}
    return names


def _when(parts: ReportParts) -> Iterator[_NamedInversion]:
    assert parts.locks is not None
    names = _names(parts.locks)
    for inversion in parts.locks.inversions:
        # Who has a turn now and then gets on, if slowly: its lock is a root of locks.
        if (inversion.owner_ready_ns or 0) >= LONG_NS:
            yield _NamedInversion(inversion, names)


def _words(subject: _NamedInversion) -> str:
    each, names = subject.inversion, subject.names
    return (
        f"{pid_text(each.waiter, names.get(each.waiter))} (priority {each.waiter_pri}) "
        f"waits for {pid_text(each.owner, names.get(each.owner))} (priority "
        f"{each.owner_pri}), which is runnable and has not run for "
        f"{duration(each.owner_ready_ns or 0)}"
    )


RULE = VerdictRule(
    code="priority-inversion",
    needs=("locks",),
    when=_when,
    severity="warning",
    confidence="exact",
    words=_words,
    evidence=lambda subject: (f"lock {subject.inversion.lock}",),
    see=lambda subject: (
        *("locks", "--stacks", "-p"),
        f"{subject.inversion.waiter},{subject.inversion.owner}",
    ),
)
