# SPDX-License-Identifier: LGPL-2.1-or-later

"""Gauges of msa-report. Pure."""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from msatools.report.model import Severity, TriageReport
from msatools.reports.gauges import Gauge, single


def gauges(report: TriageReport) -> Iterator[Gauge]:
    """Yield the gauges of a report: verdicts by code and severity, and the machine."""
    found = Counter(verdict.severity for verdict in report.verdicts)
    yield Gauge(
        name="msatools_report_verdicts",
        help="Verdicts by severity.",
        labels=("severity",),
        values={(severity,): found[severity] for severity in get_args(Severity)},
    )
    codes: Counter[tuple[str, ...]] = Counter(
        (verdict.code,) for verdict in report.verdicts
    )
    yield Gauge(
        name="msatools_report_code_verdicts",
        help="Verdicts by code; those that there are not have no line.",
        labels=("code",),
        values=codes,
    )
    yield single(
        "msatools_report_crashed",
        "Whether the kernel has crashed.",
        report.crash is not None,
    )
    failed = [each for each in report.sections.values() if each.error is not None]
    yield single(
        "msatools_report_failed_sections",
        "Commands that have no report.",
        len(failed),
    )
    machine = report.machine
    uptime_ns = machine.uptime_ns
    yield single(
        "msatools_report_uptime_seconds",
        "Time since boot.",
        None if uptime_ns is None else uptime_ns / 1e9,
    )
    yield single("msatools_report_online_cpus", "CPUs that are online.", machine.cpus)
    yield single(
        "msatools_report_memory_bytes",
        "Memory that the kernel manages.",
        machine.ram_bytes,
    )
