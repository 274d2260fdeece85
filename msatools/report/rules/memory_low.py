# SPDX-License-Identifier: LGPL-2.1-or-later

"""Free memory is below the watermarks of all zones, and little can be reclaimed."""

from collections.abc import Iterator

from msatools.report.memory import MemoryState, ZoneState
from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule

_FEW = 0.10
"""Share of managed memory that is available, below which it is little."""

_VERY_FEW = 0.05


def _share(memory: MemoryState) -> float:
    managed = sum(zone.managed for zone in memory.zones)
    available = memory.available_pages
    return 1.0 if not managed or available is None else available / managed


def _is_below_min(memory: MemoryState) -> bool:
    return all(zone.to_min <= 0 for zone in memory.zones)


def _when(parts: ReportParts) -> Iterator[MemoryState]:
    memory = parts.memory
    if memory is None or not memory.zones:
        return
    if all(zone.to_low <= 0 for zone in memory.zones) and _share(memory) < _FEW:
        yield memory


def _severity(memory: MemoryState) -> Severity:
    return "critical" if _share(memory) < _VERY_FEW else "warning"


def _words(memory: MemoryState) -> str:
    mark = "min" if _is_below_min(memory) else "low"
    return (
        f"free memory is below the watermark {mark} of all zones, and "
        f"{100 * _share(memory):.1f} % of memory is available without swapping"
    )


def _reserve_text(zone: ZoneState) -> str:
    if not zone.reserve:
        return ""
    return f", and {zone.reserve:,} reserved for this zone (lowmem_reserve)"


def _evidence(memory: MemoryState) -> Iterator[str]:
    for zone in memory.zones:
        yield (
            f"node {zone.node} {zone.name}: {zone.free:,} pages free, watermarks min "
            f"{zone.min:,}, low {zone.low:,}{_reserve_text(zone)}"
        )
    if memory.swap_pages:
        yield f"swap: {memory.swap_free_pages:,} of {memory.swap_pages:,} pages free"
    else:
        yield "there is no swap"


RULE = VerdictRule(
    code="memory-low",
    needs=("memory",),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda memory: ("memstat", "--by", "process,slab,fs"),
)
