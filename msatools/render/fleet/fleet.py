# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders a fleet: buckets, days, dumps without a report, and results of queries."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from importlib.resources import files

from jinja2 import Environment

from msatools.fleet.single import Bucket, FleetDump, FleetError, FleetReport
from msatools.fleet.store import QueryResult
from msatools.render.blocks import (
    Block,
    Cell,
    Column,
    Mark,
    More,
    Span,
    Style,
    Table,
    Text,
    cut_line,
    escape,
    free_text,
    line,
    plural,
)

BINS = 28
"""Maximum columns of a trend; each stands for one day, or for several if needed."""

LOST = 10
"""Maximum dumps without a report, outliers, and notes to show by default."""

_DIGITS = ".123456789"
_SIGNS = "·▁▂▃▄▅▆▇██"
_BAR = 40

_COLUMNS = (
    Column("BUCKET"),
    Column("COUNT", "right"),
    Column("FIRST", worth=4),
    Column("LAST", worth=5),
    Column("HOSTS", "right", worth=2),
    Column("KERNELS", "right", worth=1),
    Column("TREND", worth=3),
    free_text("WHAT", least=44),
)


def fleet_blocks(
    report: FleetReport,
    *,
    name: str,
    rows: int | None = None,
    verbose: bool = False,
) -> Iterator[Block]:
    """Yield the blocks of ``msa-fleet show``.

    :param name: The folder of results.
    :param rows: Maximum number of rows of each table, if not the default.
    :param verbose: Whether to show the verdicts, kernels and hosts of each bucket.
    """
    yield line(Span(name, "title"), f"  {summary(report)}")
    spans = _bins(report)
    if report.buckets:
        yield line()
        shown = report.buckets[:rows]
        more = More("bucket", len(report.buckets) - len(shown), rows is not None)
        yield Table(
            _COLUMNS,
            [_row(bucket, spans) for bucket in shown],
            more,
            notes={
                index: [*_notes(bucket, verbose)] for index, bucket in enumerate(shown)
            },
        )
    yield from _days(report)
    yield from _outliers(report)
    yield from _lost(report, rows, verbose)
    yield from _unread(report, verbose)


def summary(report: FleetReport) -> str:
    """Return the counts of dumps, states, hosts, kernels and buckets, as text."""
    count = len(report.dumps)
    if not count:
        return "no dump matches"
    words = [plural(count, "dump")]
    states = [(state, report.states.get(state, 0)) for state in _STATES]
    words += (f"{number:,} {state}" for state, number in states if number)
    hosts = {dump.host for dump in report.dumps} - {None}
    kernels = {dump.release for dump in report.dumps} - {None}
    words += (plural(len(hosts), "host"), plural(len(kernels), "kernel"))
    words.append(plural(len(report.buckets), "bucket"))
    return ", ".join(words)


_STATES = ("done", "failed", "timeout", "crashed")


def bucket_name(bucket: Bucket) -> str:
    """Return the name of a bucket: the fingerprint, if there is one."""
    return bucket.fingerprint or "no crash"


def bucket_text(bucket: Bucket) -> str:
    """Describe a bucket: the cause of its crashes, or the codes of its verdicts."""
    if bucket.fingerprint is None:
        return ", ".join(bucket.codes) or "nothing wrong"
    place = f" in {bucket.function}" if bucket.function else ""
    module = f" [{bucket.module}]" if bucket.module else ""
    return f"{bucket.cause or 'crash'}{place}{module}"


def _row(bucket: Bucket, spans: "Sequence[_Bin]") -> tuple[Cell, ...]:
    style: Style | None = "bad" if bucket.fingerprint else None
    return (
        bucket_name(bucket),
        f"{bucket.count:,}",
        (bucket.first or "-")[:10],
        (bucket.last or "-")[:10],
        f"{len(bucket.hosts):,}",
        f"{len(bucket.releases):,}",
        _trend(bucket.days, spans),
        Span(bucket_text(bucket), style),
    )


def _notes(bucket: Bucket, verbose: bool) -> Iterator[Text]:
    codes = dict.fromkeys(verdict.code for verdict in bucket.verdicts)
    words = f": {', '.join(codes)}" if codes else ""
    yield cut_line(f"  {bucket.representative}", Span(words, "dim"))
    if verbose:
        for verdict in bucket.verdicts:
            yield cut_line(f"    {verdict.severity}: {verdict.text}")
        yield cut_line(f"    kernels: {', '.join(bucket.releases) or '-'}")
        yield cut_line(f"    hosts: {', '.join(bucket.hosts) or '-'}")


# --- days

_Bin = tuple[str, str]
"""First and last day of a column of a trend."""


