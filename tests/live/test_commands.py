# SPDX-License-Identifier: LGPL-2.1-or-later

"""All commands inside of a guest, on the /proc/kcore of the kernel it runs on.

How each begins and ends (``fixtures/lab/guest/livemanners.py``), and msa-zombies
against the dead of /proc. For the others see test_kcore.py, test_prstat.py,
test_locks.py and, of a guest of its own, test_cpus.py.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest import livezombies
from fixtures.lab.guest.livecommands import NAMES
from fixtures.lab.inside import RESULTS
from tests.live.following import clocks_ns, gap_ns

Facts = dict[str, Any]
KERNELS = ("6.1", "6.12")
MIB = 1 << 20
SCHEMA = "msatools.{}/1"
LATE_NS = 500_000_000
"""How late a tick may come to the coarse clock by which a report is taken."""


@dataclass(frozen=True)
class Guest:
    """What the commands in one guest did."""

    release: str
    facts: Facts

    def run(self, case: str, name: str) -> Facts:
        """One command in a case of ``livemanners``."""
        found: Facts = self.facts["manners"][case][name]
        assert found["acted"]
        return found

    def reports(self, part: str, name: str) -> list[Facts]:
        command = self.facts[part]["commands"][name]
        assert (command["status"], command["stderr"]) == (0, "")
        return [json.loads(line) for line in command["stdout"].splitlines()]


@pytest.fixture(scope="module", params=KERNELS)
def guest(request: pytest.FixtureRequest) -> Guest:
    run = lab.build(f"kcore-{request.param}")
    return Guest(run.release, json.loads((run.directory / RESULTS).read_text()))


every_command = pytest.mark.parametrize("name", NAMES)


# --- what they print


def outputs(guest: Guest, name: str) -> tuple[Facts, Facts]:
    """A command that ran without an interval, and with one."""
    facts = guest.facts
    runs: dict[str, tuple[Facts, str]] = {
        "memstat": (facts["commands"], "json"),
        "prstat": (facts["live"]["commands"], "once"),
        "locks": (facts["locks"]["commands"], "all"),
        "zombies": (facts["zombies"]["commands"], "once"),
        "cpus": (facts["cpus"], "once"),
    }
    found, once = runs[name]
    return found[once], found["interval"]


@every_command
def test_json(guest: Guest, name: str) -> None:
    """One object of all, and three of intervals that follow one another."""
    once, interval = outputs(guest, name)
    for run in (once, interval):
        assert (run["status"], run["stderr"]) == (0, "")
    reports = [json.loads(line) for line in interval["stdout"].splitlines()]
    assert len(reports) == 3
    (report,) = [json.loads(line) for line in once["stdout"].splitlines()]
    for each in (report, *reports):
        assert each["schema"] == SCHEMA.format(name)
        target = each["target"]
        assert (target["path"], target["kind"]) == ("/proc/kcore", "kcore")
        assert (target["live"], target["release"]) == (True, guest.release)
        assert target["types"] == "btf"
        assert "samples-lost" not in {note["code"] for note in each["notes"]}
    assert report["interval_ns"] is None
    assert "cost" not in report
    assert once["start_ns"] < report["taken_at_ns"] < once["end_ns"]
    first, *_, last = reports
    assert interval["start_ns"] < first["taken_at_ns"] - first["interval_ns"]
    assert last["taken_at_ns"] < interval["end_ns"]
    for each in reports:
        check_cost(each["cost"])
    for before, after in pairwise(reports):
        assert abs(gap_ns(before, after)) <= clocks_ns(after)


def check_cost(cost: Facts) -> None:
    """Of one sample: time of one thread, and memory of a program with numpy."""
    assert cost["cpu_ns"] > 0
    assert cost["elapsed_ns"] > 0
    assert 10 * MIB < cost["peak_bytes"] < 500 * MIB


def check_text(guest: Guest, text: str) -> None:
    """A report for people: its first line says what was looked at."""
    head = rf"{re.escape(guest.release)}  live  types: btf(  .*)?"
    assert re.fullmatch(head, text.splitlines()[0])
    assert len(text.splitlines()) > 2
    assert "\x1b" not in text
    assert "Traceback" not in text


@every_command
def test_text(guest: Guest, name: str) -> None:
    """Without a target. (For how it is with /proc/kcore named see further down.)"""
    run = guest.run("text", name)
    assert (run["status"], run["stderr"]) == (0, "")
    check_text(guest, run["stdout"])


# --- what they say when they cannot


ERRORS = {
    "nobody": r"/proc/kcore: permission denied; run as root",
    "no-capability": r"/proc/kcore: permission denied, even to root; run outside .+",
    "masked": r"/proc/kcore: something else is mounted over it, .+; run outside .+",
    "no-kcore": r"/proc/kcore: no such file; .+ name a dump instead",
    "no-proc": r"/proc/kcore: /proc is not mounted; mount it: mount -t proc proc /proc",
    "locked": r"/proc/kcore: the kernel is locked down \(confidentiality\); boot it .+",
}
"""What follows the name of the command: what, why, and what to do."""


@every_command
@pytest.mark.parametrize("case", ERRORS)
def test_error(guest: Guest, case: str, name: str) -> None:
    run = guest.run(case, name)
    assert (run["status"], run["stdout"]) == (1, "")
    assert re.fullmatch(rf"msa-{name}: {ERRORS[case]}\n", run["stderr"])


# --- how they end


@every_command
def test_interrupted_text(guest: Guest, name: str) -> None:
    """Ctrl-C ends a run with an interval, after whole samples.

    So does SIGTERM, one of JSON: see test_hotplug.py.
    """
    run = guest.run("interval-int", name)
    assert (run["status"], run["stderr"]) == (0, "")
    samples = re.split(r"^\d\d:\d\d:\d\d\n", run["stdout"], flags=re.MULTILINE)
    assert samples[0] == ""
    assert len(samples) > 1
    for sample in samples[1:]:
        check_text(guest, sample)
        assert re.match(rf"msa-{name}: [\d.]+ s CPU, ", sample.splitlines()[-1])


# --- the dead


@dataclass(frozen=True)
class Dead:
    """A report of msa-zombies, and what /proc said before it and after."""

    report: Facts
    stage: dict[int, list[Any]]
    before: dict[int, list[Any]] | None
    """When its interval began; None if it has none."""

    def ours(self, facts: Facts) -> set[int]:
        """The PIDs of all that the workload has made; orphans of others are not."""
        made = {entry["pid"] for entry in facts["stay"]}
        busy, dies = facts["parents"]["busy"], facts["parents"]["dies"]
        first = {int(pid): each for pid, each in facts["stages"][0].items()}
        made |= {pid for pid, (_, ppid, *_) in first.items() if ppid == dies} | {dies}
        made |= {pid for pid, (_, ppid, *_) in self.stage.items() if ppid == busy}
        return made & self.stage.keys()


def stages(guest: Guest) -> list[dict[int, list[Any]]]:
    return [
        {int(pid): each for pid, each in stage.items()}
        for stage in guest.facts["zombies"]["stages"]
    ]


@pytest.fixture
def dead(guest: Guest) -> list[Dead]:
    """The one-shot report, and those of the intervals."""
    found = stages(guest)
    (once,) = guest.reports("zombies", "once")
    reports = guest.reports("zombies", "interval")
    assert len(reports) == livezombies.COUNT == len(found) - 1
    befores = [found[0], *found]
    return [
        Dead(once, found[0], None),
        *(
            Dead(report, stage, before)
            for report, stage, before in zip(reports, found, befores, strict=False)
        ),
    ]


def test_zombies_are_those_of_proc(guest: Guest, dead: list[Dead]) -> None:
    """Name, parent and exit code, of each and of no other."""
    facts = guest.facts["zombies"]
    for each in dead:
        ours = each.ours(facts)
        parents = {facts["parents"][name] for name in ("busy", "dies")}
        found = {
            zombie["pid"]: [zombie["comm"], zombie["ppid"], zombie["exit_code"]]
            for zombie in each.report["zombies"]
            if zombie["pid"] in ours or zombie["ppid"] in parents
        }
        expected = {pid: each.stage[pid][:3] for pid in ours}
        assert found == expected
    assert min(len(each.stage) for each in dead) > 15


def test_verdicts_are_those_that_were_made(guest: Guest, dead: list[Dead]) -> None:
    facts = guest.facts["zombies"]
    expected = {entry["pid"]: entry["verdict"] for entry in facts["stay"]}
    assert len({*expected.values()}) == len(livezombies.CASES)
    busy = facts["parents"]["busy"]
    for each in dead:
        found = {zombie["pid"]: zombie for zombie in each.report["zombies"]}
        assert {pid: found[pid]["verdict"] for pid in expected} == expected
        of_busy = {z["verdict"] for z in found.values() if z["ppid"] == busy}
        assert of_busy == {"never-waits"}


def test_advice_mends_what_it_says(guest: Guest) -> None:
    """Followed in the guest: they are reaped, or what kept them is no more.

    Where a parent can reap them only then, it may have another flaw.
    """
    advised = guest.facts["zombies"]["advised"]
    wrong = {}
    for group in advised:
        if "reaps them" in group["advice"]:
            mended = not group["left"]
        elif "does not reap" in group["advice"]:
            mended = bool(group["left"])
        else:
            assert "reap them" in group["advice"] or "may go on" in group["advice"]
            mended = group["verdict"] not in group["then"].values()
        if not mended:
            wrong[group["verdict"], group["advice"]] = group["then"]
    assert wrong == {}
    assert len({group["verdict"] for group in advised}) > 4


def test_what_an_interval_changes(guest: Guest, dead: list[Dead]) -> None:
    """Who has died, who was reaped, and how many more each parent has."""
    changes = []
    for each in dead[1:]:
        assert each.before is not None
        now, then = each.stage.keys(), each.before.keys()
        begun, reaped = len(now - then), len(then - now)
        assert each.report["changes"] == {"begun": begun, "reaped": reaped}
        changes.append((begun, reaped))
        of_now = Counter(ppid for _, ppid, *_ in each.stage.values())
        of_then = Counter(ppid for _, ppid, *_ in each.before.values())
        for group in each.report["groups"]:
            ppid = group["ppid"]
            if len([g for g in each.report["groups"] if g["ppid"] == ppid]) == 1:
                assert group["delta"] == of_now[ppid] - of_then[ppid]
    # 4 more and 1 less; then 6 less, 1 more, and a parent that dies.
    assert changes == [(0, 0), (4, 1), (2, 6)]


def test_ages_of_the_dead(guest: Guest, dead: list[Dead]) -> None:
    """They ended between the order to do so and when that was seen."""
    for each in dead:
        found = {zombie["pid"]: zombie for zombie in each.report["zombies"]}
        for entry in guest.facts["zombies"]["stay"]:
            zombie = found[entry["pid"]]
            ended = each.report["taken_at_ns"] - zombie["age_ns"]
            if zombie["age_bound"] == "exact":
                assert entry["told_ns"] - LATE_NS <= ended
                assert ended <= entry["exited_ns"] + LATE_NS
