# SPDX-License-Identifier: LGPL-2.1-or-later

"""What differs between two reports, row by row: of all commands but msa-memstat, which
compares pages (tests/memory/test_diff.py)."""

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drgn.commands import CommandArgumentError, run_command
from msgspec.structs import replace

from msatools.cli.drgn_prompt import run_in_drgn
from msatools.derived.options import options_of
from msatools.reports.diff import ReportDiff
from tests.contract.table import CPUS, MEMSTAT, PRSTAT, ROWS, Row
from tests.support.calls import CORE, Ran, call, demo

SECOND = 10**9
BY_ROW = [row for row in ROWS if row is not MEMSTAT]
EACH = pytest.mark.parametrize("row", BY_ROW, ids=lambda row: row.name)

Report = dict[str, Any]
Change = Callable[[Report], object]


@pytest.fixture
def diff(tmp_path: Path) -> Callable[..., Ran]:
    """Compare a report of the demo with another one that is made of it."""

    def run(row: Row, change: Change, *words: str) -> Ran:
        report = of_demo(row.name)
        other = copy.deepcopy(report)
        other["taken_at_ns"] += SECOND
        change(other)
        before, after = tmp_path / "before", tmp_path / "after"
        before.write_text(json.dumps(report))
        after.write_text(json.dumps(other))
        return call(row.command, "--diff", str(before), str(after), *words)

    return run


@cache
def of_demo(name: str) -> Report:
    """The report of a command on the demo, made once."""
    (row,) = (row for row in ROWS if row.name == name)
    return call(row.command, "--json", CORE).json


def changes(ran: Ran, name: str) -> list[Report]:
    assert (ran.status, ran.err) == (0, "")
    found: list[Report] = ran.json["changes"][name]
    return found


@EACH
def test_nothing_but_time(row: Row, diff: Callable[..., Ran]) -> None:
    def age(report: Report) -> None:
        for task in report.get("tasks", ()):
            task["lifetime_ns"] += SECOND
        for zombie in report.get("zombies", ()):
            zombie["age_ns"] += SECOND

    ran = diff(row, age, "--json")
    assert ran.json["schema"] == f"msatools.{row.name}-diff/1"
    assert ran.json["elapsed_ns"] == SECOND
    assert ran.json["notes"] == []
    assert ran.json["changes"]
    assert not any(ran.json["changes"].values())
    text = diff(row, age).out
    assert text.count("  none\n") == len(ran.json["changes"])
    assert "1.0s from one to the other\n" in text


def test_tasks_that_ran_came_and_went(diff: Callable[..., Ran]) -> None:
    """What changed most is first; a PID that was given to another task is another."""

    def change(report: Report) -> None:
        tasks = report["tasks"]
        for task in tasks:
            task["lifetime_ns"] += SECOND
        first, second, third = (
            next(task for task in tasks if task["pid"] == pid) for pid in (1, 2, 3)
        )
        first |= {"user_ns": first["user_ns"] + 10**8, "state": "R", "rss_bytes": None}
        second["lifetime_ns"] = 10**8
        tasks.remove(third)
        tasks.append({**first, "pid": 9999, "tgid": 9999, "user_ns": 9 * 10**12})

    ran = diff(PRSTAT, change, "--json")
    found = changes(ran, "tasks")
    told = [(each["change"], each["key"]["pid"]) for each in found]
    assert told[0] == ("came", 9999)
    assert sorted(told[1:]) == [("came", 2), ("changed", 1), ("gone", 2), ("gone", 3)]
    (ran_on,) = (each for each in found if each["change"] == "changed")
    assert ran_on["deltas"]["user_ns"] == 10**8
    assert ran_on["deltas"]["rss_bytes"] is None
    assert ran_on["facts"] == {"state": {"before": "S", "after": "R"}}
    text = diff(PRSTAT, change).out
    assert "Changes in tasks  2 came, 2 gone, 1 changed\n" in text
    assert "S -> R" in text
    assert " +100ms " in text
    assert "… 4 more rows: -n COUNT shows them" in diff(PRSTAT, change, "-n", "1").out


def test_other_kernel_and_intervals_are_noted(diff: Callable[..., Ran]) -> None:
    def change(report: Report) -> None:
        report["target"]["release"] = "7.0\x1b[31m"
        report["interval_ns"] = 5 * SECOND

    ran = diff(CPUS, change)
    assert r"different kernels: 6.12" in ran.out
    assert r"7.0\x1b[31m" in ran.out
    assert "counts are since boot in the first, of 5.0s in the second" in ran.out
    assert "from one to the other" not in ran.out


