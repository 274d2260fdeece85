# SPDX-License-Identifier: LGPL-2.1-or-later

"""Tasks seem to wait for each other: some owner is only likely."""

from msatools.report.rule import VerdictRule
from msatools.report.rules.deadlock import deadlocks, evidence, see, tasks_text

RULE = VerdictRule(
    code="possible-deadlock",
    needs=("locks",),
    when=deadlocks("possible"),
    severity="warning",
    confidence="likely",
    words=lambda subject: (
        f"possible deadlock of {tasks_text(subject)}: not all owners are recorded"
    ),
    evidence=evidence,
    see=see,
)
