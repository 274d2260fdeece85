# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel had faults that it survived."""

from collections.abc import Iterator
from itertools import takewhile

from msatools.records import dataclass
from msatools.report.causes import OOPSES
from msatools.report.events import Event
from msatools.report.frames import faulting
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import ago, cause_text, count_text


@dataclass(frozen=True)
class _Oopses:
    events: list[Event]
    parts: ReportParts


def _when(parts: ReportParts) -> Iterator[_Oopses]:
    crash = parts.crash
    # Those that follow a panic are faults of panic() itself.
    before = list(takewhile(lambda event: not event.is_panic, parts.events))
    survived = [
        event
        for event in (parts.events if crash is None else before)
        if event.cause in OOPSES
        and not event.is_panic
        and not (crash and (event.message, event.cause) == (crash.message, crash.cause))
    ]
    if survived:
        yield _Oopses(survived, parts)


def _words(oopses: _Oopses) -> str:
    first = oopses.events[0]
    frames = faulting(first.backtrace.frames, first.cause) if first.backtrace else []
    place = f" in {frames[0].function}" if frames else ""
    many = count_text(len(oopses.events), "fault")
    when = ago(oopses.parts, first.time_ns)
    return f"the kernel went on after {many}; the first, {when}: " + (
        f"{cause_text(first.cause)}{place}"
    )


def _evidence(oopses: _Oopses) -> Iterator[str]:
    for event in oopses.events[:3]:
        yield event.message


RULE = VerdictRule(
    code="oops",
    needs=(),
    when=_when,
    severity="warning",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda oopses: ("report", "--full"),
)
