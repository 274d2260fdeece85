# SPDX-License-Identifier: LGPL-2.1-or-later

"""Most memory is of a kind that reclaim cannot free."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.rules.memory_low import RULE as LOW
from msatools.report.unreclaimable import Kind, kinds_text, unreclaimable
from msatools.reports.units import size

_MOST = 0.6
"""Share of memory, of all kinds, where memory is low."""

_KERNEL = 0.4
"""Share of memory that the kernel itself has, which is much at any time."""


class _PinnedMemory(Struct, frozen=True):
    parts: ReportParts
    kinds: list[Kind]
    managed: int
    is_low: bool


def _when(parts: ReportParts) -> Iterator[_PinnedMemory]:
    memory = parts.memory
    kinds = unreclaimable(parts)
    managed = sum(zone.managed for zone in memory.zones) if memory else 0
    if not managed:
        return
    is_low = any(True for _ in LOW.when(parts))
    share = sum(kind.pages for kind in kinds) / managed
    kernel = sum(kind.pages for kind in kinds if kind.is_kernel) / managed
    if (is_low and share >= _MOST) or kernel >= _KERNEL:
        yield _PinnedMemory(parts, kinds, managed, is_low)


def _severity(subject: _PinnedMemory) -> Severity:
    return "critical" if subject.is_low else "warning"


def _words(subject: _PinnedMemory) -> str:
    largest, total = subject.kinds[0], sum(kind.pages for kind in subject.kinds)
    amount = size(largest.pages * subject.parts.target.page_size)
    return (
        f"{100 * total / subject.managed:.0f} % of memory cannot be reclaimed: most of "
        f"it is {largest.name}, {amount}"
    )


RULE = VerdictRule(
    code="memory-unreclaimable",
    needs=("memory", "memstat"),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=lambda subject: kinds_text(subject.parts),
    see=lambda subject: ("memstat", "--by", "process,slab,fs", "--unattributed"),
)
