# SPDX-License-Identifier: LGPL-2.1-or-later

"""Describes CPUs, sets and findings in a few words."""

from collections.abc import Collection, Iterator, Sequence

from msatools.cpus.model import CpuSet, CpusReport, Diagnostic
from msatools.kernel.ranges import ranges
from msatools.render.blocks import Cell, Span, Style, Text
from msatools.render.blocks import text as line
from msatools.render.cells import NOT_KEPT
from msatools.reports.units import count

INDENT = "    "

_RANGES = 8
"""Maximum number of ranges in a list; a set of every other CPU has many."""

_LONG_RATE = 100_000
_BAD: Collection[str] = (
    *("not-ticked", "partition-invalid"),
    *("cpu-stalled", "cpu-starved", "rcu-stalled"),
)


def numbers_text(numbers: Collection[int], verbose: bool = True) -> str:
    """Return numbers as ranges; only the first ones if there are many."""
    return ranges(numbers, None if verbose else _RANGES) or "none"


def amount(number: int | None, interval_ns: int | None) -> str:
    """
    Return a count since boot, or the rate per second of an interval.

    >>> amount(4125, None), amount(206_295, 5 * 10**9), amount(1, 5 * 10**9)
    ('4.1K', '41259', '<1')
    """
    if number is None:
        return NOT_KEPT
    if interval_ns is None:
        return count(number)
    if interval_ns <= 0:
        return NOT_KEPT
    rate = (number * 10**9 + interval_ns // 2) // interval_ns
    if number > 0 and not rate:
        # Not "0": it did happen.
        return "<1"
    return str(rate) if rate < _LONG_RATE else count(rate)


def percent(share: float | None) -> str:
    """
    Return a share in percent.

    >>> percent(0.7104), percent(1.0), percent(None)
    ('71.0', '100', '-')
    """
    if share is None:
        return NOT_KEPT
    return f"{100 * share:.1f}" if share < 0.9995 else "100"


def possible_cpus(report: CpusReport) -> int:
    """Return the number of possible CPUs, also those without a row."""
    return max(report.coverage.get("cpus", 0), len(report.cpus))


def is_part(report: CpusReport) -> bool:
    """Return whether only some CPUs were selected."""
    return len(report.cpus) < possible_cpus(report)


def kind_cell(one: CpuSet) -> Cell:
    """Return the cell for the kind of a set."""
    return Span(one.kind, "bad") if one.kind == "invalid" else one.kind


def findings_lines(findings: Sequence[Diagnostic]) -> Iterator[Text]:
    """Yield the findings, each with its advice below."""
    for finding in findings:
        style: Style = "bad" if finding.code in _BAD else "warn"
        yield line(Span(f"! {finding.text}", style))
        if finding.advice:
            yield line(INDENT, Span(f"do: {finding.advice}", "dim"))
