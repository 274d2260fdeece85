# SPDX-License-Identifier: LGPL-2.1-or-later

"""A figure of a report and the same figure in the guest's own records."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fixtures.lab import Run

Figures = Mapping[Hashable, Any]
"""A class, PID, CPU or the like -> its figure."""


@dataclass(frozen=True)
class Fact:
    """A figure that both a command and the guest provide."""

    name: str
    reported: Callable[[Any], Figures]
    """Returns the figures in the command's JSON."""

    recorded: Callable[[Run], Figures]
    """Returns the figures that the guest recorded; all of them must be reported.

    Raises LookupError if this guest recorded none.
    """

    tolerance: Callable[[Run], float] | None = None
    """Returns the maximum difference of a number; ``None`` if it must be equal."""

    cause: str = ""
    """The reason for a tolerance."""

    def __post_init__(self) -> None:
        if (self.tolerance is None) != (not self.cause):
            raise ValueError(
                f"{self.name}: a tolerance has a cause, and no cause alone"
            )


@dataclass
class Verdict:
    """The numbers of figures of a fact that are as recorded."""

    exact: int = 0
    within: int = 0
    """Figures that differ by at most the tolerance."""

    failed: list[str] = field(default_factory=list)
    why_not: str = ""
    """The reason why the fact does not apply; empty if it does."""


def judge(fact: Fact, report: Any, run: Run) -> Verdict:
    """Compare all figures of a fact on one dump."""
    verdict = Verdict()
    try:
        recorded = fact.recorded(run)
    except KeyError as error:
        # Its text may go on with what there is instead.
        verdict.why_not = f"not recorded: {str(error.args[0]).partition(':')[0]}"
        return verdict
    except LookupError as error:
        verdict.why_not = str(error)
        return verdict
    if not recorded:
        verdict.why_not = "there is none in this guest"
    reported = fact.reported(report)
    slack: float | None = None
    for key, expected in recorded.items():
        found = reported.get(key, "nothing")
        if found == expected:
            verdict.exact += 1
            continue
        if slack is None:
            # Only now: some read the dump.
            slack = 0.0 if fact.tolerance is None else fact.tolerance(run)
        if slack and _difference(found, expected) <= slack:
            verdict.within += 1
        else:
            verdict.failed.append(f"{fact.name} of {key}: {found}, recorded {expected}")
    return verdict


def _difference(found: Any, expected: Any) -> float:
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return abs(found - expected)
    return float("inf")
