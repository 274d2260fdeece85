# SPDX-License-Identifier: LGPL-2.1-or-later

"""One figure of a report, and where the guest's own truth has it."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fixtures.lab import Run

Figures = Mapping[Hashable, Any]
"""By what each is a figure of: a class, a PID, a CPU."""


@dataclass(frozen=True)
class Fact:
    """A figure that both a command and the guest have."""

    name: str
    reported: Callable[[Any], Figures]
    """The figures in the command's JSON."""

    recorded: Callable[[Run], Figures]
    """The figures that the guest recorded, each of which has to be reported.

    LookupError if this guest did not record any.
    """

    tolerance: Callable[[Run], float] | None = None
    """How far a number may be off; ``None`` if it has to be the same."""

    cause: str = ""
    """Why they may differ at all."""

    def __post_init__(self) -> None:
        if (self.tolerance is None) != (not self.cause):
            raise ValueError(
                f"{self.name}: a tolerance has a cause, and no cause alone"
            )


@dataclass
class Verdict:
    """How many figures of a fact are as recorded."""

    exact: int = 0
    within: int = 0
    """Off by no more than the tolerance."""

    failed: list[str] = field(default_factory=list)
    why_not: str = ""
    """Why the fact does not apply, if it does not."""


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
    slack = 0.0 if fact.tolerance is None else fact.tolerance(run)
    for of, wanted in recorded.items():
        found = reported.get(of, "nothing")
        if found == wanted:
            verdict.exact += 1
        elif slack and _difference(found, wanted) <= slack:
            verdict.within += 1
        else:
            verdict.failed.append(f"{fact.name} of {of}: {found}, recorded {wanted}")
    return verdict


def _difference(found: Any, wanted: Any) -> float:
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return abs(found - wanted)
    return float("inf")
