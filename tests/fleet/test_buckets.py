# SPDX-License-Identifier: LGPL-2.1-or-later

"""Buckets of dumps, and which dumps are wanted."""

from pathlib import Path

import pytest

from msatools.fleet.buckets import Choice, iso, read_fleet
from msatools.fleet.dumps import result_of
from msatools.fleet.single import Bucket, FleetReport
from tests.fleet.dumps import DAY, START
from tests.fleet.made import identity, outcome, result, results

FLEET = (
    result("f1", "oops", name="a", host="web1", day=0),
    result("f1", "oops", "deadlock", name="b", host="web2", day=3),
    result("f1", "oops", name="c", host="web2", day=1),
    result("f2", "panic", name="d", host="db1", day=5),
    result(None, "hung-tasks", "deadlock", name="e", host="db1", day=2),
    result(None, "deadlock", "hung-tasks", "dump-damaged", name="f", host="db2"),
    result(None, "dump-damaged", name="g", host="db2", day=4),
    result_of(identity("h", "db3", 6), outcome("timeout", "reading it took too long")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    results(folder, *FLEET)
    return folder


def fleet(folder: Path, **choice: object) -> FleetReport:
    return read_fleet(results(folder), Choice(**choice))  # type: ignore[arg-type]


def named(report: FleetReport) -> dict[str, int]:
    return {_name(bucket): bucket.count for bucket in report.buckets}


def _name(bucket: Bucket) -> str:
    return bucket.fingerprint or " ".join(bucket.codes) or "nothing"


def test_buckets(folder: Path) -> None:
    report = fleet(folder)
    assert named(report) == {"f1": 3, "deadlock hung-tasks": 2, "f2": 1, "nothing": 1}
    assert report.states == {"done": 7, "timeout": 1}
    assert [dump.error for dump in report.lost] == ["reading it took too long"]
    assert {_name(bucket) for bucket in report.outliers} == {"f2", "nothing"}
    first = report.buckets[0]
    assert (first.first, first.last) == (
        "2026-11-18T11:06:40Z",
        "2026-11-21T11:06:40Z",
    )
    assert first.hosts == ("web1", "web2")
    assert first.releases == ("6.12.1",)
    assert [*first.days.values()] == [1, 1, 1]
    assert (first.cause, first.function) == ("bug", "f")


def test_the_representative_is_the_newest_that_is_whole(tmp_path: Path) -> None:
    cut_off = {"release": "6.12.1", "truncated": True}
    made = results(
        tmp_path,
        result("f1", "oops", name="a", day=0),
        result("f1", "deadlock", name="b", day=1),
        result("f1", "panic", name="c", day=2, target=cut_off),
    )
    (bucket,) = read_fleet(made, Choice()).buckets
    assert bucket.representative == "/crash/web1/b"
    assert [verdict.code for verdict in bucket.verdicts] == ["deadlock"]


@pytest.mark.parametrize(
    ("choice", "found", "dumps"),
    [
        ({"host": "web*"}, {"f1": 3}, 3),
        ({"host": "web"}, {}, 0),
        ({"host": "db[13]"}, {"f2": 1, "deadlock hung-tasks": 1}, 3),
        ({"release": "6.12.*"}, 4, 8),
        ({"release": "6.1.*"}, {}, 0),
        ({"verdict": "deadlock"}, {"f1": 1, "deadlock hung-tasks": 2}, 3),
        ({"verdict": "dead*"}, {}, 0),
        ({"new_since_ns": (START + 4 * DAY) * 10**9}, {"f2": 1, "nothing": 1}, 3),
        ({"new_since_ns": (START + 9 * DAY) * 10**9}, {}, 0),
    ],
)
def test_choices(
    folder: Path, choice: dict[str, object], found: dict[str, int] | int, dumps: int
) -> None:
    report = fleet(folder, **choice)
    if isinstance(found, int):
        assert len(report.buckets) == found
    else:
        assert named(report) == found
    assert len(report.dumps) == dumps


def test_nothing_is_an_outlier_where_all_are(tmp_path: Path) -> None:
    made = results(tmp_path, result("f1"), result("f2"))
    assert read_fleet(made, Choice()).outliers == ()


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (None, None),
        (0, "1970-01-01T00:00:00Z"),
        (START * 10**9 + 1, "2026-11-18T11:06:40Z"),
        (10**30, None),
    ],
)
def test_times(time_ns: int | None, text: str | None) -> None:
    assert iso(time_ns) == text
