# SPDX-License-Identifier: LGPL-2.1-or-later

"""Many control groups were removed and still exist, or much is charged to them."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text
from msatools.reports.units import size

_MANY = 100
"""Each holds some 10 KiB and more per CPU, and each reading of a memory.stat above it
and each round of reclaim visits all."""

_MUCH = 0.05
"""Share of managed memory."""


class _RemovedGroups(Struct, frozen=True):
    count: int
    pages: int | None
    """Pages charged to them; ``None`` if unknown."""

    page_size: int


def _when(parts: ReportParts) -> Iterator[_RemovedGroups]:
    memory = parts.memory
    if memory is None or not memory.removed_groups:
        return
    count, pages = memory.removed_groups, memory.removed_pages
    managed = sum(zone.managed for zone in memory.zones)
    if count >= _MANY or (pages or 0) >= _MUCH * managed > 0:
        yield _RemovedGroups(count, pages, parts.target.page_size)


def _words(subject: _RemovedGroups) -> str:
    verb = "exists" if subject.count == 1 else "exist"
    text = f"{count_text(subject.count, 'removed control group')} still {verb}"
    if subject.pages is None:
        return text
    return f"{text}: {size(subject.pages * subject.page_size)} are charged to them"


RULE = VerdictRule(
    code="dying-cgroups",
    needs=("memory",),
    when=_when,
    severity="info",
    confidence="exact",
    words=_words,
    evidence=lambda subject: (
        "page cache, files on tmpfs, swap, sockets or kernel objects that are charged "
        "to a removed group keep it until they are freed",
    ),
    see=lambda subject: ("memstat", "--by", "cgroup"),
)
