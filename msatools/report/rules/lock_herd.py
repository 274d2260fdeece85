# SPDX-License-Identifier: LGPL-2.1-or-later

"""Many tasks are woken together for one thing, mostly needlessly."""

from collections.abc import Callable, Iterator

from msatools.locks.base.model import Herd
from msatools.report.model import VerdictConfidence
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text, pid_text
from msatools.reports.units import duration_range


def _of_locks(parts: ReportParts) -> Iterator[Herd]:
    assert parts.locks is not None
    for herd in parts.locks.herds:
        if herd.confidence != "none":
            yield herd


def _confidence(herd: Herd) -> VerdictConfidence:
    return "likely" if herd.confidence == "confirmed" else "evidence"


def _evidence(herd: Herd) -> Iterator[str]:
    ages = duration_range(herd.min_age_ns, herd.max_age_ns)
    yield f"asleep for {ages}, after {herd.nvcsw_median:,} sleeps each (median)"
    if herd.waker is not None:
        yield f"most likely woken by {pid_text(herd.waker.pid, herd.waker.comm)}"


def _of_files(parts: ReportParts) -> Iterator[Herd]:
    """Yield herds that wait for no lock: those of sockets, pipes and the like."""
    assert parts.prstat is not None
    for herd in parts.prstat.herds:
        if herd.kind not in _LOCKS and herd.confidence != "none":
            yield herd


_LOCKS = ("futex", "lock")
"""Kinds of herds that the locks' part has."""


def _words(herd: Herd) -> str:
    name = f" ({herd.name})" if herd.name else ""
    return f"{count_text(herd.waiters, 'thread')} woken together for {herd.lock}{name}"


def _rule(
    part: str, when: Callable[[ReportParts], Iterator[Herd]], *see: str
) -> VerdictRule[Herd]:
    return VerdictRule(
        code="lock-herd",
        needs=(part,),
        when=when,
        severity="info",
        confidence=_confidence,
        words=_words,
        evidence=_evidence,
        see=lambda herd: (part, *see),
    )


RULES = (
    _rule("locks", _of_locks, "--by", "lock", "-v"),
    _rule("prstat", _of_files),
)