@pytest.mark.parametrize("value", [7, "x", [], {}, None, [None], [{"x": 1}], 1 << 80])
@EACH
def test_damaged(row: Row, value: object, diff: Callable[..., Ran]) -> None:
    """One line, or what is left; no traceback."""
    keys = [*of_demo(row.name)]
    refused = 0
    for key in keys:
        ran = diff(row, lambda report, key=key: report.update({key: value}))
        assert (ran.status, ran.err.count("\n")) in ((0, 0), (1, 1))
        assert "unexpected" not in ran.err
        refused += ran.status
    assert refused


def test_what_is_no_report(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    other.write_text(call(CPUS.command, "--json", CORE).out)
    for text, said in (
        ("", "empty; make it with msa-prstat --json"),
        ("hello", "not JSON; make it with msa-prstat --json"),
        ('{"schema": "msatools.prstat/9"}', "msatools.prstat/9, where"),
        ('{"schema": "msatools.prstat/1", ', "cut off, or damaged"),
        (other.read_text(), "no report of msa-prstat (msatools.cpus/1)"),
    ):
        file.write_text(text)
        ran = call(PRSTAT.command, "--diff", str(file), str(other))
        assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
        assert said in ran.err


WRONG = {
    "--diff a": "expected 2 arguments",
    "--diff - -": "-: standard input can be one of the two only",
    "--diff a b vmcore": "vmcore: --diff reads no target",
    "--diff a b 5": "5: --diff reads no target",
    "--diff a b --record c": "--record: --diff reads no target",
}


@pytest.mark.parametrize("words", WRONG)
@EACH
def test_called_wrong(row: Row, words: str) -> None:
    ran = call(row.command, *words.split())
    assert (ran.status, ran.out) == (2, "")
    assert WRONG[words] in ran.err


def test_choosing(tmp_path: Path) -> None:
    """From recordings, which have all; a file of JSON has what it has."""
    recording, file = tmp_path / "recording", tmp_path / "file"
    call(PRSTAT.command, CORE, "--record", str(recording))
    file.write_text(call(PRSTAT.command, "--json", "-p", "1", CORE).out)
    refused = call(PRSTAT.command, "--diff", str(recording), str(file), "-p", "1")
    assert refused.status == 2
    assert "-p: chooses from what is recorded" in refused.err
    ran = call(PRSTAT.command, "--diff", str(file), str(recording), "--json")
    assert {each["change"] for each in changes(ran, "tasks")} == {"came"}
    copied = tmp_path / "copy"
    copied.write_bytes(recording.read_bytes())
    words = ("--diff", str(recording), str(copied), "-p", "1", "--json")
    assert changes(call(PRSTAT.command, *words), "tasks") == []
    same = call(PRSTAT.command, "--diff", str(recording), str(recording))
    assert (same.status, same.out) == (1, "")
    assert "a recording of one sample, which cannot differ from itself" in same.err


def test_pages_of_recordings(tmp_path: Path) -> None:
    """msa-memstat compares them as it does JSON, groups too."""
    recording, file = tmp_path / "recording", tmp_path / "file"
    words = ("--by", "slab", CORE)
    call(MEMSTAT.command, *words, "--record", str(recording))
    file.write_text(call(MEMSTAT.command, *words, "--json").out)
    ran = call(MEMSTAT.command, "--diff", str(file), str(recording), "--json")
    assert (ran.status, ran.err) == (0, "")
    assert ran.json["elapsed_ns"] == 0
    assert not any(each["delta_pages"] for each in ran.json["classes"])
    assert ran.json["by"]["slab"]
    assert not any(each["delta_pages"] for each in ran.json["by"]["slab"])


def test_in_drgn(tmp_path: Path) -> None:
    """It gives what it found."""
    recording, file = tmp_path / "recording", tmp_path / "file"
    run_command(demo().prog, f"cpus --record {recording}")
    file.write_text(call(CPUS.command, "--json", CORE).out)
    found = run_command(demo().prog, f"cpus --diff {file} {recording}")
    assert isinstance(found, ReportDiff)
    assert found.elapsed_ns == 0
    assert not any(found.changes.values())


def test_command_that_does_not_offer_it() -> None:
    """It is refused in a plain line, and neither help nor completion have it."""
    command = replace(CPUS.command, compared=())
    ran = call(command, "--diff", "a", "b")
    said = "msa-cpus: --diff: msa-cpus does not offer it; see msa-cpus --help\n"
    assert (ran.status, ran.out, ran.err) == (2, "", said)
    assert "--diff" not in call(command, "--help").out
    assert "--diff" not in {flag for each in options_of(command) for flag in each.flags}
    assert call(command, CORE) == call(CPUS.command, CORE)
    with pytest.raises(CommandArgumentError, match=r"^%cpus: --diff: %cpus does not"):
        run_in_drgn(command, demo().prog, ["--diff", "a", "b"])
