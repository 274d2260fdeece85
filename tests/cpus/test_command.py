# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-cpus as people call it: what it understands, hands on and refuses."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drgn import sizeof
from drgn.commands import CommandArgumentError, CommandError
from drgn.helpers.linux.percpu import per_cpu
from msatools.commands.cpus import COMMAND

from fixtures import lab
from msatools import cli
from msatools.cli import run_console, run_in_drgn
from msatools.cpus.model import Cpu, CpusReport
from msatools.cpus.options import CpusOptions
from msatools.render.cpus import COLUMNS
from msatools.target import Opened, TargetError, TargetSpec, open_target
from tests.cpus.damaged import lose
from tests.cpus.madecpus import cpu, cpuset, irq, offline, processor, report
from tests.locks.madelocks import TARGET
from tests.support import commandline
from tests.support.dumps import open_dump

DUMP = "cpus-6.12"
ON_REQUEST = {"icsw", "migr", "smtx", "srw", "syscl"}
RUN = "msatools.cpus.cpus.Cpus"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("", {}),
        ("-P 3", {"cpus": frozenset({3})}),
        ("-P 0-3,8,2", {"cpus": frozenset({0, 1, 2, 3, 8})}),
        ("--set /db", {"sets": ("/db",)}),
        ("--set default,/db/x,isolcpus", {"sets": ("default", "/db/x", "isolcpus")}),
        ("--set /db -P 1", {"sets": ("/db",), "cpus": frozenset({1})}),
        ("-i", {"irqs": True}),
        ("-i -P 4-5", {"irqs": True, "cpus": frozenset({4, 5})}),
        ("--sets", {"tasks": True}),
        ("--info", {}),
        ("-v", {"doing": True, "tasks": True}),
        ("-v -i", {"doing": True, "tasks": True, "irqs": True}),
        # For these of the columns all tasks have to be read, and for no others.
        ("-o cpu,csw,intr", {}),
        ("-o cpu,icsw", {"tasks": True}),
        ("-o MIGR", {"tasks": True}),
        ("-o all", {"tasks": True}),
        ("-n 3", {}),
        ("--json -n 3", {}),
    ],
)
def test_options(
    monkeypatch: pytest.MonkeyPatch, words: str, given: dict[str, Any]
) -> None:
    """What is collected; how it is shown is the renderer's alone."""
    found = commandline.given_options(COMMAND, RUN, monkeypatch, *words.split())
    assert found == CpusOptions(**given)


REFUSED = {
    "-P x": "not a number: 'x'",
    "-P": "expected one argument",
    "-P 3-1": "not a list of CPUs: '3-1'",
    "-P 1,,2": "not a number: ''",
    "-P -1": "not a number: ''",
    "-P 99999": "not a list of CPUs",
    "-i --sets": "not allowed with",
    "-i --info": "not allowed with",
    "--sets --info": "not allowed with",
    "-o cpu,ithr": "no column 'ithr'; there are cpu, set, state, minf, mjf, xcal",
    "-i -o cpu": "-o: columns of the table of CPUs",
    "--sets -o all": "-o: columns of the table of CPUs",
    "-n 0": "not a positive number",
    "-n many": "not a number",
    "0": "not a positive interval",
    "2 0": "not a positive count",
    "--types none": "invalid choice",
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_usage(words: str) -> None:
    assert REFUSED[words] in commandline.refusal(COMMAND, *words.split())


@pytest.mark.parametrize("word", ["", ","])
@pytest.mark.parametrize("option", ["-o", "--set"])
def test_lists_of_nothing(option: str, word: str) -> None:
    said = commandline.refusal(COMMAND, option, word)
    assert said.startswith(f"argument {option}: ")


def test_help() -> None:
    commandline.check_help(COMMAND)


# --- what is shown

MADE = report(
    [
        cpu(0, icsw=7, migr=8),
        cpu(1, set="/db", state=("on", "no-intr", "idle")),
        offline(2, processor=processor(2, active=False)),
    ],
    [cpuset("default", (0,)), cpuset("/db", (1,), kind="root")],
    irqs=(irq(24, {0: 300, 1: 700}, share=1.0),),
    vectors=(),
    softirqs=(),
)


def shown(*words: str, made: CpusReport = MADE) -> list[str]:
    return commandline.shown(COMMAND, made, *words)


def head(*words: str, first: str = "CPU") -> list[str]:
    """Give the header of the table that begins with a column."""
    (line,) = [line for line in shown(*words) if line.split()[:1] == [first]]
    return line.split()


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        ("-o cpu,csw", ["CPU", "csw"]),
        ("-o CPU,Intr,cpu", ["CPU", "intr"]),
        ("-o cpu,icsw,migr,smtx", ["CPU", "icsw", "migr", "smtx"]),
        (
            "",
            [
                *("CPU", "SET", "STATE", "minf", "mjf", "xcal", "tlb", "intr"),
                *("soft", "csw", "runq", "usr", "sys", "irq", "wt", "st", "idl"),
                "CURRENT",
            ],
        ),
    ],
)
def test_columns(words: str, columns: list[str]) -> None:
    assert head(*words.split()) == columns


