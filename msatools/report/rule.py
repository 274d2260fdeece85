# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules: what has to hold for a verdict, and what the verdict says.

A rule is data: :mod:`msatools.report.rules` has a file for each.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from msgspec import Struct

from msatools.report.command_lines import command_line
from msatools.report.model import Severity, TriageVerdict, VerdictConfidence
from msatools.report.parts import ReportParts

S = TypeVar("S")

ORDER: dict[Severity, int] = {"critical": 0, "warning": 1, "info": 2}


class VerdictRule(Struct, Generic[S], frozen=True, kw_only=True):
    """One rule, on subjects of one kind: a lock, a process, the whole machine."""

    code: str
    """The verdict's code, one of the contract's."""

    needs: tuple[str, ...]
    """The fields of :class:`ReportParts` that it needs."""

    when: Callable[[ReportParts], Iterable[S]]
    """Returns each subject that it holds for, the worst first."""

    severity: Severity | Callable[[S], Severity]
    confidence: VerdictConfidence | Callable[[S], VerdictConfidence]
    words: Callable[[S], str]
    """The verdict, as one sentence."""

    evidence: Callable[[S], Iterable[str]]
    """Facts that it stands on."""

    see: Callable[[S], tuple[str, ...]]
    """The command that shows more: its name, and its arguments after the target."""


def verdicts(
    rules: Iterable[VerdictRule[Any]], parts: ReportParts
) -> list[TriageVerdict]:
    """Return the verdicts of all rules that hold, the worst first.

    Of equal severity, those of earlier rules come first.
    """
    return worst_first(verdict for rule in rules for verdict in judge(rule, parts))


def worst_first(found: Iterable[TriageVerdict]) -> list[TriageVerdict]:
    """Return verdicts by severity; of equal severity, in their order."""
    return sorted(found, key=lambda verdict: ORDER[verdict.severity])


def untested(rules: Iterable[VerdictRule[Any]], parts: ReportParts) -> tuple[str, ...]:
    """Return the codes of which no rule can be tested, as parts have failed."""
    tested: dict[str, bool] = {}
    for rule in rules:
        is_whole = all(getattr(parts, name) is not None for name in rule.needs)
        tested[rule.code] = is_whole or tested.get(rule.code, False)
    return tuple(code for code, is_tested in tested.items() if not is_tested)


def judge(rule: VerdictRule[Any], parts: ReportParts) -> Iterator[TriageVerdict]:
    """Yield the verdicts of one rule."""
    if any(getattr(parts, name) is None for name in rule.needs):
        return
    for subject in rule.when(parts):
        severity, confidence = rule.severity, rule.confidence
        name, *arguments = rule.see(subject)
        yield TriageVerdict(
            code=rule.code,
            severity=severity(subject) if callable(severity) else severity,
            confidence=confidence(subject) if callable(confidence) else confidence,
            text=rule.words(subject),
            evidence=tuple(rule.evidence(subject)),
            see=command_line(parts.target, name, arguments),
        )
