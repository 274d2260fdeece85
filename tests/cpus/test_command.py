# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of msa-cpus, and the views that they select."""

from functools import cache
from typing import Any

import pytest
from msatools.commands.cpus import COMMAND

from fixtures import lab
from msatools.cpus.cpus import CpusOptions
from msatools.cpus.model import CpusReport
from msatools.program import Opened, TargetSpec, open_target
from msatools.render.cpus.report import COLUMNS
from tests.cpus.madecpus import cpu, cpuset, irq, offline, processor, report
from tests.support import commandline
from tests.support.calls import Ran, call

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
        ("--stalls", {"stalls": True}),
        (
            "--stalls -v -P 1",
            {"doing": True, "tasks": True, "stalls": True} | {"cpus": frozenset({1})},
        ),
        ("-v", {"doing": True, "tasks": True}),
        ("-v -i", {"doing": True, "tasks": True, "irqs": True}),
        # Only these columns need all tasks.
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
    """Options of collection are passed on; those of rendering are not."""
    found = commandline.given_options(COMMAND, RUN, monkeypatch, *words.split())
    assert found == CpusOptions(**given)


# --- views

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
    """Return the header of the table with this first column."""
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


# --- through the command line, on a real dump


@cache
def opened() -> Opened:
    path = str(lab.build("cpus-6.12").dump("elf"))
    return open_target(TargetSpec(path=path, types="btf"))


@cache
def on_dump(*words: str) -> Ran:
    return call(COMMAND, "dump", *words, opening=lambda _: opened())


@pytest.mark.parametrize("words", ["", "-v", "-i", "--sets -v", "--info", "-o all"])
def test_dump_without_losses(words: str) -> None:
    ran = on_dump("--strict", *words.split())
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.splitlines()[0].startswith("6.12")
    assert "note: " not in ran.out


def test_json_of_selected_cpus() -> None:
    whole = on_dump("--json").json
    for words in (("-P", "5-6"), ("--set", "/db,/quiet")):
        found = on_dump("--json", *words).json
        assert found["cpus"] == whole["cpus"][5:7]
        assert {queue["cpu"] for queue in found["run_queues"]} == {5, 6}
        assert found["coverage"]["cpus"] == len(whole["cpus"])
