# SPDX-License-Identifier: LGPL-2.1-or-later

"""The hypervisor took memory by a balloon, and the guest has too little."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.rules.memory_low import RULE as LOW
from msatools.report.summaries import kinds_of_pages
from msatools.report.words import ago
from msatools.reports.units import size

_MUCH = 0.10
"""Share of all pages that is in the balloon."""


class _Balloon(Struct, frozen=True):
    parts: ReportParts
    pages: int
    total: int
    """Pages of the guest's memory, with those in the balloon."""

    last_ns: int | None
    """When memory ran out; ``None`` if it is low now."""


def _when(parts: ReportParts) -> Iterator[_Balloon]:
    assert parts.memstat is not None
    pages = {each.name: each.pages for each in parts.memstat.classes}["offline"]
    is_low = any(LOW.when(parts))
    # A user can have the kernel kill at any time (order -1).
    ooms = [x for x in parts.ooms if x.constraint != "cgroup" and (x.order or 0) >= 0]
    if pages >= _MUCH * parts.memstat.pages > 0 and (is_low or ooms):
        last_ns = None if is_low else ooms[-1].time_ns
        total = sum(kinds_of_pages(parts.memstat).values())
        yield _Balloon(parts, pages, total, last_ns)


def _words(subject: _Balloon) -> str:
    page = subject.parts.target.page_size
    amount, total = size(subject.pages * page), size(subject.total * page)
    share = f"{100 * subject.pages / subject.total:.0f} %"
    why = "memory is low" if subject.last_ns is None else "memory ran out"
    return f"{why}, and the balloon has {amount} ({share}) of the guest's {total}"


def _evidence(subject: _Balloon) -> Iterator[str]:
    yield (
        "the hypervisor took these pages (PageOffline: of a balloon, or unplugged by "
        "virtio-mem)"
    )
    if subject.last_ns is not None:
        yield f"memory ran out last {ago(subject.parts, subject.last_ns)}"


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
