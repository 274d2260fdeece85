# SPDX-License-Identifier: LGPL-2.1-or-later

"""All commands inside of a guest, while memory and CPUs come and go."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest import hotplug as guest
from fixtures.lab.inside import RESULTS
from tests.live.following import clocks_ns, gap_ns

Facts = dict[str, Any]

PAGE_KB = 4
BLOCK_PAGES = guest.BLOCK_MIB * 1024 // PAGE_KB
STEPS = ("start", "add", "offline", "move", "remove")
LATER = STEPS[1:]
"""When tasks are there whose structures lie in memory that was added."""


@dataclass(frozen=True)
class Session:
    """What all commands did in one guest."""

    commands: dict[str, Facts]
    samples: dict[str, list[Facts]]
    """Of each command, all that it printed."""

    steps: dict[str, Facts]
    made: dict[str, int]
    struct_pages: list[str]

    def sample(self, command: str, step: str) -> Facts:
        """The first that was begun when a step was done, before the next."""
        return self.samples[command][self.steps[step]["samples"][command]["sample"]]

    def blocks(self, step: str) -> dict[int, str]:
        """The state of each block of memory after a step."""
        blocks = self.steps[step]["reading"]["blocks"]
        return {int(name.removeprefix("memory")): blocks[name] for name in blocks}

    def online_pages(self, step: str) -> int:
        """Pages of blocks that are online, beyond those of the start."""
        blocks, first = self.blocks(step), self.blocks("start")
        states = [blocks[number] for number in blocks if number not in first]
        return BLOCK_PAGES * states.count("online")

    def offline_pages(self, step: str) -> int:
        return BLOCK_PAGES * [*self.blocks(step).values()].count("offline")

    def changes(self) -> Iterator[tuple[Facts, Facts]]:
        """Each step, and the one after it."""
        yield from pairwise(self.steps[name] for name in STEPS)


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def session(request: pytest.FixtureRequest) -> Session:
    run = lab.build(f"hotplug-{request.param}")
    results = json.loads((run.directory / RESULTS).read_text())
    commands = results["commands"]
    samples = {
        name: [json.loads(line) for line in command["stdout"].split("\n")[:-1]]
        for name, command in commands.items()
    }
    steps = {step["name"]: step for step in results["steps"]}
    assert (*steps,) == STEPS
    for name in commands:
        notes = [n for each in samples[name] for n in each["notes"]]
        print(f"{name}: {len(samples[name])} samples, {len(notes)} notes")
        for note in {note["text"] for note in notes}:
            print(f"  {note}")
    return Session(commands, samples, steps, results["made"], results["struct_pages"])


@pytest.mark.parametrize("name", guest.COMMANDS)
def test_ends_well(session: Session, name: str) -> None:
    command = session.commands[name]
    assert (command["status"], command["stderr"]) == (0, "")
    # SIGTERM does not cut a sample in two.
    assert command["stdout"].endswith("}\n")


@pytest.mark.parametrize("name", guest.COMMANDS)
def test_intervals_follow_each_other(session: Session, name: str) -> None:
    for before, after in pairwise(session.samples[name]):
        gap, apart = gap_ns(before, after), clocks_ns(after)
        # One that was lost, as all that was read moved, leaves a gap, and is told.
        if any(note["code"] == "interval-lost" for note in after["notes"]):
            assert gap > apart
        else:
            assert abs(gap) <= apart


def test_the_table_of_segments_changes(session: Session) -> None:
    """In both ways: it has more and fewer segments, and all of them move."""
    tables = {name: session.steps[name]["reading"]["kcore"] for name in STEPS}
    segments = [tables[name]["segments"] for name in STEPS]
    assert segments[1] == segments[0] + 4
    assert segments[2] == segments[1] < segments[3]
    assert segments[4] == segments[3] - 2
    offsets = [tables[name]["first_offset"] for name in STEPS]
    assert len({*offsets[:3]}) == 1
    assert offsets[3] == offsets[2] + guest.PAGE


def test_what_is_gone_is_zeros(session: Session) -> None:
    """No error says so: who has the file open must look at the table again."""
    assert session.struct_pages == ["something", "zeros"]


@pytest.mark.parametrize("step", STEPS)
def test_pages_are_those_that_are_online(session: Session, step: str) -> None:
    report = session.sample("memstat", step)
    first = session.sample("memstat", "start")
    assert report["pages"] - first["pages"] == session.online_pages(step)
    assert sum(each["pages"] for each in report["classes"]) == report["pages"]
    coverage = report["coverage"]
    assert coverage["offline_pages"] == session.offline_pages(step)
    assert (coverage["excluded_pages"], coverage["unreadable_pages"]) == (0, 0)


@pytest.mark.parametrize("step", STEPS)
def test_managed_pages(session: Session, step: str) -> None:
    report = session.sample("memstat", step)
    said = session.steps[step]["reading"]["meminfo"]
    total = re.search(r"^MemTotal: +(\d+) kB$", said, re.MULTILINE)
    assert total
    assert report["managed_pages"] * PAGE_KB == int(total[1])
    check = next(each for each in report["checks"] if each["name"] == "managed")
    assert check["difference"] == 0


@pytest.mark.parametrize("step", STEPS)
def test_sections(session: Session, step: str) -> None:
    """A section is as large as a block, and has its number."""
    sections = session.sample("memstat", step)["sections"]
    assert {each["nr"]: each["state"] for each in sections} == session.blocks(step)


def test_meanwhile_pages_are_those_before_or_after(session: Session) -> None:
    reports = session.samples["memstat"]
    first = session.sample("memstat", "start")["pages"]
    seen = 0
    for before, after in session.changes():
        counts = [session.online_pages(step["name"]) for step in (before, after)]
        number = before["samples"]["memstat"]["sample"]
        until = after["samples"]["memstat"]["sample"]
        for report in reports[number : until + 1]:
            assert min(counts) <= report["pages"] - first <= max(counts)
            assert sum(each["pages"] for each in report["classes"]) == report["pages"]
            seen += 1
    assert seen >= 2 * len(LATER)


@pytest.mark.parametrize("step", STEPS)
def test_cpus(session: Session, step: str) -> None:
    rows = session.sample("cpus", step)["cpus"]
    online = session.steps[step]["reading"]["online"]
    assert [row["cpu"] for row in rows if row["online"]] == (
        [0] if online == "0" else [0, 1]
    )
    assert online == ("0" if step == "add" else "0-1")


@pytest.mark.parametrize("step", LATER)
def test_tasks_in_memory_that_was_added(session: Session, step: str) -> None:
    made = session.made
    tasks = {task["pid"]: task for task in session.sample("prstat", step)["tasks"]}
    classes = {name: tasks[pid]["class"] for name, pid in made.items()}
    assert classes == {"holder": "SIG", "sleeper": "SIG", "zombie": "ZMB"} | {
        "waiter": "FLK"
    }
    assert {tasks[pid]["comm"] for pid in made.values()} == made.keys()
    zombies = session.sample("zombies", step)["zombies"]
    assert (made["zombie"], 1) in {(each["pid"], each["ppid"]) for each in zombies}
    locks = session.sample("locks", step)
    (wait,) = [each for each in locks["waits"] if each["pid"] == made["waiter"]]
    (lock,) = [each for each in locks["locks"] if each["id"] == wait["lock"]]
    assert lock["type"] == "flock"
    assert [owner["pid"] for owner in lock["owners"]] == [made["holder"]]


@pytest.mark.parametrize("name", guest.COMMANDS)
@pytest.mark.parametrize("step", STEPS)
def test_nothing_is_lost(session: Session, name: str, step: str) -> None:
    """Once a step is done; lists of tasks that end may break off at any time."""
    sample = session.sample(name, step)
    unreadable = {
        key: count
        for key, count in sample["coverage"].items()
        if key.endswith(("_unreadable", "_lost")) and count
    }
    assert unreadable == {}
