# SPDX-License-Identifier: LGPL-2.1-or-later

"""Half of a guest's memory in a balloon: fixtures/lab/guest/fieldballoon.py."""

import re
from typing import Any

import pytest

from fixtures import lab
from msatools.memory.memstat import collect_memstat
from msatools.memory.model import MemstatReport
from msatools.program import TargetSpec, open_target
from tests.report.judged import report_of

from . import sums
from .shares import MOST, share_of

PAGE = 4096
KERNELS = ("6.1", "6.12", "7.x")


@pytest.fixture(scope="module", params=KERNELS)
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"fieldballoon-{request.param}")


@pytest.fixture(scope="module")
def memory(run: lab.Run) -> MemstatReport:
    opened = open_target(TargetSpec(path=str(run.elf), types="btf"))
    return collect_memstat(opened.prog, target=opened.target)


@pytest.fixture(scope="module")
def judged(run: lab.Run) -> dict[str, Any]:
    found: dict[str, Any] = report_of(run.name)
    return found


def test_the_balloon_has_what_the_guest_gave(
    run: lab.Run, memory: MemstatReport
) -> None:
    assert sums.pages_of(memory)["offline"] == run.workload["balloon_pages"]
    wrong = [c for c in memory.checks if c.difference and c.explained_by is None]
    assert not wrong


def test_little_is_unattributed(memory: MemstatReport) -> None:
    """Of a small machine what the kernel made at boot is the most."""
    assert share_of(memory) <= MOST


def test_parts_are_the_whole(run: lab.Run, judged: dict[str, Any]) -> None:
    """The line of memory names the balloon, and leaves nothing out."""
    line = judged["sections"]["memstat"]["summary"]
    assert "balloon" in line
    percents = [int(share) for share in re.findall(r"\((\d+) %\)", line)]
    assert 97 <= sum(percents) <= 103, line


def test_the_balloon_is_told(run: lab.Run, judged: dict[str, Any]) -> None:
    found = {x["code"]: x for x in judged["verdicts"]}
    assert {"out-of-memory", "balloon"} <= {*found}
    text = found["balloon"]["text"] + " ".join(found["balloon"]["evidence"])
    mib = run.workload["balloon_pages"] * PAGE / 2**20
    assert f"{mib:.1f} MiB" in text
    assert f"killed pid {run.workload['victim']} victim" in (
        found["out-of-memory"]["text"] + " ".join(found["out-of-memory"]["evidence"])
    )
