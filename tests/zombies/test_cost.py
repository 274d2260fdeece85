# SPDX-License-Identifier: LGPL-2.1-or-later

"""What one PID costs where 40,000 others are: reads of the dump, as strace counts."""

import json
import subprocess
import sys

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
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(kernel: str) -> lab.Run:
    return lab.build(f"manytasks-{kernel}")


def command(run: lab.Run, pid: int) -> list[str]:
    return [sys.executable, "-c", ZOMBIES, *words(run, pid)]


def words(run: lab.Run, pid: int) -> list[str]:
    return [str(run.elf), "--types", "btf", "-p", str(pid), "--cost", "--json"]


@pytest.mark.parametrize("what", ["first", "middle", "last", "distant"])
def test_one_task_of_many(run: lab.Run, what: str) -> None:
    """The cost that is printed is what strace counts after the dump was opened."""
    assert run.elf
    zombies = run.workload["farm"]["zombies"]
    pid = {
        "first": zombies[0],
        "middle": zombies[len(zombies) // 2],
        "last": zombies[-1],
        "distant": run.workload["distant"]["pid"],
    }[what]
    opening = sum(reads_of([sys.executable, "-c", OPEN, run.elf], run.elf).values())
    done = subprocess.run(
        command(run, pid), stdout=subprocess.PIPE, text=True, check=True
    )
    told = json.loads(done.stdout)["reads"]
    counted = sum(reads_of(command(run, pid), run.elf).values()) - opening
    assert told == counted
    assert 10 < told <= MOST_READS


def test_one_task_whose_parent_is_blocked(kernel: str) -> None:
    """What the parent waits for in the end would take all tasks."""
    run = lab.build(f"zombies-{kernel}")
    blocked = [z for z in run.workload["zombies"] if z["verdict"] == "parent-blocked"]
    assert len({zombie["ppid"] for zombie in blocked}) > 3
    for zombie in blocked:
        done = subprocess.run(
            command(run, zombie["pid"]), stdout=subprocess.PIPE, text=True, check=True
        )
        told = json.loads(done.stdout)
        assert [group["verdict"] for group in told["groups"]] == ["parent-blocked"]
        assert told["reads"] <= MOST_READS
