# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks seem to wait for each other: some owner is only likely."""

from msatools.locks.report import Wait
from msatools.report.model import Severity
from msatools.report.rule import VerdictRule
from msatools.report.rules.deadlock import (
    DeadlockSubject,
    deadlocks,
    evidence,
    see,
    tasks_text,
)
from msatools.report.waits import HUNG_NS, is_long


def _severity(subject: DeadlockSubject) -> Severity:
    """Return how bad it is: the kernel itself reports tasks that hang for so long."""
    return "critical" if any(map(_is_hung, subject.waits)) else "warning"


def _is_hung(wait: Wait) -> bool:
    return wait.state == "D" and is_long(wait, HUNG_NS)


RULE = VerdictRule(
    code="possible-deadlock",
    needs=("locks",),
    when=deadlocks("possible"),
    severity=_severity,
    confidence="likely",
    words=lambda subject: (
        f"{tasks_text(subject)} seem to wait for each other: the kernel does not "
        "record all owners"
    ),
    evidence=evidence,
    see=see,
)
