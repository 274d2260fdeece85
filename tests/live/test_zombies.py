# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-zombies on a kernel that runs, over QMP, while zombies come and go.

The parents of some die, or reap them, between any two reads; others stay for ever; one
parent gets more of them, no faster than it is known to (``fixtures/lab/guest/race.c``).
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from msatools.kernel.pids import NoSuchPidError
from msatools.program import Opened, TargetSpec, open_target
from msatools.zombies.model import ZombiesOptions, ZombiesReport
from msatools.zombies.zombies import Zombies
from tests.support.usage import free_programs

LOOKS = 200
INTERVALS = 3
MSA_ZOMBIES = Path(sys.executable).with_name("msa-zombies")
PASSING = "reap", "orphan"
"""The names of those whose zombies come and go."""


@pytest.fixture(scope="module")
def race() -> Iterator[lab.Live]:
    with lab.live("zombierace-6.12") as guest:
        yield guest


def opened(guest: lab.Live) -> Opened:
    free_programs()
    return open_target(TargetSpec(qemu=str(guest.qmp), types="btf"))


def looking_at(kernel: Opened, **options: Any) -> Zombies:
    return Zombies(kernel.prog, kernel.target, ZombiesOptions(**options))


def look(session: Zombies) -> ZombiesReport:
    return session.report(lambda done, total: None)


def run(guest: lab.Live, *words: str) -> list[dict[str, Any]]:
    """The reports of a command that succeeds and has nothing to complain of."""
    free_programs()
    done = subprocess.run(
        [MSA_ZOMBIES, "--qemu", guest.qmp, "--types", "btf", "--json", *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_many_looks(race: lab.Live) -> None:
    """Those that stay are always told, as they are; of the others none as staying."""
    stay = race.workload["stay"]
    expected = {
        pid: (each["verdict"], each["pid"]) for each in stay for pid in each["zombies"]
    }
    fill = race.workload["fill"]["pid"]
    session = looking_at(opened(race))
    passed: set[int] = set()
    reaped = 0
    filled: set[int] = set()
    for _ in range(LOOKS):
        report = look(session)
        zombies = {zombie.pid: zombie for zombie in report.zombies}
        found = {pid: zombies[pid] for pid in expected if pid in zombies}
        assert expected == {
            pid: (zombie.verdict, zombie.ppid) for pid, zombie in found.items()
        }
        by_parent = {group.ppid: group for group in report.groups}
        for each in stay:
            assert sorted(by_parent[each["pid"]].pids) == each["zombies"]
            assert by_parent[each["pid"]].verdict == each["verdict"]
        others = zombies.keys() - expected.keys()
        assert {zombies[pid].comm for pid in others} <= {"fill", *PASSING}
        before = filled
        filled = {pid for pid in others if zombies[pid].comm == "fill"}
        assert {zombies[pid].ppid for pid in filled} <= {fill}
        # It may sleep in fork(), as those do that wait to be let into their group.
        verdicts = {zombies[pid].verdict for pid in filled}
        assert verdicts <= {"never-waits", "parent-blocked"}
        # Among these in the list of all processes are those that come and go.
        assert filled >= before
        passed |= others - filled
        reaped += report.coverage.get("zombies_reaped", 0)
    # Else the test would prove nothing.
    assert min(len(passed), reaped) > 0


@pytest.fixture(scope="module")
def timed(race: lab.Live) -> tuple[list[dict[str, Any]], float]:
    """Reports of intervals, and the seconds that the command took."""
    start = time.monotonic()
    reports = run(race, "1", str(INTERVALS))
    return reports, time.monotonic() - start


def test_interval(race: lab.Live, timed: tuple[list[dict[str, Any]], float]) -> None:
    """Who is dead now and was not then, and who is there no more."""
    fill, stay = race.workload["fill"], race.workload["stay"]
    intervals, seconds = timed
    assert len(intervals) == INTERVALS
    before = None
    grown_in_all = 0
    for report in intervals:
        changes, passing = report["changes"], passing_in(report)
        if before is not None:
            counts, then = (counts_of(each, fill["pid"]) for each in (report, before))
            grown = counts.total() - then.total()
            grown_in_all += grown
            assert changes["begun"] >= grown
            for group in report["groups"]:
                if group["ppid"] == fill["pid"]:
                    verdict = group["verdict"]
                    assert group["delta"] == counts[verdict] - then[verdict]
            more = len(report["zombies"]) - len(before["zombies"])
            assert changes["begun"] - changes["reaped"] == more
            # Nobody counts twice, and of those that come and go none is there again.
            assert changes["begun"] == grown + len(passing - passing_in(before))
            assert changes["reaped"] == len(passing_in(before) - passing)
        for each in stay:
            (group,) = (g for g in report["groups"] if g["ppid"] == each["pid"])
            assert group["delta"] == 0
        before = report
    # A guest that has few of the machine's CPUs is slower, but no faster.
    assert 0 < grown_in_all <= fill["rate"] * seconds + 1
    # Else the test would prove little.
    assert sum(report["changes"]["reaped"] for report in intervals) > 0


def test_when_limits_will_be_hit(
    race: lab.Live, timed: tuple[list[dict[str, Any]], float]
) -> None:
    """At the rate of the interval: of what the one that gets more has to itself."""
    fill, (intervals, _) = race.workload["fill"], timed
    scopes = {
        "RLIMIT_NPROC": (f"uid {fill['uid']}", fill["max_processes"]),
        "pids.max": (fill["cgroup"], fill["max_tasks"]),
    }
    for before, report in pairwise(intervals):
        for name, (scope, most) in scopes.items():
            then, now = (limit_of(each, name, scope) for each in (before, report))
            assert now["max"] == most
            # The parent itself counts, those made before the next report, and one more
            # that may live still.
            fewest, more = (
                counts_of(each, fill["pid"]).total() for each in (before, report)
            )
            assert fewest + 1 <= then["used"] <= more + 2
            grown = now["used"] - then["used"]
            assert grown > 0
            left_ns = (most - now["used"]) * report["interval_ns"] // grown
            assert now["left_ns"] == left_ns
        left = [each["left_ns"] for each in report["limits"] if "left_ns" in each]
        assert left == sorted(left)
        assert [each["first"] for each in report["limits"]].index(True) == 0


def limit_of(report: dict[str, Any], name: str, scope: str) -> dict[str, Any]:
    (limit,) = [
        each
        for each in report["limits"]
        if each["name"] == name and each["scope"].startswith(scope)
    ]
    return dict(limit)


def counts_of(report: dict[str, Any], parent: int) -> Counter[str]:
    """Count the zombies of a parent by verdict."""
    groups = (group for group in report["groups"] if group["ppid"] == parent)
    return Counter({group["verdict"]: group["count"] for group in groups})


def passing_in(report: dict[str, Any]) -> set[int]:
    return {each["pid"] for each in report["zombies"] if each["comm"] in PASSING}


def test_one_that_comes_and_goes(race: lab.Live) -> None:
    """By the time that it is looked up it may be gone, or be another's number."""
    kernel = opened(race)
    whole = looking_at(kernel)
    pids: list[int] = []
    while not pids:
        pids = [each.pid for each in look(whole).zombies if each.comm in PASSING]
    gone = 0
    for pid in pids:
        one = looking_at(kernel, pids=(pid,))
        for _ in range(LOOKS):
            try:
                report = look(one)
            except NoSuchPidError:
                gone += 1
                break
            assert report.asked is not None
            assert report.asked[0].pid == pid
    # Else the test would prove nothing.
    assert gone > 0
