# SPDX-License-Identifier: LGPL-2.1-or-later

"""The folder of results."""

import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from msatools.fleet import rows
from msatools.fleet.errors import FleetError
from msatools.fleet.identity import identify
from msatools.fleet.rows import NO_REPORT, VERSION, result_of
from msatools.fleet.store import MARK, Results
from tests.fleet.made import asked, identity, outcome, report, result, results


def counted(made: Results, where: str = "true") -> list[tuple[object, ...]]:
    query = f"SELECT identity, state FROM dumps WHERE {where} ORDER BY identity"
    return asked(made, query)


def test_rows_of_a_dump(tmp_path: Path) -> None:
    made = results(tmp_path, result("f1", "deadlock", "oops", name="a"))
    (dump,) = asked(
        made,
        "SELECT identity, path, host, release, state, fingerprint, cause, "
        "strftime(time, '%Y-%m-%d'), report FROM dumps",
    )
    assert dump[:7] == (
        "a-web1",
        "/crash/web1/a",
        "web1",
        "6.12.1",
        "done",
        "f1",
        "bug",
    )
    assert dump[7] == "2026-11-18"
    assert json.loads(str(dump[8]))["schema"] == "msatools.report/1"
    verdicts = asked(
        made, "SELECT code, rank, severity, evidence FROM verdicts ORDER BY rank"
    )
    assert verdicts == [
        ("deadlock", 0, "critical", ["a fact"]),
        ("oops", 1, "critical", ["a fact"]),
    ]


def test_a_dump_that_was_read_twice_counts_once(tmp_path: Path) -> None:
    """As if two runs had read it at the same time."""
    made = results(tmp_path, result("f1", "deadlock", name="a"))
    made.write([result("f1", "deadlock", name="a"), result("f2", name="b")])
    assert counted(made) == [("a-web1", "done"), ("b-web1", "done")]
    assert asked(made, "SELECT count(*) FROM verdicts") == [(1,)]


def test_a_report_counts_before_a_failure(tmp_path: Path) -> None:
    failed = result_of(identity("a"), outcome("timeout", "too long"))
    made = results(tmp_path, failed, result("f1", name="a"))
    made.write([result_of(identity("a"), outcome("timeout", "too long"))])
    assert counted(made) == [("a-web1", "done")]


def test_the_newest_version_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = results(tmp_path, result("f1", "oops", name="a"))
    monkeypatch.setattr(rows, "VERSION", "99")
    assert made.done("99") == set()
    made.write([result_of(identity("a"), outcome("crashed", "by SIGSEGV"))])
    assert counted(made) == [("a-web1", "crashed")]
    assert asked(made, "SELECT count(*) FROM verdicts") == [(0,)]
    assert made.done("99") == made.done(VERSION) ^ {"a-web1"} == {"a-web1"}


def test_what_is_done(tmp_path: Path) -> None:
    missing = result_of(identify(str(tmp_path / "no")), outcome("failed", "no"))
    failed = result_of(identity("b"), outcome("failed", "no"))
    made = results(tmp_path / "results", result("f1", name="a"), failed, missing)
    assert made.done() == {"a-web1", "b-web1"}
    assert made.done(only_reports=True) == {"a-web1"}
    assert made.done("another") == set()


def test_what_could_not_be_opened_counts_until_it_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "vmcore")
    made = results(
        tmp_path / "results", result_of(identify(path), outcome("failed", "no"))
    )
    assert [state for _, state in counted(made)] == ["failed"]
    Path(path).write_bytes(b"KDUMP   ")
    made.write([result_of(identify(path), outcome("failed", "cut off"))])
    ((digest, _),) = counted(made)
    assert not str(digest).startswith("path-")


def test_parts_that_were_not_finished(tmp_path: Path) -> None:
    """A run that is killed leaves them behind."""
    made = results(tmp_path, result("f1", "oops", name="a"))
    for table in ("dumps", "verdicts"):
        (file,) = (tmp_path / table).glob("*.parquet")
        (tmp_path / table / f".{file.name}").write_bytes(file.read_bytes()[:99])
    # And of one the verdicts only.
    (verdicts,) = (tmp_path / "verdicts").glob("[!.]*.parquet")
    (tmp_path / "verdicts" / "left.parquet").write_bytes(verdicts.read_bytes())
    made.write([result("f1", name="b")])
    (tmp_path / "dumps" / verdicts.name).unlink()
    assert counted(made) == [("b-web1", "done")]
    assert asked(made, "SELECT count(*) FROM verdicts") == [(0,)]


def test_no_results_yet(tmp_path: Path) -> None:
    made = results(tmp_path)
    assert counted(made) == []
    made.create()
    assert made.done() == set()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """It is said before anything is read."""
    made = results(tmp_path)
    with (
        patch("os.access", return_value=False),
        pytest.raises(FleetError, match="dumps: not writable; name another folder"),
    ):
        made.create()


