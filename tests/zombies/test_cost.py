# SPDX-License-Identifier: LGPL-2.1-or-later

"""What one PID costs where 40,000 others are: reads of the dump, as strace counts."""

import json
import subprocess
import sys
from typing import Any

import pytest

from fixtures import lab
from tests.support.strace import reads_of

MOST_READS = 100
OPEN = """
import sys
from msatools.target import TargetSpec, open_target
open_target(TargetSpec(path=sys.argv[1], types="btf"))
"""
ZOMBIES = "import sys; from msatools.commands.zombies import main; sys.exit(main())"


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"manytasks-{request.param}")


@pytest.fixture(scope="module")
def opening(run: lab.Run) -> int:
    """Reads that it takes to open the dump."""
    assert run.elf
    return sum(reads_of([sys.executable, "-c", OPEN, run.elf], run.elf).values())


def command(run: lab.Run, pid: int) -> list[str]:
    words = [str(run.elf), "--types", "btf", "-p", str(pid), "--cost", "--json"]
    return [sys.executable, "-c", ZOMBIES, *words]


def report(run: lab.Run, pid: int) -> Any:
    done = subprocess.run(
        command(run, pid), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("what", ["first", "middle", "last", "distant"])
def test_one_task_of_many(run: lab.Run, opening: int, what: str) -> None:
    """The cost that is printed is what strace counts after the dump was opened."""
    assert run.elf
    zombies = run.workload["farm"]["zombies"]
    pid = {
        "first": zombies[0],
        "middle": zombies[len(zombies) // 2],
        "last": zombies[-1],
        "distant": run.workload["distant"]["pid"],
    }[what]
    reads = report(run, pid)["reads"]
    assert reads == sum(reads_of(command(run, pid), run.elf).values()) - opening
    assert 10 < reads <= MOST_READS


def test_one_task_whose_parent_is_blocked() -> None:
    """What the parent waits for in the end would take all tasks."""
    run = lab.build("zombies-6.12")
    verdict = "parent-blocked"
    dead = {
        one["ppid"]: one["pid"]
        for one in run.workload["zombies"]
        if one["verdict"] == verdict
    }
    assert len(dead) > 3
    for pid in dead.values():
        found = report(run, pid)
        assert [group["verdict"] for group in found["groups"]] == [verdict]
        assert found["reads"] <= MOST_READS
