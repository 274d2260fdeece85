# SPDX-License-Identifier: LGPL-2.1-or-later

"""Gauges of a fleet."""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from msatools.fleet.model import FleetReport
from msatools.fleet.single import State
from msatools.reports.gauges import Gauge, single

MAX_CODES = 100
"""Codes of verdicts, of which there are some thirty: a dump can make up others."""


def gauges(report: FleetReport) -> Iterator[Gauge]:
    """Yield the gauges of a fleet; hosts and fingerprints have no labels: too many."""
    states: dict[tuple[str, ...], float] = {
        (state,): report.states.get(state, 0) for state in get_args(State)
    }
    yield Gauge(
        name="msatools_fleet_dumps",
        help="Dumps by what came of them.",
        labels=("state",),
        values=states,
    )
    verdicts: Counter[tuple[str, ...]] = Counter(
        (code,)
        for dump in report.dumps
        for code in {verdict.code for verdict in dump.verdicts}
    )
    yield Gauge(
        name="msatools_fleet_verdict_dumps",
        help="Dumps that have a verdict, by its code.",
        labels=("code",),
        values=dict(verdicts.most_common(MAX_CODES)),
    )
    yield single(
        "msatools_fleet_buckets",
        "Buckets of dumps, most likely of one bug each.",
        len(report.buckets),
    )
    crashes = [bucket for bucket in report.buckets if bucket.fingerprint]
    yield single(
        "msatools_fleet_crash_buckets",
        "Buckets of kernels that have crashed.",
        len(crashes),
    )
    yield single(
        "msatools_fleet_unreadable_files",
        "Files of results that cannot be read: what they hold is not counted.",
        report.coverage["files_unreadable"],
    )
    times = [dump.time_ns for dump in report.dumps if dump.time_ns is not None]
    yield single(
        "msatools_fleet_last_dump_timestamp_seconds",
        "When the newest dump was written.",
        max(times) / 1e9 if times else None,
    )
    firsts = [each.first_ns for each in report.buckets if each.first_ns is not None]
    yield single(
        "msatools_fleet_last_new_bucket_timestamp_seconds",
        "When a bucket was last seen for the first time.",
        max(firsts) / 1e9 if firsts else None,
    )
