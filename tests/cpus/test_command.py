# SPDX-License-Identifier: LGPL-2.1-or-later

"""Options of msa-cpus, and the views that they select."""

from functools import cache

import pytest
from msatools.commands.cpus import COMMAND

from fixtures import lab
from msatools.cpus.model import CpusReport
from msatools.program import Opened, TargetSpec, open_target
from tests.cpus.madecpus import cpu, cpuset, irq, offline, processor, report
from tests.support import commandline
from tests.support.calls import Ran, call

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


# --- through the command line, on a real dump


@cache
def opened() -> Opened:
    path = str(lab.build("cpus-6.12").dump("elf"))
    return open_target(TargetSpec(path=path, types="btf"))


@cache
def on_dump(*words: str) -> Ran:
    return call(COMMAND, "dump", *words, opening=lambda _: opened())


def test_json_of_selected_cpus() -> None:
    whole = on_dump("--json").json
    for words in (("-P", "5-6"), ("--set", "/db,/quiet")):
        found = on_dump("--json", *words).json
        assert found["cpus"] == whole["cpus"][5:7]
        assert {queue["cpu"] for queue in found["run_queues"]} == {5, 6}
        assert found["coverage"]["cpus"] == len(whole["cpus"])