def test_disk_that_is_full(tmp_path: Path) -> None:
    made = results(tmp_path, result("f1", name="a"))
    full = OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28]")
    with (
        patch("pyarrow.parquet.write_table", side_effect=full),
        pytest.raises(FleetError, match="No space left on device; name another"),
    ):
        made.write([result("f1", name="b")])
    assert counted(made) == [("a-web1", "done")]


def test_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FleetError, match="a folder with other files; name a new one"):
        Results(str(tmp_path)).create()
    with pytest.raises(FleetError, match="no results of msa-fleet"):
        asked(Results(str(tmp_path)), "SELECT 1")
    (tmp_path / MARK).write_text('{"schema": "msatools.fleet-results/2"}')
    with pytest.raises(FleetError, match="results of another version"):
        Results(str(tmp_path)).create()


def test_file_that_is_damaged(tmp_path: Path) -> None:
    made = results(tmp_path, result("f1", name="a"))
    (tmp_path / "dumps" / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(FleetError, match=r"x\.parquet"):
        counted(made)


def test_names_in_quotes(tmp_path: Path) -> None:
    made = results(tmp_path / "it's", result("f1", name="a"))
    assert counted(made) == [("a-web1", "done")]


def test_columns_of_later_versions(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = results(tmp_path, result("f1", name="a"))
    later = pa.table({"identity": ["b"], "state": ["done"], "path": ["p"], "new": [7]})
    pq.write_table(later, tmp_path / "dumps" / "later.parquet")
    assert counted(made) == [("a-web1", "done"), ("b", "done")]


@pytest.mark.parametrize(
    "broken",
    [
        {"verdicts": [7]},
        {"verdicts": 7},
        {"crash": [1]},
        {"machine": "web1"},
        {"crash": {"frames": 7}},
        {"verdicts": [{"code": None, "severity": "info"}]},
        {"verdicts": [{"code": "oops\n", "severity": "info"}]},
        {"verdicts": [{"code": "oops", "severity": None}]},
        {"machine": {"uptime_ns": float("nan")}},
    ],
)
def test_reports_that_are_none(tmp_path: Path, broken: dict[str, object]) -> None:
    """A dump may have taken over the process that printed it."""
    found = result_of(identity("a"), outcome(**{**report("f1"), **broken}))
    assert (found.state, found.dump["error"]) == ("crashed", NO_REPORT)
    assert counted(results(tmp_path, found)) == [("a-web1", "crashed")]


def test_values_that_no_column_has(tmp_path: Path) -> None:
    odd = report("f\udc80", "oops")
    odd["crash"] |= {"pid": 1 << 70, "cpu": "x", "comm": 7}
    odd["crash"]["frames"] = [1, None, {}, "\ud800"]
    odd["machine"] |= {"time_ns": (1 << 63) - 1, "cpus": True, "ram_bytes": 1.5}
    odd["verdicts"][0] |= {"text": "\ud800", "evidence": ["\ud800"], "see": 7}
    named = replace(identity("a"), path="/crash/\udcff")
    found = result_of(named, outcome(**odd))
    made = results(tmp_path, found)
    (row,) = asked(
        made, "SELECT path, fingerprint, pid, cpu, comm, cpus, ram_bytes FROM dumps"
    )
    assert row == (r"/crash/\udcff", r"f\udc80", None, None, None, None, None)
    assert asked(made, "SELECT frames, time_ns FROM dumps") == [
        (["1", "None", "{}", r"\ud800"], named.time_ns)
    ]
    assert asked(made, 'SELECT "text", evidence, see FROM verdicts') == [
        (r"\ud800", [r"\ud800"], None)
    ]


WRITER = """
import sys
from tests.fleet.made import result, results
made = results(sys.argv[1])
for number in range(10_000):
    made.write([result("f1", "oops", name=f"dump{number}")])
"""


def test_writers_that_are_killed(tmp_path: Path) -> None:
    """Two at once; what can be read grows, and is whole at any moment."""
    folder = tmp_path / "results"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder)]) for _ in range(2)
    ]
    try:
        seen = 0
        while seen < 40:
            assert all(writer.poll() is None for writer in writers)
            if not (folder / MARK).exists():
                continue
            ((found, distinct, verdicts),) = asked(
                Results(str(folder)),
                "SELECT count(*), count(DISTINCT identity), "
                "(SELECT count(*) FROM verdicts) FROM dumps",
            )
            assert found == distinct == verdicts
            assert isinstance(found, int)
            assert found >= seen
            seen = found
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert len(counted(Results(str(folder)))) >= seen
