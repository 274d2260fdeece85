# SPDX-License-Identifier: LGPL-2.1-or-later

"""Gauges of msa-memstat. Pure."""

from collections.abc import Iterator

from msatools.memory.model import MemstatReport
from msatools.reports.gauges import Gauge, single


def gauges(report: MemstatReport) -> Iterator[Gauge]:
    """Yield the gauges of a report: every page in one class, and the checks."""
    page_size = report.target.page_size
    yield Gauge(
        name="msatools_memory_class_bytes",
        help="Memory by class: the classes are disjoint.",
        labels=("class",),
        values={(each.name,): each.bytes for each in report.classes},
    )
    yield single(
        "msatools_memory_examined_bytes",
        "Memory that was examined: the sum of the classes.",
        report.pages * page_size,
    )
    managed = report.managed_pages
    yield single(
        "msatools_memory_managed_bytes",
        "Memory that the kernel's page allocator manages.",
        None if managed is None else managed * page_size,
    )
    yield Gauge(
        name="msatools_memory_check_difference_bytes",
        help="What was found less what the kernel's own counter says.",
        labels=("check",),
        values={
            (each.name,): each.difference * page_size
            for each in report.checks
            if each.difference is not None
        },
    )
    yield single(
        "msatools_memory_unexplained_checks",
        "Checks with a difference that nothing explains.",
        sum(bool(each.difference) and not each.explained_by for each in report.checks),
    )
    yield single(
        "msatools_memory_scan_seconds",
        "Time to read and classify all pages.",
        None if report.scan_ns is None else report.scan_ns / 1e9,
    )
