# SPDX-License-Identifier: LGPL-2.1-or-later

"""Pages were taken out of use after errors of the hardware, and who lost them."""

import re
from collections.abc import Iterator

from msgspec import Struct

from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text, pid_text
from msatools.reports.units import size

_SHOWN = 4

_SIGNALLED = re.compile(
    r"Memory failure: 0x[0-9a-f]{1,16}: (?P<how>Sending SIGBUS to|Killing) "
    r"(?P<comm>.*):(?P<pid>\d{1,10}) due to hardware memory corruption",
    re.DOTALL,
)
"""mm/memory-failure.c, kill_proc() and kill_procs()"""


class _Poisoned(Struct, frozen=True):
    parts: ReportParts
    pages: int


def _when(parts: ReportParts) -> Iterator[_Poisoned]:
    assert parts.memstat is not None
    for check in parts.memstat.checks:
        if check.name == "hwpoison" and (pages := check.kernel_pages or 0):
            yield _Poisoned(parts, pages)


def _words(subject: _Poisoned) -> str:
    amount = size(subject.pages * subject.parts.target.page_size)
    pages = count_text(subject.pages, "page")
    return f"{pages} of memory ({amount}) failed and were taken out of use"


def _evidence(subject: _Poisoned) -> Iterator[str]:
    yield "num_poisoned_pages: after errors of the hardware, or for a test"
    tasks = dict.fromkeys(
        (int(found["pid"]), found["comm"])
        for record in subject.parts.log
        if record.is_kernel and (found := _SIGNALLED.match(record.text))
    )
    if tasks:
        shown = ", ".join(pid_text(*task) for task in [*tasks][:_SHOWN])
        more = f" and {len(tasks) - _SHOWN:,} more" if len(tasks) > _SHOWN else ""
        yield f"SIGBUS went to {shown}{more}, whose pages they were"


RULE = VerdictRule(
    code="memory-poisoned",
    needs=("memstat",),
    when=_when,
    severity="warning",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("memstat",),
)
