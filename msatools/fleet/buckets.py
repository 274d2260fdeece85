# SPDX-License-Identifier: LGPL-2.1-or-later

"""Select dumps from a folder of results, put them into buckets, and make gauges."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from typing import get_args

from msgspec import Struct

from msatools.fleet.single import Bucket, FleetDump, FleetReport, FleetVerdict, State
from msatools.fleet.store import Results
from msatools.model import Gauge, single

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

_DUMPS = """
SELECT result, path, identity, state, error, host, release, fingerprint, time_ns,
    cause, function, module, coalesce(truncated, false),
    coalesce(format = 'kernel log', false), {report}
FROM dumps ORDER BY time_ns NULLS FIRST, identity
"""
_VERDICTS = """
SELECT result, code, severity, confidence, "text" FROM verdicts ORDER BY result, rank
"""


class Choice(Struct, frozen=True, kw_only=True):
    """Conditions on dumps and buckets; a condition that is ``None`` selects all."""

    host: str | None = None
    """Shell pattern of the host's name."""

    release: str | None = None
    """Shell pattern of the kernel's release."""

    verdict: str | None = None
    """Code that at least one verdict of the dump has."""

    new_since_ns: int | None = None
    """Earliest time at which buckets were first seen, inclusive; in ns since 1970."""

    @property
    def is_all(self) -> bool:
        """Whether all dumps are selected."""
        return self == Choice()

    def takes(self, dump: FleetDump) -> bool:
        """Return whether a dump's host, release and verdicts match."""
        return (
            _matches(dump.host, self.host)
            and _matches(dump.release, self.release)
            and (
                self.verdict is None
                or any(verdict.code == self.verdict for verdict in dump.verdicts)
            )
        )

    def is_new(self, bucket: Bucket) -> bool:
        """Return whether a bucket was first seen at ``new_since_ns`` or later."""
        since_ns, first_ns = self.new_since_ns, bucket.first_ns
        return since_ns is None or (first_ns is not None and first_ns >= since_ns)


def _matches(value: str | None, pattern: str | None) -> bool:
    return pattern is None or (value is not None and fnmatchcase(value, pattern))


def read_fleet(
    results: Results, choice: Choice, *, with_reports: bool = False
) -> FleetReport:
    """Return the dumps in a folder of results, and their buckets.

    :param with_reports: Whether the dumps have their reports, which are large.
    :raises FleetError: if there are no results
    """
    dumps = [each for each in _dumps(results, with_reports) if choice.takes(each)]
    groups: dict[object, list[FleetDump]] = defaultdict(list)
    for dump in dumps:
        if dump.state == "done":
            groups[_key(dump)].append(dump)
    found = map(_bucket, groups.values())
    buckets = [bucket for bucket in found if choice.is_new(bucket)]
    buckets.sort(key=lambda bucket: (-bucket.count, -(bucket.last_ns or 0)))
    if choice.new_since_ns is not None:
        kept = {(bucket.fingerprint, bucket.codes) for bucket in buckets}
        dumps = [dump for dump in dumps if _is_kept(dump, kept, choice.new_since_ns)]
    return FleetReport(
        coverage=results.coverage,
        notes=results.notes,
        dumps=tuple(dumps),
        buckets=tuple(buckets),
        states=dict(Counter(dump.state for dump in dumps)),
    )


def _is_kept(
    dump: FleetDump, kept: set[tuple[str | None, tuple[str, ...]]], since_ns: int
) -> bool:
    if dump.state != "done":
        return dump.time_ns is None or dump.time_ns >= since_ns
    return _key(dump) in kept


def _dumps(results: Results, with_reports: bool) -> Iterator[FleetDump]:
    verdicts: dict[str, list[FleetVerdict]] = defaultdict(list)
    query = _DUMPS.format(report="report" if with_reports else "NULL")
    found, rows = results.ask(
        lambda database: (
            database.execute(_VERDICTS).fetchall(),
            database.execute(query).fetchall(),
        )
    )
    for result, code, severity, confidence, text in found:
        verdicts[result].append(
            FleetVerdict(code=code, severity=severity, confidence=confidence, text=text)
        )
    for row in rows:
        result, path, identity, state, error, host, release, *rest = row
        fingerprint, time_ns, cause, function, module, truncated, is_log, report = rest
        yield FleetDump(
            path=path,
            identity=identity,
            state=state,
            error=error,
            report=json.loads(report) if report else None,
            host=host,
            release=release,
            time=iso(time_ns),
            fingerprint=fingerprint,
            time_ns=time_ns,
            cause=cause,
            function=function,
            module=module,
            is_truncated=truncated,
            is_log=is_log,
            verdicts=tuple(verdicts[result]),
        )


def _key(dump: FleetDump) -> tuple[str | None, tuple[str, ...]]:
    """Return the key of a dump's bucket: its fingerprint, or else its worst codes."""
    codes = () if dump.fingerprint else _worst_codes(dump.verdicts)
    return dump.fingerprint, codes


def _worst_codes(verdicts: Sequence[FleetVerdict]) -> tuple[str, ...]:
    """Return the codes of the verdicts of the worst severity; none if it is info.

    ``dump-damaged`` does not count: it is about the file, not the kernel.
    """
    those = [each for each in verdicts if each.code != "dump-damaged"]
    worst = those[0].severity if those else None
    if worst == "info":
        return ()
    return tuple(sorted({each.code for each in those if each.severity == worst}))


def _bucket(dumps: Sequence[FleetDump]) -> Bucket:
    """Return the bucket of *dumps*, which are sorted by time, the oldest first."""
    fingerprint, codes = _key(dumps[0])
    times = [dump.time_ns for dump in dumps if dump.time_ns is not None]
    first_ns, last_ns = (min(times), max(times)) if times else (None, None)
    best = [dump for dump in dumps if not dump.is_log] or dumps
    best = [dump for dump in best if not dump.is_truncated] or best
    shown = best[-1]
    return Bucket(
        fingerprint=fingerprint,
        codes=codes,
        cause=shown.cause,
        function=shown.function,
        module=shown.module,
        count=len(dumps),
        first=iso(first_ns),
        last=iso(last_ns),
        releases=_distinct(dump.release for dump in dumps),
        hosts=_distinct(dump.host for dump in dumps),
        representative=shown.path,
        verdicts=shown.verdicts,
        days=days(dumps),
        first_ns=first_ns,
        last_ns=last_ns,
    )


def days(dumps: Iterable[FleetDump]) -> dict[str, int]:
    """Return the number of dumps by day (``2026-11-23``), in order of time."""
    found = Counter(dump.time[:10] for dump in dumps if dump.time is not None)
    return dict(sorted(found.items()))


def _distinct(values: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(sorted({value for value in values if value is not None}))


def iso(time_ns: int | None) -> str | None:
    """Return a time as ``2026-11-23T11:42:43Z``; ``None`` after the year 9999."""
    if time_ns is None:
        return None
    try:
        then = _EPOCH + timedelta(seconds=time_ns // 10**9)
    except OverflowError:
        return None
    return f"{then:%Y-%m-%dT%H:%M:%S}Z"


# --- Gauges of a fleet.


MAX_CODES = 100
"""Maximum verdict codes in gauges: a hostile dump can invent any number of them."""


def gauges(report: FleetReport) -> Iterator[Gauge]:
    """Yield the gauges of a fleet. Hosts and fingerprints are too many for labels."""
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
