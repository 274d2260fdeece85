# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-fleet as a command: from dumps to buckets."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest

from fixtures.demo import DEMOS
from msatools.cli.subcommands import FleetProgress, progress_text
from msatools.console import run as run_command
from msatools.fleet import single
from msatools.fleet.run import Progress
from msatools.fleet.store import Results, query
from tests.fleet.dumps import DAY, START, copy_dump, cut_off
from tests.fleet.made import result, results
from tests.support.calls import Ran
from tests.support.schemas import check_schema

SCRIPT = Path(sys.executable).with_name("msa-fleet")
HOSTILE = "web\x1b[2J<script>"


def fleet(*words: str | Path) -> Ran:
    """Run it in this process."""
    out, err = io.StringIO(), io.StringIO()
    # A command's own process has other plugins of drgn than this one.
    with redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ):
        status = run_command("fleet", [*map(str, words)])
    return Ran(status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def crash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of dumps of four hosts, one of them cut off, and a copy."""
    folder = tmp_path_factory.mktemp("crash")
    core = DEMOS["6.12"].core
    copy_dump(core, folder / "web1/vmcore", "web1", START)
    copy_dump(core, folder / "web1-again/vmcore", "web1", START)
    copy_dump(core, folder / "web2/vmcore", "web2", START + DAY)
    copy_dump(DEMOS["6.1"].core, folder / "db1/vmcore", "db1", START + 2 * DAY)
    cut_off(copy_dump(core, folder / "db2/vmcore", "db2", START), 3000)
    return folder


@pytest.fixture(scope="module")
def read(crash: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of these dumps, by the script as it is installed."""
    folder = tmp_path_factory.mktemp("results") / "results"
    ran = subprocess.run(
        [SCRIPT, "run", crash, "-o", folder, "-j", "2"], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == (
        f"4 dumps read, 3 done, 1 failed, 1 known before; msa-fleet show {folder}\n"
    )
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of dumps that need not be there."""
    folder = tmp_path / "results"
    results(
        folder,
        result("f1", "oops", name="a", host="web1", day=0),
        result("f1", "oops", name="b", host=HOSTILE, day=3),
        result("f2", "panic", name="c", host="db1", day=70),
    )
    return folder


# --- dumps that are read


def test_dumps_and_their_buckets(read: Path) -> None:
    ran = fleet("show", read, "--json")
    assert (ran.status, ran.err) == (0, "")
    found = json.loads(ran.out)
    check_schema(found)
    (bucket,) = found["buckets"]
    assert bucket["fingerprint"] is None
    assert (bucket["count"], bucket["hosts"]) == (3, ["db1", "web1", "web2"])
    assert bucket["releases"] == ["6.1.0-56-cloud-amd64", "6.12.117+deb12-cloud-amd64"]
    done = {dump["host"]: dump for dump in found["dumps"] if dump["state"] == "done"}
    assert {*done} == {"web1", "web2", "db1"}
    # When a kernel stopped is in its memory: of copies that is the same.
    stopped = {host: dump["time"] for host, dump in done.items()}
    assert bucket["last"] == max(stopped.values())
    assert stopped["web1"] == stopped["web2"]
    for dump in done.values():
        assert dump["report"]["target"]["path"] == dump["path"]
        check_schema(dump["report"])
    (lost,) = [dump for dump in found["dumps"] if dump["state"] != "done"]
    assert (lost["host"], lost["state"], lost["report"]) == ("db2", "failed", None)
    assert "cut off within its headers" in lost["error"]


def test_nothing_is_left_to_do(crash: Path, read: Path) -> None:
    ran = fleet("run", crash, "-o", read, "-j", "1", "--strict")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("0 dumps read, 5 known before; ")


def test_a_list_and_metrics(
    crash: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(crash)
    monkeypatch.setattr("sys.stdin", io.StringIO("db2/vmcore\n/nowhere\n"))
    file = tmp_path / "fleet.prom"
    words = ("-", "-o", tmp_path / "results", "-j", "1", "--strict")
    ran = fleet("run", *words, "--textfile", file)
    assert (ran.status, ran.err) == (3, "")
    assert 'msatools_fleet_dumps{state="failed"} 2.0\n' in file.read_text()
    # Workers have a current directory of their own.
    query = "SELECT path FROM dumps ORDER BY path"
    ran = fleet("sql", tmp_path / "results", query, "--json")
    paths = [json.loads(line)["path"] for line in ran.out.splitlines()]
    assert paths == sorted(["/nowhere", f"{crash}/db2/vmcore"])


# --- what is shown


def test_show(folder: Path) -> None:
    ran = fleet("show", folder)
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"{folder}  3 dumps, 3 done, 3 hosts, 1 kernel, 2 buckets"
    rows = [" ".join(line.split()) for line in lines]
    # 71 days in 24 spans of 3 days each.
    trend = "9" + "9" + "." * 22
    assert f"f1 2 2026-11-18 2026-11-21 2 1 {trend} bug in f" in rows
    assert "/crash/db1/c bug in f" in rows
    assert "2026-11-18..11-20 1 " + "#" * 40 in rows
    assert "\x1b" not in ran.out


def test_choices(folder: Path) -> None:
    ran = fleet("show", folder, "--host", "db*", "--json")
    assert [each["fingerprint"] for each in json.loads(ran.out)["buckets"]] == ["f2"]
    for words in ("--new-since 2027-01-01", "--new-since 2027-01-01T10:00Z"):
        ran = fleet("show", folder, *words.split(), "--json")
        found = [each["fingerprint"] for each in json.loads(ran.out)["buckets"]]
        assert found == ["f2"]
    ran = fleet("show", folder, "--kernel", "5.*")
    assert (ran.status, ran.out) == (0, f"{folder}  no dump matches\n")


def test_new_since_an_age(tmp_path: Path) -> None:
    today = (time.time_ns() // 10**9 - START) // DAY
    folder = tmp_path / "results"
    results(folder, result("f1", day=today - 30), result("f2", day=today))
    found = json.loads(fleet("show", folder, "--new-since", "7d", "--json").out)
    assert [each["fingerprint"] for each in found["buckets"]] == ["f2"]


def test_page(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert fleet("show", folder, "--html", page).status == 0
    text = page.read_text()
    assert "web\\x1b[2J&lt;script&gt;" in text
    assert text.count("<details>") == 2
    assert "\x1b" not in text
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_sql(folder: Path) -> None:
    ran = fleet(
        "sql", folder, "SELECT host, count(*) AS n FROM dumps GROUP BY 1 ORDER BY 1"
    )
    assert (ran.status, ran.err) == (0, "")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["host", "n"],
        ["db1", "1"],
        ["web\\x1b[2J<script>", "1"],
        ["web1", "1"],
    ]
    ran = fleet("sql", folder, "SELECT code, evidence FROM verdicts LIMIT 1", "--json")
    assert json.loads(ran.out) == {"code": "oops", "evidence": ["a fact"]}
    assert "fingerprint" in fleet("sql", folder, "DESCRIBE dumps").out


@pytest.fixture
def spoiled(folder: Path) -> Path:
    """A damaged file beside those of three dumps."""
    results(folder, result("f3", "oops", name="d"), result("f3", name="e"))
    (path,) = (
        path
        for path in (folder / "dumps").glob("*.parquet")
        if pq.read_metadata(path).num_rows == 2
    )
    os.truncate(path, path.stat().st_size - 1)
    return path


def test_a_damaged_file_stops_nothing(
    folder: Path, spoiled: Path, tmp_path: Path
) -> None:
    said = f"note: {spoiled}: damaged (its checksum is another); dumps that only it has"
    page, metrics = tmp_path / "page.html", tmp_path / "fleet.prom"
    ran = fleet("show", folder, "--html", page, "--textfile", metrics)
    assert (ran.status, ran.err) == (0, "")
    assert " 3 dumps, 3 done, 3 hosts, 1 kernel, 2 buckets\n" in ran.out
    assert said in ran.out
    assert f"{spoiled}: damaged" in page.read_text()
    assert "msatools_fleet_unreadable_files 1.0\n" in metrics.read_text()
    ran = fleet("show", folder, "--json", "--strict")
    assert (ran.status, ran.err) == (3, "")
    found = json.loads(ran.out)
    check_schema(found)
    assert found["coverage"] == {"files_read": 2, "files_unreadable": 1}
    assert [note["code"] for note in found["notes"]] == ["results-lost"]
    assert len(found["dumps"]) == 3
    ran = fleet("sql", folder, "SELECT count(*) AS n FROM dumps", "--json")
    assert (ran.status, json.loads(ran.out)) == (0, {"n": 3})
    assert ran.err.startswith(f"msa-fleet: {said}")
    assert fleet("sql", folder, "SELECT 1", "--strict").status == 3


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("COPY dumps TO 'x'", "file system operations are disabled"),
        ("ATTACH 'x'", "file system operations are disabled"),
        ("EXPORT DATABASE 'x'", "file system operations are disabled"),
        ("SELECT * FROM read_text('/etc/passwd')", "operations are disabled"),
        ("SELECT * FROM '/etc/passwd.csv'", "operations are disabled"),
        ("SELECT * FROM 'https://127.0.0.1/x.csv'", "operations are disabled"),
        ("INSTALL httpfs", "operations are disabled"),
        ("LOAD httpfs", "Loading external extensions is disabled"),
        ("SET enable_external_access = true", "the configuration has been locked"),
        ("SET temp_directory = 'x'", "the configuration has been locked"),
        ("", "no query"),
        ("-- nothing", "no query"),
    ],
)
def test_a_query_reaches_the_tables_alone(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    query: str,
    said: str,
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    ran = fleet("sql", folder, query)
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert said in ran.err
    assert [*here.iterdir()] == []
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_signal_stops_a_query(folder: Path) -> None:
    class Stop(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        with pytest.raises(Stop):
            query(
                Results(str(folder)),
                "SELECT sum(a.range * b.range) FROM range(200000) a, range(1000000) b",
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_values_of_queries(folder: Path) -> None:
    query = (
        "SELECT 'nan'::double AS a, map {now(): 1} IS NULL AS b, [1, NULL] AS c, "
        "map {DATE '2026-11-20': [inf]} AS d, 2::hugeint ** 70 > 0 AS e, "
        "'\u202e' AS f, time > now() - INTERVAL 7 DAY AS g, "
        "TIMESTAMP '2026-11-20' AS h "
        "FROM (SELECT 'inf'::double AS inf), dumps LIMIT 1"
    )
    ran = fleet("sql", folder, query, "--json")
    assert (ran.status, ran.err) == (0, "")
    row = json.loads(ran.out)
    assert isinstance(row.pop("g"), bool)
    assert row == {
        "a": None,
        "b": False,
        "c": [1, None],
        "d": {"2026-11-20": [None]},
        "e": True,
        "f": "\u202e",
        "h": "2026-11-20 00:00:00",
    }
    assert ran.out.isascii()
    ran = fleet("sql", folder, "SELECT 1 AS a, 2 AS a", "--json")
    assert (ran.status, ran.out) == (1, "")
    assert "two columns are named a, which --json cannot tell apart" in ran.err


def test_queries_of_the_page(folder: Path) -> None:
    page = Path(__file__).parents[2] / "docs/commands/fleet.md"
    found = page.read_text().partition("```sql\n")[2].partition("```")[0]
    queries = [each for each in found.split(";") if each.strip()]
    assert len(queries) == 4
    for each in queries:
        ran = fleet("sql", folder, each)
        assert (ran.status, ran.err) == (0, ""), each


def test_times_of_queries_are_utc(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    query = "SELECT current_setting('TimeZone') AS zone, min(time) AS first FROM dumps"
    ran = fleet("sql", folder, query, "--json")
    assert json.loads(ran.out) == {"zone": "UTC", "first": "2026-11-18 11:06:40"}


# --- errors and usage


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("", 2, "no subcommand is named; name one of run, show, sql"),
        ("rum x", 2, "rum: no such subcommand; name one of run, show, sql"),
        ("--json", 2, "--json: no such subcommand"),
        ("run x", 2, "the following arguments are required: -o"),
        ("run -o x", 2, "the following arguments are required: DUMP"),
        ("run x -o r -j 0", 2, "not a positive number: '0'"),
        ("run x -o r -j 1 --scheduler a:1", 2, "-j: no effect with --scheduler"),
        ("run x -o r --memory 1", 2, "not a size such as 512M or 4G: '1'"),
        ("run x -o r --timeout x", 2, "not a duration such as 30 or 5m: 'x'"),
        ("run '*.none' -o r", 1, "'*.none': no such file; check the pattern"),
        ("run . -o r", 1, ".: no dump; name files or folders"),
        ("run x -o r --textfile r", 1, "r: node_exporter reads only files that end in"),
        ("show", 2, "the following arguments are required: RESULTS"),
        ("show r", 1, "r: no results of msa-fleet; name the folder of its run -o"),
        ("show r --new-since x", 2, "not a date such as 2026-11-20, or an age"),
        ("show r --json -n 3", 2, "-n: no effect with --json"),
        ("show r --json --color always", 2, "--color: no effect with --json"),
        ("sql r", 2, "the following arguments are required: QUERY"),
        ("sql r x", 1, "r: no results of msa-fleet"),
    ],
)
def test_usage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = fleet(*words.split())
    assert (ran.status, ran.out, ran.err.count("\n")) == (status, "", 1)
    assert ran.err.startswith("msa-fleet: ")
    assert said in ran.err
    assert [*tmp_path.iterdir()] == []


def test_a_query_that_is_wrong(folder: Path) -> None:
    ran = fleet("sql", folder, "SELECT nothing FROM dumps")
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "msa-fleet sql RESULTS 'DESCRIBE dumps'" in ran.err


@pytest.mark.parametrize("words", ["run x -o r", "show r", "sql r q"])
def test_without_the_packages(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def found(name: str) -> object:
        return None if name in ("duckdb", "pyarrow") else name

    monkeypatch.setattr(single, "find_spec", found)
    ran = fleet(*words.split())
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == (
        "msa-fleet: duckdb, pyarrow: not installed; run pip install 'msatools[fleet]'\n"
    )


def test_scheduler_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msatools.fleet.run.CONNECT", "1s")
    words = ("--scheduler", "tcp://127.0.0.1:1")
    ran = fleet("run", "/etc/passwd", "-o", tmp_path / "r", *words)
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert ran.err.startswith("msa-fleet: --scheduler tcp://127.0.0.1:1: ")


@pytest.mark.parametrize("words", ["--help", "run --help", "show -h", "sql -h"])
def test_help(words: str) -> None:
    ran = fleet(*words.split())
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("USAGE: msa-fleet ")
    assert max(map(len, ran.out.splitlines())) <= 88


def test_help_and_show_import_no_engine(folder: Path) -> None:
    code = (
        "import sys; from msatools.console import run\n"
        "run('fleet', sys.argv[1:])\n"
        "assert not {'distributed', 'drgn', 'pyarrow'} & {*sys.modules}, 'slow'"
    )
    command = [sys.executable, "-c", code, "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def test_workers_that_do_not_start(tmp_path: Path) -> None:
    """What they met is told, and not what Dask met when it gave up."""
    ran = subprocess.run(
        [SCRIPT, "run", "/etc/passwd", "-o", tmp_path / "results", "-j", "2"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30)),
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        "msa-fleet: the workers do not start: OSError: [Errno 24] Too many open files; "
        "have fewer with -j, and see ulimit -a\n"
    )


# --- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress() -> None:
    progress = Progress(300, skipped=20)
    assert progress_text(progress) == "msa-fleet: 20 of 300"
    progress.states.update({"done": 97, "failed": 2, "timeout": 1})
    progress.start_s -= 50
    words = progress_text(progress)
    assert words.startswith("msa-fleet: 120 of 300, 3 failed, 2.0/s, 1:3")
    assert words.endswith(" left")


def test_progress_is_for_terminals() -> None:
    for out, written in ((io.StringIO(), False), (Terminal(), True), (None, False)):
        with FleetProgress(out) as shown:
            shown.dashboard("http://127.0.0.1:8787/status")
            shown.update(Progress(3))
        assert out is None or bool(out.getvalue()) == written
