# SPDX-License-Identifier: LGPL-2.1-or-later

"""Nearly all of swap is used."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.report.memory import MemoryState
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.reports.units import size

_FREE = 0.10
"""Share of swap that is free, below which it is full in a moment."""


_ENOUGH = 0.20
"""Share of memory that can be had without swapping."""


class _FullSwap(Struct, frozen=True):
    memory: MemoryState
    page_size: int
    pages: int
    free: int


def _when(parts: ReportParts) -> Iterator[_FullSwap]:
    memory = parts.memory
    if memory is None or not memory.swap_pages or memory.swap_free_pages is None:
        return
    if memory.swap_free_pages < _FREE * memory.swap_pages:
        page_size = parts.target.page_size
        yield _FullSwap(memory, page_size, memory.swap_pages, memory.swap_free_pages)


def _words(subject: _FullSwap) -> str:
    used, pages = subject.pages - subject.free, subject.pages
    amounts = f"{size(used * subject.page_size)} of {size(pages * subject.page_size)}"
    return f"swap is {100 * used / pages:.0f} % full: {amounts}"


def _evidence(subject: _FullSwap) -> Iterator[str]:
    cached = subject.memory.counters.get("NR_SWAPCACHE")
    if cached:
        yield f"{size(cached * subject.page_size)} of it is also in the swap cache"


def _severity(subject: _FullSwap) -> Severity:
    """Swap may be full of what nobody needs, as long as memory can be had."""
    memory = subject.memory
    managed = sum(zone.managed for zone in memory.zones)
    available = memory.available_pages
    has_enough = available is not None and available >= _ENOUGH * managed
    return "info" if has_enough else "warning"


RULE = VerdictRule(
    code="swap-full",
    needs=("memory",),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("memstat", "--by", "process,cgroup"),
)
