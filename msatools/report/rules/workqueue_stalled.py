# SPDX-License-Identifier: LGPL-2.1-or-later

"""Work is pending in a pool of workers, and none of it begins."""

from collections.abc import Iterator
from typing import Any

from msatools.locks.report import Root
from msatools.report.rule import VerdictRule
from msatools.report.stalls import logged_stalls, pools_of


def _evidence(root: Root) -> Iterator[str]:
    if root.pid is None:
        yield "no single thread keeps it waiting"
    else:
        yield f"pid {root.pid} keeps it waiting"


RULES: tuple[VerdictRule[Any], ...] = (
    VerdictRule(
        code="workqueue-stalled",
        needs=("locks",),
        when=pools_of,
        severity="critical",
        confidence="exact",
        words=lambda root: root.reason,
        evidence=_evidence,
        see=lambda root: ("locks", "--workqueues"),
    ),
    logged_stalls("workqueue-stalled", ("workqueue-stall",)),
)
