# SPDX-License-Identifier: LGPL-2.1-or-later

"""A general slab cache is large, and most of its objects are one module's."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.memory.by.groups import SlabGroup
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.unreclaimable import slab_groups
from msatools.reports.units import size

_MUCH = 0.05
"""Share of managed memory that one cache has."""

_SHOWN = 3


class _Leak(Struct, frozen=True):
    parts: ReportParts
    cache: SlabGroup
    managed: int


def _when(parts: ReportParts) -> Iterator[_Leak]:
    assert parts.memstat is not None
    managed = parts.memstat.managed_pages
    caches = slab_groups(parts.memstat).values()
    for cache in sorted(caches, key=lambda cache: -cache.pages):
        if managed and cache.module and cache.pages >= _MUCH * managed:
            yield _Leak(parts, cache, managed)


def _words(subject: _Leak) -> str:
    cache = subject.cache
    amount = size(cache.pages * subject.parts.target.page_size)
    share = f"{100 * cache.pages / subject.managed:.0f} % of memory"
    objects = f"most of its objects seem to be of module {cache.module}"
    return f"slab cache {cache.name} has {amount} ({share}), and {objects}"


def _evidence(subject: _Leak) -> Iterator[str]:
    cache = subject.cache
    if cache.objects_in_use is not None:
        yield f"{cache.objects_in_use:,} objects of {cache.bytes_each} bytes are in use"
    share = 100 * (cache.module_share or 0)
    yield f"{share:.0f} % of the objects read contain a pointer into it"
    words = [word for word in cache.words or () if word.owner == cache.module]
    if words:
        yield f"to {', '.join(word.name for word in words[:_SHOWN])}"


RULE = VerdictRule(
    code="memory-leak",
    needs=("memstat",),
    when=_when,
    severity="warning",
    confidence="evidence",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("memstat", "--by", "slab"),
)
