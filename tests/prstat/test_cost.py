# SPDX-License-Identifier: LGPL-2.1-or-later

"""Reads of the dump for one PID among 40,000, counted by strace."""

import sys
from pathlib import Path

import pytest

from fixtures import lab
from tests.support.strace import reads_of

pytestmark = pytest.mark.long

MOST_READS = 100
"""Maximum reads after opening, for a process with few threads."""

OPEN = """
import sys
from msatools.program import TargetSpec, open_target
open_target(TargetSpec(path=sys.argv[1], types="btf"))
"""
PRSTAT = "import sys; from msatools.console import prstat; sys.exit(prstat())"


pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"manytasks-{request.param}")


@pytest.fixture(scope="module")
def opening(run: lab.Run) -> int:
    assert run.elf
    return reads([OPEN], run.elf)


def reads(words: list[str], dump: Path) -> int:
    code, *rest = words
    return sum(reads_of([sys.executable, "-c", code, str(dump), *rest], dump).values())


@pytest.mark.parametrize("what", ["zombie", "parent", "distant", "init", "kthreadd"])
@pytest.mark.parametrize("view", [[], ["-mL"]], ids=["processes", "threads"])
def test_reads_of_one_pid(
    run: lab.Run, opening: int, what: str, view: list[str]
) -> None:
    workload = run.workload
    pid = {
        "zombie": workload["farm"]["zombies"][10_000],
        "parent": workload["farm"]["pid"],
        "distant": workload["distant"]["pid"],
        "init": 1,
        "kthreadd": 2,
    }[what]
    assert run.elf
    words = [PRSTAT, "--types", "btf", "-p", str(pid), *view]
    assert 10 < reads(words, run.elf) - opening <= MOST_READS
