# SPDX-License-Identifier: LGPL-2.1-or-later

"""The kernel warned (WARN()), or is tainted by a fault that its log no longer has."""

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from msatools.report.causes import OOPSES, Cause
from msatools.report.events import Event
from msatools.report.frames import faulting
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import ago, count_text

_PLACES = 3

_OF_TAINT: dict[str, tuple[str, frozenset[Cause]]] = {
    "D": ("it had an oops", OOPSES),
    "W": ("it warned", frozenset({"warning"})),
    "M": ("a machine check was reported", frozenset({"machine-check"})),
    "L": ("a CPU was locked up", frozenset({"soft-lockup", "hard-lockup"})),
}
"""What a taint says (kernel/panic.c, taint_flags), and which events are that."""


class _Warnings(Struct, frozen=True):
    events: list[Event]
    """Warnings of the log."""

    lost: list[str]
    """What happened by the kernel's taints, and is in no line of the log."""

    parts: ReportParts


def _when(parts: ReportParts) -> Iterator[_Warnings]:
    found = [
        event
        for event in parts.events
        if event.cause == "warning" and not event.is_panic
    ]
    causes = {event.cause for event in parts.events}
    lost = [
        f"{text} (taint {letter})"
        for letter, (text, known) in _OF_TAINT.items()
        if parts.log and letter in (parts.machine.taints or "") and not causes & known
    ]
    if found or lost:
        yield _Warnings(found, lost, parts)


def _places(events: list[Event]) -> Iterator[tuple[str, int]]:
    """Yield where the kernel warned, and how often, the most frequent first."""
    places: Counter[str] = Counter()
    for event in events:
        frames = (
            faulting(event.backtrace.frames, event.cause) if event.backtrace else []
        )
        module = f" [{frames[0].module}]" if frames and frames[0].module else ""
        places[f"{frames[0].function}{module}" if frames else event.message] += 1
    yield from places.most_common()


def _words(subject: _Warnings) -> str:
    words = []
    if subject.events:
        places = [*_places(subject.events)]
        where = f"in {places[0][0]}" if len(places) == 1 else f"at {len(places)} places"
        last = ago(subject.parts, subject.events[-1].time_ns)
        times = count_text(len(subject.events), "time")
        words.append(f"the kernel warned {times} {where}, last {last}")
    if subject.lost:
        words.append(f"{', '.join(subject.lost)}, which the log no longer has")
    return "; ".join(words)


def _evidence(subject: _Warnings) -> Iterator[str]:
    places = [*_places(subject.events)]
    if len(places) > 1:
        for place, count in places[:_PLACES]:
            yield f"{count_text(count, 'time')} in {place}"
    elif subject.events:
        yield subject.events[-1].message


RULE = VerdictRule(
    code="kernel-warnings",
    needs=(),
    when=_when,
    severity="info",
    confidence="exact",
    words=_words,
    evidence=_evidence,
    see=lambda subject: ("report", "--full"),
)
