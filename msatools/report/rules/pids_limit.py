# SPDX-License-Identifier: LGPL-2.1-or-later

"""A limit of tasks is reached, or nearly, and the dead take part of it."""

from collections.abc import Iterator

from msatools.report.model import Severity
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule
from msatools.zombies.model import Limit

_NEAR = 0.9
_SYSTEM = ("system",)


def _when(parts: ReportParts) -> Iterator[Limit]:
    assert parts.zombies is not None
    for limit in parts.zombies.limits or ():
        if limit.used and limit.max and limit.used >= _NEAR * limit.max:
            yield limit


def _severity(limit: Limit) -> Severity:
    is_all = limit.scope in _SYSTEM
    return "critical" if is_all and not limit.left else "warning"


def _words(limit: Limit) -> str:
    left = "none is left" if not limit.left else f"{limit.left:,} left"
    return (
        f"{limit.name} of {limit.scope}: {limit.used:,} of {limit.max:,} used, {left}"
    )


RULE = VerdictRule(
    code="pids-limit",
    needs=("zombies",),
    when=_when,
    severity=_severity,
    confidence="exact",
    words=_words,
    evidence=lambda limit: (f"{limit.zombies:,} of them are zombies",),
    see=lambda limit: ("zombies", "-v"),
)
