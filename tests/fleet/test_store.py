# SPDX-License-Identifier: LGPL-2.1-or-later

"""The folder of results."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msatools.fleet import dumps as rows
from msatools.fleet.dumps import NO_REPORT, VERSION, identify, result_of
from msatools.fleet.single import FleetError
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
    (dumps,) = (tmp_path / "dumps").glob("[!.]*.parquet")
    dumps.unlink()
    made.write([result("f1", name="b")])
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


def test_runs_that_begin_at_once(tmp_path: Path) -> None:
    """The mark of one is not finished when the other looks."""
    first, second = Results(str(tmp_path)), Results(str(tmp_path))
    write = Path.replace

    def meanwhile(part: Path, target: Path) -> Path:
        if target.name == MARK:
            with patch.object(Path, "replace", write):
                second.create()
        return write(part, target)

    with patch.object(Path, "replace", meanwhile):
        first.create()
    assert counted(first) == counted(second) == []
    assert [*tmp_path.glob(".*")] == []


def test_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FleetError, match="a folder with other files; name a new one"):
        Results(str(tmp_path)).create()
    with pytest.raises(FleetError, match="no results of msa-fleet"):
        asked(Results(str(tmp_path)), "SELECT 1")
    (tmp_path / MARK).write_text('{"schema": "msatools.fleet-results/2"}')
    with pytest.raises(FleetError, match="results of another version"):
        Results(str(tmp_path)).create()


def two_batches(folder: Path) -> Results:
    made = results(folder, result("f1", "oops", name="a"))
    made.write([result("f2", "panic", name="b"), result(None, name="c")])
    return made


def file_of(folder: Path, table: str, rows: int) -> Path:
    """Return the file of a table that has so many rows."""
    (path,) = (
        path
        for path in (folder / table).glob("*.parquet")
        if pq.read_metadata(path).num_rows == rows
    )
    return path


Damage = Callable[[Path], object]

DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "cut-off": (lambda path: os.truncate(path, path.stat().st_size // 2), "damaged"),
    "another-byte": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"b-web1", b"x-web1")),
        "damaged (its checksum is another)",
    ),
    "a-folder": (lambda path: (path.unlink(), path.mkdir()), "no regular file"),
    "a-pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "no regular file"),
    "broken-link": (lambda path: (path.unlink(), path.symlink_to("no")), "gone"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_costs_its_dumps_alone(tmp_path: Path, damage: str) -> None:
    made = two_batches(tmp_path)
    path = file_of(tmp_path, "dumps", rows=2)
    spoil, why = DAMAGES[damage]
    spoil(path)
    assert counted(made) == [("a-web1", "done")]
    assert asked(made, "SELECT code FROM verdicts") == [("oops",)]
    (note,) = made.notes
    assert note.code == "results-lost"
    assert note.text.startswith(f"{path}: {why}")
    assert f"delete dumps/{path.name} and verdicts/" in note.text
    assert made.coverage == {"files_read": 2, "files_unreadable": 1}
    # They are read again.
    assert made.done() == {"a-web1"}
    made.write([result("f2", "panic", name="b"), result(None, name="c")])
    assert [identity for identity, _ in counted(made)] == ["a-web1", "b-web1", "c-web1"]


@pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
def test_dumps_without_their_verdicts_are_left_out(tmp_path: Path, damage: str) -> None:
    """Else nothing would be wrong with them. A copy that is cut off looks like this."""
    made = two_batches(tmp_path)
    ((identity,),) = asked(made, "SELECT identity FROM verdicts WHERE code = 'panic'")
    batch = file_of(tmp_path, "dumps", rows=2).name.partition(".")[0]
    (path,) = (tmp_path / "verdicts").glob(f"{batch}.*.parquet")
    if damage == "missing":
        path.unlink()
    elif damage == "another-byte":
        path.write_bytes(path.read_bytes().replace(b"panic", b"oops!"))
    else:
        DAMAGES[damage][0](path)
    assert identity == "b-web1"
    assert counted(made) == [("a-web1", "done")]
    (note,) = made.notes
    assert "the 2 dumps that only it has are left out" in note.text


def test_file_that_is_gone_while_it_is_read(tmp_path: Path) -> None:
    made = two_batches(tmp_path)
    path = file_of(tmp_path, "dumps", rows=2)

    def question(database: duckdb.DuckDBPyConnection) -> list[tuple[object, ...]]:
        path.unlink(missing_ok=True)
        return database.execute("SELECT identity FROM dumps").fetchall()

    assert made.ask(question) == [("a-web1",)]
    assert [note.text.partition(";")[0] for note in made.notes] == [f"{path}: gone"]


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"x": [1]}, "its column identity is not that of msa-fleet"),
        ({"identity": [1]}, "its column identity is not that of msa-fleet"),
        (
            {"identity": ["b"], "time_ns": ["today"]},
            "its column time_ns is not that of msa-fleet",
        ),
    ],
)
def test_files_of_something_else(
    tmp_path: Path, columns: dict[str, list[object]], why: str
) -> None:
    made = results(tmp_path, result("f1", name="a"))
    path = tmp_path / "dumps" / "other.parquet"
    pq.write_table(pa.table(columns), path)
    (tmp_path / "dumps" / "README").write_text("not a table\n")
    assert counted(made) == [("a-web1", "done")]
    assert [note.text.partition(";")[0] for note in made.notes] == [f"{path}: {why}"]


@pytest.mark.parametrize("text", ["", '{"schema": "msato', "\xff\xfe", "0", "{}"])
def test_mark_that_is_damaged(tmp_path: Path, text: str) -> None:
    """As it may be after a loss of power."""
    made = results(tmp_path, result("f1", name="a"))
    (tmp_path / MARK).write_text(text, encoding="latin-1")
    assert counted(made) == [("a-web1", "done")]
    (note,) = made.notes
    assert note.code == "mark-damaged"
    assert note.text.startswith(f"{tmp_path / MARK}: damaged;")
    assert made.coverage == {"files_read": 1, "files_unreadable": 0}
    made.create()
    assert counted(made) == [("a-web1", "done")]
    assert made.notes == ()


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
