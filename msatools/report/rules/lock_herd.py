# SPDX-License-Identifier: LGPL-2.1-or-later

"""Many tasks are woken together for one thing, mostly needlessly."""

from collections.abc import Iterator

from msatools.locks.base.model import Herd
from msatools.report.model import VerdictConfidence
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text
from msatools.reports.units import duration_range


def _when(parts: ReportParts) -> Iterator[Herd]:
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
        yield f"woken by {herd.waker.pid} {herd.waker.comm}, most likely"


RULE = VerdictRule(
    code="lock-herd",
    needs=("locks",),
    when=_when,
    severity="info",
    confidence=_confidence,
    words=lambda herd: (
        f"{count_text(herd.waiters, 'thread')} woken together for {herd.lock}"
    ),
    evidence=_evidence,
    see=lambda herd: ("locks", "--by", "lock", "-v"),
)
