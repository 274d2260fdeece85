# SPDX-License-Identifier: LGPL-2.1-or-later

"""Page tables of processes take a large part of memory."""

from collections.abc import Iterator

from msgspec import Struct

from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import pid_text
from msatools.reports.units import size
from msatools.tasks.spaces import AddressSpace

_MUCH = 0.05
"""Share of managed memory. Page tables are 0.2 % of what they map without huge pages:
many processes that map the same have more, or who touches a page here and there."""

_SHOWN = 3


class _Tables(Struct, frozen=True):
    parts: ReportParts
    pages: int
    managed: int

    @property
    def largest(self) -> list[AddressSpace]:
        known = [each for each in self.parts.spaces or () if each.table_bytes]
        return sorted(known, key=lambda each: (-(each.table_bytes or 0), each.pid))


def _when(parts: ReportParts) -> Iterator[_Tables]:
    assert parts.memstat is not None
    pages = {each.name: each.pages for each in parts.memstat.classes}
    managed = parts.memstat.managed_pages
    tables = pages["kernel.page_tables"]
    if managed and tables >= _MUCH * managed:
        yield _Tables(parts, tables, managed)


def _words(subject: _Tables) -> str:
    amount = size(subject.pages * subject.parts.target.page_size)
    share = f"{100 * subject.pages / subject.managed:.0f} %"
    return f"page tables of processes take {amount} ({share} of memory)"


def _evidence(subject: _Tables) -> Iterator[str]:
    largest = subject.largest
    if not largest:
        return
    shown = ", ".join(
        f"{pid_text(each.pid, each.comm)} {size(each.table_bytes or 0)}"
        for each in largest[:_SHOWN]
    )
    yield f"most: {shown}, of {len(largest):,} address spaces"


RULE = VerdictRule(
    code="page-tables",
    needs=("memstat",),
    when=_when,
    severity="info",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("memstat", "--by", "process"),
)
