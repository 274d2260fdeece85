# SPDX-License-Identifier: LGPL-2.1-or-later

"""The hypervisor took memory by a balloon, and the guest has too little."""

from collections.abc import Iterator

from msatools.records import dataclass
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.rules.memory_low import RULE as LOW
from msatools.report.words import ago
from msatools.reports.units import size

_MUCH = 0.10
"""Share of all pages that is in the balloon."""


@dataclass(frozen=True)
class _Balloon:
    parts: ReportParts
    pages: int
    total: int
    is_low: bool


def _when(parts: ReportParts) -> Iterator[_Balloon]:
    assert parts.memstat is not None
    pages = {each.name: each.pages for each in parts.memstat.classes}["offline"]
    is_low = any(LOW.when(parts))
    global_oom = any(oom.constraint != "cgroup" for oom in parts.ooms)
    if pages >= _MUCH * parts.memstat.pages > 0 and (is_low or global_oom):
        yield _Balloon(parts, pages, parts.memstat.pages, is_low)


def _words(subject: _Balloon) -> str:
    amount = size(subject.pages * subject.parts.target.page_size)
    share = f"{100 * subject.pages / subject.total:.0f} %"
    why = "memory is low" if subject.is_low else "memory ran out"
    return f"{why}, and a balloon has {amount} ({share}) of the guest"


def _evidence(subject: _Balloon) -> Iterator[str]:
    yield "pages that are marked offline: a balloon's, which the hypervisor has back"
    if not subject.is_low:
        last = subject.parts.ooms[-1]
        yield f"the last lack of memory was {ago(subject.parts, last.time_ns)}"


RULE = VerdictRule(
    code="balloon",
    needs=("memstat",),
    when=_when,
    severity="warning",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("memstat",),
)
