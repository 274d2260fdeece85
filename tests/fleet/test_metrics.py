# SPDX-License-Identifier: LGPL-2.1-or-later

"""Gauges of all commands that write them, by Prometheus's own parser."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from msatools.commands.memstat import COMMAND as MEMSTAT
from msatools.commands.report import COMMAND as REPORT
from prometheus_client.parser import text_string_to_metric_families

from msatools.fleet.buckets import Choice, gauges, read_fleet
from msatools.fleet.dumps import result_of
from msatools.memory.classes import CLASSES
from msatools.model import single
from msatools.report.model import Severity
from tests.fleet.made import identity, outcome, result, results
from tests.support.calls import CORE, call, open_demo

UNITS = ("_bytes", "_seconds")
LABELS = {"class", "check", "severity", "code", "state"}

Numbers = dict[tuple[str, ...], float]


def parsed(text: str) -> dict[str, Numbers]:
    """Return the numbers of each gauge by labels, having checked what all promise."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert re.fullmatch("msatools_[a-z_]+[a-z]", family.name)
        assert family.documentation.endswith(".")
        if any(word in family.name for word in ("size", "time_", "memory")):
            assert family.name.endswith((*UNITS, "_checks"))
        assert all({*sample.labels} <= LABELS for sample in family.samples)
        assert all(sample.timestamp is None for sample in family.samples)
        found[family.name] = {
            tuple(sample.labels.values()): sample.value for sample in family.samples
        }
    return found


def test_memstat(tmp_path: Path) -> None:
    file = tmp_path / "memstat.prom"
    words = (CORE, "--json", "--textfile", str(file))
    report = call(MEMSTAT, *words, opening=open_demo).json
    found = parsed(file.read_text())
    classes = found["msatools_memory_class_bytes"]
    assert classes == {(each["name"],): each["bytes"] for each in report["classes"]}
    assert {*classes} == {(name,) for name in CLASSES.values()}
    assert found["msatools_memory_examined_bytes"] == {(): sum(classes.values())}
    differences = found["msatools_memory_check_difference_bytes"]
    assert differences == {
        (each["name"],): each["difference"] * 4096 for each in report["checks"]
    }
    assert found["msatools_memory_unexplained_checks"] == {(): 0}
    assert [*tmp_path.iterdir()] == [file]


def test_report(tmp_path: Path) -> None:
    file = tmp_path / "report.prom"
    words = (CORE, "--json", "--textfile", str(file))
    report = call(REPORT, *words, opening=open_demo).json
    found = parsed(file.read_text())
    severities = [each["severity"] for each in report["verdicts"]]
    assert found["msatools_report_verdicts"] == {
        (each,): severities.count(each) for each in get_args(Severity)
    }
    assert found["msatools_report_crashed"] == {(): 0}
    assert found["msatools_report_online_cpus"] == {(): 2}
    assert found["msatools_report_uptime_seconds"] == {
        (): pytest.approx(report["machine"]["uptime_ns"] / 1e9)
    }


def test_fleet(tmp_path: Path) -> None:
    made = results(
        tmp_path,
        result("f1", "oops", "oops", name="a", host="web1"),
        result("f1", "oops", name="b", host="web2", day=1),
        result(None, "hung-tasks", name="c", day=2),
        result_of(identity("d"), outcome("failed", "no")),
    )
    from msatools.cli.recording import exposition

    found = parsed(exposition(gauges(read_fleet(made, Choice()))).decode())
    states = {"done": 3, "failed": 1, "timeout": 0, "crashed": 0}
    assert found["msatools_fleet_dumps"] == {(k,): v for k, v in states.items()}
    assert found["msatools_fleet_verdict_dumps"] == {("oops",): 2, ("hung-tasks",): 1}
    assert found["msatools_fleet_buckets"] == {(): 2}
    assert found["msatools_fleet_crash_buckets"] == {(): 1}


def test_unknown_value_is_no_zero() -> None:
    from msatools.cli.recording import exposition

    made = (single("msatools_load", "Load.", None), single("msatools_cpus", "CPUs.", 2))
    assert parsed(exposition(made).decode()) == {"msatools_cpus": {(): 2}}


@pytest.mark.parametrize("command", [MEMSTAT, REPORT], ids=lambda each: each.name)
def test_no_file_is_written_in_the_sandbox(command: Any) -> None:
    ran = call(command, CORE, "--textfile", "x.prom", "--sandbox")
    assert (ran.status, ran.out) == (2, "")
    assert "--textfile: no file is written with --sandbox" in ran.err


@pytest.mark.parametrize("command", [MEMSTAT, REPORT], ids=lambda each: each.name)
def test_a_file_that_cannot_be_written_costs_no_scan(
    command: Any, tmp_path: Path
) -> None:
    for path, said in (
        (tmp_path / "no" / "x.prom", "no such directory"),
        (tmp_path / "x.txt", "node_exporter reads only files that end in .prom"),
    ):
        ran = call(command, CORE, "--textfile", str(path))
        assert (ran.status, ran.out) == (1, "")
        assert said in ran.err
