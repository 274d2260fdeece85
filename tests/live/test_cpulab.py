# SPDX-License-Identifier: LGPL-2.1-or-later
"""The guests in which msa-cpus runs do what their results say, apart from msa-cpus."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest import cpuexperiment, cpureadings
from fixtures.lab.guest import cpulive as guest
from fixtures.lab.inside import RESULTS

BOTH = ["6.1", "6.12"]
SET = {4, 5, 6, 7}
"""The CPUs of the experiment's partition."""

Facts = dict[str, Any]


def results(name: str) -> Facts:
    run = lab.build(name)
    found: Facts = json.loads((run.directory / RESULTS).read_text())
    return found


@pytest.fixture(scope="module", params=BOTH)
def live(request: pytest.FixtureRequest) -> Facts:
    return results(f"cpulive-{request.param}")


# Guests of it take minutes each.
EXPERIMENTS = [pytest.param(each, marks=pytest.mark.long) for each in BOTH]


@pytest.fixture(scope="module", params=EXPERIMENTS)
def steps(request: pytest.FixtureRequest) -> dict[str, Facts]:
    found = results(f"cpuexperiment-{request.param}")["steps"]
    return {step["name"]: step for step in found}


def counts(reading: Facts, name: str) -> Counter[int]:
    """Interrupts by CPU, of all whose name matches a pattern."""
    head, *lines = reading["interrupts"]["text"].splitlines()
    online = [int(word.removeprefix("CPU")) for word in head.split()]
    total: Counter[int] = Counter()
    for line in lines:
        if re.search(name, line):
            numbers = map(int, line.partition(":")[2].split()[: len(online)])
            total.update(dict(zip(online, numbers, strict=True)))
    return total


def meanwhile(run: Facts, name: str) -> Counter[int]:
    """How many interrupts came to each CPU while a command ran."""
    first, *_, last = run["readings"]
    before = counts(first, name)
    return Counter({cpu: n - before[cpu] for cpu, n in counts(last, name).items()})


def online(reading: Facts) -> set[int]:
    found = re.findall(r"^cpu(\d+) ", reading["stat"]["text"], re.MULTILINE)
    return {int(cpu) for cpu in found}


# --- while CPUs come and go


def test_commands_end_well(live: Facts) -> None:
    assert set(live["runs"]) == set(guest.COMMANDS)
    for run in live["runs"].values():
        assert (run["status"], run["stderr"]) == (0, ""), run["argv"]


def test_files_are_read_all_the_time(live: Facts) -> None:
    for run in live["runs"].values():
        begin, end = run["start_ns"], run["end_ns"]
        for name in cpureadings.FILES:
            times = [
                reading[name][edge]
                for reading in run["readings"]
                for edge in ("from_ns", "to_ns")
            ]
            assert [begin, *times, end] == sorted([begin, *times, end])
            assert len(times) > 10


def test_each_sample_is_between_two_readings(live: Facts) -> None:
    run = live["runs"]["interval"]
    samples = [json.loads(line) for line in run["stdout"].splitlines()]
    assert len(samples) == len(run["lines"]) == int(guest.COMMANDS["interval"][-1])
    times = [sample["taken_at_ns"] for sample in samples]
    # The first interval began before the first sample.
    starts = [times[0] - samples[0]["interval_ns"], *times]
    for name in cpureadings.FILES:
        assert run["readings"][0][name]["to_ns"] < min(starts)
        assert run["readings"][-1][name]["from_ns"] > max(starts)


def test_cpu_goes_and_comes_between_samples(live: Facts) -> None:
    assert [event["online"] for event in live["events"]] == list(guest.EVENTS.values())
    run = live["runs"]["interval"]
    for event, line in zip(live["events"], guest.EVENTS, strict=True):
        assert event["from_ns"] > run["lines"][line - 1]["seen_ns"]
        assert event["to_ns"] < run["lines"][line]["seen_ns"]
    gone, back = live["events"]
    for reading in run["readings"]:
        stat = reading["stat"]
        there = guest.COMES_AND_GOES in online(reading)
        if gone["to_ns"] < stat["from_ns"] and stat["to_ns"] < back["from_ns"]:
            assert not there
        if stat["to_ns"] < gone["from_ns"] or stat["from_ns"] > back["to_ns"]:
            assert there


def test_devices_are_busy(live: Facts) -> None:
    for run in live["runs"].values():
        came = meanwhile(run, r"virtio0-input")
        assert came[guest.BUSY] > 100
        assert came.total() - came[guest.BUSY] <= 1
        assert meanwhile(run, r"nvme\dq")[guest.SENDER] > 100


# --- the experiment


def test_every_step_succeeds(steps: dict[str, Facts]) -> None:
    assert list(steps) == [step.name for step in cpuexperiment.STEPS]
    for step in steps.values():
        assert step["status"] == 0, step["output"]
        for run in step["runs"]:
            assert (run["status"], run["stderr"]) == (0, ""), run["argv"]
    assert steps["create"]["output"] == "root\n"


def test_interrupts_land_on_all_cpus_at_first(steps: dict[str, Facts]) -> None:
    for run in steps["before"]["runs"]:
        came = meanwhile(run, "virtio")
        assert all(came[cpu] > 100 for cpu in range(8))


@pytest.mark.parametrize("name", ["no-interrupts", "execute"])
def test_interrupts_keep_out_of_the_set(steps: dict[str, Facts], name: str) -> None:
    for run in steps[name]["runs"]:
        came = meanwhile(run, "virtio")
        assert all(came[cpu] > 100 for cpu in range(8) if cpu not in SET)
        # The kernel moves an interrupt when it comes next, and a device has three.
        for cpu in SET:
            assert came[cpu] <= 3, cpu
