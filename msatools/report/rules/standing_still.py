# SPDX-License-Identifier: LGPL-2.1-or-later

"""CPUs, RCU and pools of workers stand still now: rules for the code of each."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msatools.cpus.stalls.model import Stall
from msatools.locks.report import Root
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.report.words import count_text
from msatools.reports.units import duration

CPU_CODES = ("cpu-stalled", "cpu-starved", "rcu-stalled")

_MOST_LINES = 6
"""Lines of a chain that are evidence; ``msa-cpus --stalls`` has all."""


def stalls_of(parts: ReportParts, code: str) -> Iterator[Stall]:
    """Yield what has stood still for the kernel's own limit, the worst first."""
    found = parts.cpus.stalls if parts.cpus is not None else None
    if found is not None:
        yield from (
            each for each in found.found if each.over_limit and each.code == code
        )


def pools_of(parts: ReportParts) -> list[Root]:
    """Return the pools whose pending work nobody begins."""
    if parts.locks is None:
        return []
    return [root for root in parts.locks.roots if root.pool is not None]


def _pools(parts: ReportParts) -> Iterator[Root]:
    yield from pools_of(parts)


def _pool_evidence(root: Root) -> Iterator[str]:
    if root.pid is None:
        yield "no single thread keeps it waiting"
    else:
        yield f"pid {root.pid} keeps it waiting"


def _stall_evidence(stall: Stall) -> Iterator[str]:
    since = "unknown" if stall.for_ns is None else duration(stall.for_ns)
    tasks = count_text(stall.waiting, "task")
    yield f"for {since}, of {duration(stall.limit_ns)} allowed; {tasks} waiting"
    yield from stall.chain[:_MOST_LINES]


def _stalls(code: str) -> Callable[[ReportParts], Iterator[Stall]]:
    return partial(stalls_of, code=code)


RULES: tuple[VerdictRule[Any], ...] = (
    *(
        VerdictRule(
            code=code,
            needs=("cpus",),
            when=_stalls(code),
            severity="critical",
            confidence=lambda stall: stall.confidence,
            words=lambda stall: stall.text,
            evidence=_stall_evidence,
            see=lambda stall: ("cpus", "--stalls"),
        )
        for code in CPU_CODES
    ),
    VerdictRule(
        code="workqueue-stalled",
        needs=("locks",),
        when=_pools,
        severity="critical",
        confidence="exact",
        words=lambda root: root.reason,
        evidence=_pool_evidence,
        see=lambda root: ("locks", "--workqueues"),
    ),
)