def test_all_columns() -> None:
    found = [name.lower() for name in head("-o", "all")]
    assert found == list(COLUMNS)
    assert {*found} >= ON_REQUEST | {"gst", "nice", "softirq"}


def test_views() -> None:
    assert head("-i", first="IRQ")[:3] == ["IRQ", "NAME", "AFFINITY"]
    assert "SIBLINGS" in head("--info")
    text = "\n".join(shown("--sets"))
    assert "/db" in text
    assert "\n".join(shown()) not in text


def test_rows_and_detail_reach_the_view() -> None:
    assert any("-n COUNT" in line for line in shown("-n", "1"))
    assert any(line.split()[:1] == ["2"] for line in shown("-v"))
    assert not any(line.split()[:1] == ["2"] for line in shown())


# --- through the command line, on real dumps


@dataclass(frozen=True)
class Ran:
    """How a run of the command ended, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found


def run(*words: str) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = run_console(COMMAND, words)
    return Ran(status, out.getvalue(), err.getvalue())


@cache
def opened(name: str) -> Opened:
    spec = TargetSpec(path=str(lab.build(name).dump("elf")), types="btf")
    return open_target(spec)


@cache
def on_dump(*words: str, name: str = DUMP) -> Ran:
    """Run it on a dump, which is opened once, with what the kernel's own BTF tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "open_target", lambda spec: opened(name))
        return run("--types", "btf", str(lab.build(name).dump("elf")), *words)


@pytest.mark.parametrize("name", ["cpus-6.1", "cpus-6.12"])
@pytest.mark.parametrize("words", ["", "-v", "-i", "--sets -v", "--info", "-o all"])
def test_dump_without_losses(name: str, words: str) -> None:
    ran = on_dump("--strict", *words.split(), name=name)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.splitlines()[0].startswith(name.rpartition("-")[2])
    assert "note: " not in ran.out


def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have dumps opened without the run queue of one CPU."""

    def open_damaged(spec: TargetSpec) -> Opened:
        opened = open_target(spec)
        queue = per_cpu(opened.prog["runqueues"], 1)
        lose(opened.prog, queue.address_, sizeof(queue))
        return opened

    monkeypatch.setattr(cli, "open_target", open_damaged)


def test_damaged_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is printed in any case."""
    damaged(monkeypatch)
    dump = str(lab.build(DUMP).dump("elf"))
    ran = run("--types", "btf", dump)
    assert (ran.status, ran.err) == (0, "")
    assert "note: " in ran.out
    ran = run("--types", "btf", dump, "--json", "--strict")
    assert (ran.status, ran.err) == (3, "")
    assert ran.json["coverage"]["run_queues_unreadable"] == 1
    assert ran.json["cpus"][1]["csw"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-P 77", "CPU 77: this kernel has none of that number"),
        ("-P 1,50-51", "CPU 50-51: this kernel has none of that number"),
        ("--set /nowhere", "set /nowhere: there is none of that name; there are"),
        ("--set default,db", "set db: there is none of that name"),
    ],
)
def test_what_is_not_there(words: str, said: str) -> None:
    ran = on_dump(*words.split())
    assert (ran.status, ran.out) == (1, "")
    (line,) = ran.err.splitlines()
    assert line.startswith(f"msa-cpus: {said}")


