# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rules that tell findings of msa-cpus."""

from collections.abc import Iterator

from msatools.cpus.model import Diagnostic
from msatools.report.model import Severity, VerdictConfidence
from msatools.report.parts import ReportParts
from msatools.report.rule import VerdictRule


def present_finding(
    finding: str,
    code: str,
    *see: str,
    severity: Severity = "warning",
    confidence: VerdictConfidence = "exact",
) -> VerdictRule[Diagnostic]:
    """Return the rule that tells one kind of findings.

    :param finding: Its code in msa-cpus.
    :param code: The code of the verdict.
    :param see: Arguments of msa-cpus that show more.
    """
    return VerdictRule(
        code=code,
        needs=("cpus",),
        when=lambda parts: _found(parts, finding),
        severity=severity,
        confidence=confidence,
        words=lambda found: found.text,
        evidence=lambda found: found.evidence,
        see=lambda found: ("cpus", *see),
    )


def _found(parts: ReportParts, finding: str) -> Iterator[Diagnostic]:
    findings = parts.cpus.findings if parts.cpus is not None else ()
    yield from (each for each in findings if each.code == finding)