def _bins(report: FleetReport) -> list[_Bin]:
    """Return the days of the dumps in at most :data:`BINS` spans of equal length."""
    found = sorted({day for bucket in report.buckets for day in bucket.days})
    if not found:
        return []
    first, last = date.fromisoformat(found[0]), date.fromisoformat(found[-1])
    step = -(-((last - first).days + 1) // BINS)
    starts = range(0, (last - first).days + 1, step)
    return [
        (
            (first + timedelta(start)).isoformat(),
            (first + timedelta(start + step - 1)).isoformat(),
        )
        for start in starts
        # A span must not end after date.max.
        if (date.max - first).days >= start + step
    ]


def _counts(days: Mapping[str, int], spans: Sequence[_Bin]) -> list[int]:
    return [
        sum(count for day, count in days.items() if first <= day <= last)
        for first, last in spans
    ]


def _trend(days: Mapping[str, int], spans: Sequence[_Bin]) -> Mark:
    """Return the counts of a bucket as a plot in one line, scaled to the largest."""
    counts = _counts(days, spans)
    most = max(counts, default=0) or 1
    levels = [-(-9 * count // most) for count in counts]
    return Mark(
        "".join(_DIGITS[level] for level in levels),
        signs="".join(_SIGNS[level] for level in levels),
    )


def day_counts(report: FleetReport) -> list[tuple[str, int]]:
    """Return the name and dump count of each span of days; empty if only one span."""
    spans = _bins(report)
    total: Counter[str] = Counter()
    for bucket in report.buckets:
        total.update(bucket.days)
    names = [
        first if first == last else f"{first}..{last[5:]}" for first, last in spans
    ]
    counts = zip(names, _counts(total, spans), strict=True)
    return [*counts] if len(spans) > 1 else []


def _days(report: FleetReport) -> Iterator[Block]:
    """Yield the number of dumps in each span of days, as a bar each."""
    found = day_counts(report)
    if not found:
        return
    most = max(count for _, count in found)
    rows = []
    for day, count in found:
        length = -(-_BAR * count // most)
        bar = Mark("#" * length, signs="█" * length)
        rows.append((day, f"{count:,}", bar))
    yield line()
    yield Table((Column("DAY"), Column("DUMPS", "right"), Column("")), rows)


# --- Dumps that share no bug with others, and those without a report.


def _outliers(report: FleetReport) -> Iterator[Block]:
    found = report.outliers
    if not found:
        return
    yield line()
    yield line(Span("OUTLIERS, bugs seen in one dump only", "title"))
    for bucket in found[:LOST]:
        yield cut_line(f"  {bucket.representative}  {bucket_text(bucket)}")
    if len(found) > LOST:
        yield line(Span(f"  … {plural(len(found) - LOST, 'more outlier')}", "dim"))


def _lost(report: FleetReport, rows: int | None, verbose: bool) -> Iterator[Block]:
    found = report.lost
    if not found:
        return
    yield line()
    shown = found if verbose else found[: rows or LOST]
    more = More("failed dump", len(found) - len(shown), rows is not None)
    columns = Column("NO REPORT"), free_text("PATH", keeps="end"), free_text("WHY")
    yield Table(columns, [_lost_row(dump) for dump in shown], more)


def _lost_row(dump: FleetDump) -> tuple[Cell, ...]:
    why = (dump.error or "-").removeprefix(f"{dump.path}: ")
    return Span(dump.state, "warn"), dump.path, why


def _unread(report: FleetReport, verbose: bool) -> Iterator[Block]:
    shown = report.notes if verbose else report.notes[:LOST]
    for note in shown:
        yield line(Span(f"note: {note.text}", "warn"))
    if more := len(report.notes) - len(shown):
        yield line(Span(f"note: {plural(more, 'more file')} cannot be read", "warn"))


# --- Renders the answer to a query, as a table or as JSON.


def table(answer: QueryResult) -> Iterator[Block]:
    """Yield the table of a query's result."""
    columns = tuple(
        _column(name, [row[index] for row in answer.rows])
        for index, name in enumerate(answer.columns)
    )
    yield Table(
        columns,
        [[_text(value) for value in row] for row in answer.rows],
        keeps_all=True,
    )


def json_lines(answer: QueryResult) -> Iterator[str]:
    """Yield each row as an object in a line of JSON.

    :raises FleetError: if two columns have one name
    """
    twice = [name for name, count in Counter(answer.columns).items() if count > 1]
    if twice:
        raise FleetError(
            f"two columns are named {twice[0]}, which --json cannot tell apart; name "
            "one of them by AS"
        )
    for row in answer.rows:
        values = zip(answer.columns, map(_plain, row), strict=True)
        yield json.dumps(dict(values), allow_nan=False) + "\n"


def _plain(value: object) -> object:
    """Return a value that JSON can encode; NaN and infinity become ``None``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [*map(_plain, value)]
    if isinstance(value, dict):
        return {_text(key): _plain(each) for key, each in value.items()}
    return _text(value)


def _column(name: str, values: list[object]) -> Column:
    is_numeric = all(isinstance(value, (int, float, type(None))) for value in values)
    return Column(name, "right") if is_numeric and values else free_text(name)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{_text(key)}: {_text(each)}" for key, each in value.items())
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


# --- The buckets of a fleet as one self-contained HTML page.
#
# Text from dumps is escaped twice: unprintable characters by the filter "printable",
# and HTML by the template engine (autoescape).


_TEMPLATE = "page.html.j2"

MAX_LOST = 1000
"""Maximum dumps without a report on the page."""


def page(report: FleetReport, name: str) -> str:
    """Return the HTML page of a fleet.

    :param name: The folder of results.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["printable"] = escape
    environment.filters["name"] = bucket_name
    environment.filters["what"] = bucket_text
    source = files(__package__).joinpath(_TEMPLATE).read_text("utf-8")
    days = day_counts(report)
    text: str = environment.from_string(source).render(
        name=name,
        summary=summary(report),
        report=report,
        days=days,
        most=max((count for _, count in days), default=1) or 1,
        lost=report.lost[:MAX_LOST],
        notes=report.notes[:LOST],
        more_notes=max(len(report.notes) - LOST, 0),
        more_lost=max(len(report.lost) - MAX_LOST, 0),
    )
    return text