def test_a_dump_has_no_intervals() -> None:
    ran = on_dump("5", "2")
    assert (ran.status, ran.out) == (2, "")
    assert "a dump does not change in an interval" in ran.err


def test_no_dump(tmp_path: Path) -> None:
    ran = run(str(tmp_path / "none"))
    assert (ran.status, ran.out) == (1, "")
    assert len(ran.err.splitlines()) == 1


# --- JSON, as in the contract

HEAD = {
    *("schema", "target", "taken_at_ns", "interval_ns", "coverage", "notes"),
    *("cpus", "sets"),
}
TIMES = {"usr", "nice", "sys", "irq", "softirq", "wt", "st", "gst", "idl"}


def test_json() -> None:
    found = on_dump("--json").json
    assert found["schema"] == "msatools.cpus/1"
    assert found.keys() >= HEAD
    assert not found.keys() & {"irqs", "vectors", "softirqs"}
    assert isinstance(found["taken_at_ns"], int)
    assert found["interval_ns"] is None
    assert found["notes"] == []
    for each in found["sets"]:
        assert each.keys() >= {"name", "kind", "cpus", "source"}
        assert "tasks" not in each
        assert each["root_domain"] is None or each["root_domain"].startswith("0x")
    for each in found["findings"]:
        assert each.keys() == {"code", "text", "cpus", "advice"}
    for each in found["run_queues"]:
        assert "doing" not in each
        for task in each["waiting"]:
            assert task["class"] in ("stop", "deadline", "realtime", "fair", "idle")


def test_json_has_a_key_for_each_column() -> None:
    for row in on_dump("--json").json["cpus"]:
        assert row.keys() == {field.name for field in fields(Cpu)}
        keys = {f"{name}_ns" if name in TIMES else name for name in COLUMNS}
        assert row.keys() >= keys
        assert row["smtx"] is row["srw"] is row["syscl"] is None
        # On request; who does not ask is not told 0.
        assert row["icsw"] is row["migr"] is None
        for name in TIMES:
            assert isinstance(row[f"{name}_ns"], int)
        if row["online"]:
            assert row["current"].keys() == {"pid", "comm", "class"}


def test_json_of_columns_that_take_all_tasks() -> None:
    found = on_dump("--json", "-o", "icsw,migr").json
    assert found["coverage"]["tasks"] > 100
    for row, other in zip(found["cpus"], on_dump("--json").json["cpus"], strict=True):
        assert isinstance(row["icsw"], int)
        assert isinstance(row["migr"], int)
        assert row | {"icsw": None, "migr": None} == other


def test_json_of_interrupts() -> None:
    found = on_dump("--json", "-i").json
    assert len(found["irqs"]) > 20
    cpus = {str(row["cpu"]) for row in found["cpus"]}
    for each in found["irqs"]:
        assert each.keys() >= {"irq", "name", "affinity", "effective", "counts"}
        assert each["time_ns"] is None
        assert each["counts"].keys() <= cpus
        assert sum(each["counts"].values()) == each["total"]
        assert all(isinstance(number, int) for number in each["affinity"])
    for key in ("vectors", "softirqs"):
        assert len(found[key]) >= 10
        for each in found[key]:
            assert each.keys() == {"name", "text", "counts", "total"}
    # All else is as without.
    plain = on_dump("--json").json
    assert {key: found[key] for key in plain if key != "coverage"} == {
        key: plain[key] for key in plain if key != "coverage"
    }


