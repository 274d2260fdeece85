# SPDX-License-Identifier: LGPL-2.1-or-later

"""What a report costs: reads, counted by strace of ELF dumps, bytes and time."""

import json
import re
import sys
from pathlib import Path

import pytest
from msatools.commands.zombies import COMMAND

from fixtures import lab
from tests.support.calls import CORE, call
from tests.support.strace import MARKER, reads_of

MOST_READS = 100
REPORTS = f"""
import json, sys
import msatools.commands.zombies  # later imports would count as reads
from msatools.kernel.report import quietly
from msatools.program import TargetSpec, open_target
from msatools.zombies.model import ZombiesOptions
from msatools.zombies.zombies import Zombies
path, results, *pids = sys.argv[1:]
opened = open_target(TargetSpec(path=path, types="btf"))
found = {{}}
for pid in pids:
    print("{MARKER}" + pid, file=sys.stderr, flush=True)
    options = ZombiesOptions(pids=(int(pid),), cost=True)
    report = Zombies(opened.prog, opened.target, options).report(quietly)
    found[pid] = report.reads, [group.verdict for group in report.groups]
    print("{MARKER}after", file=sys.stderr, flush=True)
open(results, "w").write(json.dumps(found))
"""


def check_cost(
    run: lab.Run, pids: list[int], tmp_path: Path
) -> dict[str, tuple[int, list[str]]]:
    """Check that reports of one task cost little, and report their costs correctly."""
    assert run.elf
    results = tmp_path / "results"
    words = [sys.executable, "-c", REPORTS, run.elf, results, *map(str, pids)]
    counted = reads_of(words, run.elf)
    found: dict[str, tuple[int, list[str]]] = json.loads(results.read_text())
    for pid, (reads, _) in found.items():
        assert reads == counted[pid]
        assert 10 < reads <= MOST_READS
    return found


@pytest.mark.long
def test_one_task_of_many(tmp_path: Path) -> None:
    run = lab.build("manytasks-6.12")
    zombies = run.workload["farm"]["zombies"]
    distant = run.workload["distant"]["pid"]
    pids = [zombies[0], zombies[len(zombies) // 2], zombies[-1], distant]
    assert len(check_cost(run, pids, tmp_path)) == len(pids)


def test_one_task_whose_parent_is_blocked(tmp_path: Path) -> None:
    """Finding the end of the parent's wait chain would take all tasks."""
    run = lab.build("zombies-6.12")
    verdict = "parent-blocked"
    dead = {
        one["ppid"]: one["pid"]
        for one in run.workload["zombies"]
        if one["verdict"] == verdict
    }
    found = check_cost(run, [*dead.values()], tmp_path)
    assert len(found) == len(dead) > 3
    assert all(verdicts == [verdict] for _, verdicts in found.values())


def test_a_dump_that_is_mapped_into_memory() -> None:
    """libkdumpfile reads a kdump without calls, which are not the cost then."""
    found = call(COMMAND, "-p", "1", "--cost", CORE, "--json").json
    assert 5 < found["reads"] <= MOST_READS
    assert found["reads"] >= found["coverage"]["reads"]
    assert found["read_bytes"] == found["coverage"]["bytes_read"] > 1000
    assert found["elapsed_ns"] > 0
    everything = call(COMMAND, "--cost", CORE, "--json").json
    assert everything["reads"] > found["reads"]
    assert everything["read_bytes"] > found["read_bytes"]
    (line,) = (
        line
        for line in call(COMMAND, "-p", "1", "--cost", CORE).out.splitlines()
        if line.startswith("cost: ")
    )
    words = r"cost: \d+ reads of the kernel's memory, [\d,]+ bytes, [\d.]+m?s"
    assert re.fullmatch(words, line)
