# SPDX-License-Identifier: LGPL-2.1-or-later

"""Findings of msa-cpus: tasks without a turn, storms of work, a dead interrupt."""

from msatools.cpus.model import Diagnostic
from msatools.report.rule import VerdictRule


def _rule(finding: str, code: str, *see: str) -> VerdictRule[Diagnostic]:
    """Return the rule that tells one kind of findings.

    :param finding: Its code in msa-cpus.
    :param code: The code of the verdict.
    """
    return VerdictRule(
        code=code,
        needs=("cpus",),
        when=lambda parts: (
            each
            for each in (parts.cpus.findings if parts.cpus is not None else ())
            if each.code == finding
        ),
        severity="warning",
        confidence="exact",
        words=lambda found: found.text,
        evidence=lambda found: (),
        see=lambda found: ("cpus", *see),
    )


RULES = (
    _rule("no-turn", "cpu-starved", "-v"),
    _rule("storm", "cpu-storm"),
    _rule("irq-disabled", "irq-disabled", "-i"),
)