def test_json_of_sets() -> None:
    for each in on_dump("--json", "--sets").json["sets"]:
        tasks = each["tasks"]
        assert tasks.keys() == {"members", "pinned", "straying", "percpu_threads"}
        for task in (*tasks["pinned"], *tasks["straying"]):
            assert task.keys() == {
                *("pid", "comm", "cpus", "cpu", "cgroup", "why", "kthread")
            }


def test_json_of_what_cpus_do() -> None:
    for each in on_dump("--json", "-v").json["run_queues"]:
        assert each["doing"] is None or each["doing"].split()[0] in (
            *("user", "kernel", "interrupt"),
        )


def test_json_of_some() -> None:
    whole = on_dump("--json").json
    found = on_dump("--json", "-P", "5-6").json
    assert found["cpus"] == whole["cpus"][5:7]
    assert {each["cpu"] for each in found["run_queues"]} == {5, 6}
    assert found["coverage"]["cpus"] == len(whole["cpus"])
    found = on_dump("--json", "--set", "/db,/quiet").json
    assert found["cpus"] == whole["cpus"][5:7]
    # Rows are of what is shown.
    assert on_dump("--json", "-n", "1").json["cpus"] == whole["cpus"]


# --- in drgn


def test_in_drgn(capsys: pytest.CaptureFixture[str]) -> None:
    prog = open_dump(DUMP, "btf")
    found = run_in_drgn(COMMAND, prog, ["-P", "5-6"])
    assert found is not None
    assert [row.cpu for row in found.cpus] == [5, 6]
    out = capsys.readouterr().out
    assert out.splitlines()[1:] == on_dump("-P", "5-6").out.splitlines()[1:]
    with pytest.raises(CommandArgumentError, match="a dump does not change"):
        run_in_drgn(COMMAND, prog, ["5"])
    with pytest.raises(CommandArgumentError, match=r"^%cpus: .*no column"):
        run_in_drgn(COMMAND, prog, ["-o", "x"])
    with pytest.raises(TargetError, match="CPU 77"):
        run_in_drgn(COMMAND, prog, ["-P", "77"])
    queue = per_cpu(prog["runqueues"], 1)
    lose(prog, queue.address_, sizeof(queue))
    with pytest.raises(CommandError, match="the report is not complete"):
        run_in_drgn(COMMAND, prog, ["--strict"])


def test_as_a_process() -> None:
    words = [
        *(Path(sys.executable).with_name("msa-cpus"), "--types", "btf"),
        *(lab.build(DUMP).dump("elf"), "--strict", "-o", "cpu,set,csw"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == on_dump("--strict", "-o", "cpu,set,csw").out
    assert done.stderr == ""


# --- strict


@pytest.mark.parametrize(
    ("key", "on_a_dump", "live"),
    [
        ("cpus_unreadable", True, True),
        ("run_queues_unreadable", True, True),
        ("cpumasks_unreadable", True, True),
        ("rq_unreadable", True, False),
        ("kernel_stat_unreadable", True, False),
        ("irq_counts_unreadable", True, False),
        ("lists_broken", True, False),
        ("trees_broken", True, False),
        ("counts_broken", True, False),
        ("partitions_unknown", True, False),
        ("run_queues_differ", True, False),
        ("ticks_unreadable", True, False),
        ("cpus", False, False),
        ("irqs", False, False),
        ("tasks", False, False),
        ("reads", False, False),
    ],
)
def test_strict(key: str, on_a_dump: bool, live: bool) -> None:
    made = replace(MADE, coverage={key: 1})
    assert COMMAND.problems(made) == on_a_dump
    running = replace(made, target=replace(TARGET, live=True, kind="kcore"))
    assert COMMAND.problems(running) == live
    assert not COMMAND.problems(replace(MADE, coverage={key: 0}))
