# SPDX-License-Identifier: LGPL-2.1-or-later

"""All commands at once, without a pause, while all that can comes and goes.

Each sample lies between two readings of what the kernel says (see
``fixtures/lab/guest/storm.py``): the last that ended before its look began, and the
first that began after it was printed. The look began after the look before it was at
its end, or, the first, when the interval began.

``-rP`` shows how many notes and retries each command had.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest.livecommands import NAMES
from fixtures.lab.guest.storm import CPU, SAMPLES, ZOMBIES
from fixtures.lab.storm import RESULTS
from msatools.cli.options import cpu_list
from tests.live.following import clocks_ns, gap_ns
from tests.support.vmstat import (
    counters,
    held_back,
)

SECOND = 10**9
RUNS = (
    *("storm-6.1", "storm-6.12"),
    *(
        pytest.param(f"stormlong-{kernel}", marks=pytest.mark.long)
        for kernel in ("6.1", "6.12")
    ),
)

PAGE_KB = 4

LOCKS = {"futex": "futex", "pi-futex": "pi_futex", "flock": "flock"}
"""What waits for locks, and of which type."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """What the kernel said at some time from one moment to another."""

    from_ns: int
    to_ns: int
    numbers: dict[str, int]
    """Of /proc/vmstat, in pages, and more."""

    online: tuple[int, ...]
    rounds: tuple[int, ...]
    processes: dict[int, int]
    """By PID when it began; empty in most readings."""

    @classmethod
    def of(cls, facts: Facts) -> "Reading":
        texts = facts["texts"]
        zones = texts["zoneinfo"]
        numbers = {**counters(texts["vmstat"], zones), "held back": held_back(zones)}
        for name, text in (("MemTotal", "meminfo"), ("processes", "stat")):
            (value,) = re.findall(rf"^{name}:? +(\d+)", texts[text], re.MULTILINE)
            numbers[name] = int(value)
        numbers["tasks"] = int(re.split(r"[ /]", texts["loadavg"])[4])
        return cls(
            facts["from_ns"],
            facts["to_ns"],
            numbers,
            tuple(cpu_list(facts["online"])),
            tuple(facts["rounds"]),
            {int(pid): begun for pid, begun in facts.get("processes", {}).items()},
        )


@dataclass(frozen=True)
class Sample:
    """One report, and the readings around it."""

    report: Facts
    began_ns: int
    seen_ns: int
    readings: list[Reading]
    """The last before it, those meanwhile, the first after it."""

    def numbers(self, *names: str) -> list[int]:
        return [sum(each.numbers[name] for name in names) for each in self.readings]

    def grown(self, name: str) -> int:
        first, *_, last = self.numbers(name)
        return last - first


class Storm:
    """What one guest left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.start: Facts = {}
        self.told: dict[str, Facts] = {}
        self.ends: dict[str, Facts] = {}
        self.readings: list[Reading] = []
        self.seen: dict[str, list[int]] = {name: [] for name in NAMES}
        for kind, facts in self._lines():
            if kind == "start":
                self.start = facts
            elif kind == "reading":
                self.readings.append(Reading.of(facts))
            elif kind == "sample":
                self.seen[facts["command"]].append(facts["seen_ns"])
            else:
                into = self.told if kind == "told" else self.ends
                into[facts["command"]] = facts

    def _lines(self) -> Iterator[tuple[str, Facts]]:
        # Of two hours, they are more than should be in memory.
        with gzip.open(self._path) as file:
            for line in file:
                facts = json.loads(line)
                yield facts.pop("kind"), facts

    def samples(self, command: str) -> Iterator[Sample]:
        before: int | None = None
        for kind, facts in self._lines():
            if kind != "sample" or facts["command"] != command:
                continue
            report, seen = json.loads(facts["line"]), facts["seen_ns"]
            taken: int = report["taken_at_ns"]
            began = taken - report["interval_ns"] if before is None else before
            before = taken
            yield Sample(report, began, seen, self._around(began, seen))

    def _around(self, began: int, seen: int) -> list[Reading]:
        first = max(n for n, r in enumerate(self.readings) if r.to_ns <= began)
        last = min(n for n, r in enumerate(self.readings) if r.from_ns >= seen)
        return self.readings[first : last + 1]


@pytest.fixture(scope="module", params=RUNS)
def storm(request: pytest.FixtureRequest) -> Storm:
    return Storm(lab.build(request.param).directory / RESULTS)


# --- all commands


@pytest.mark.parametrize("command", NAMES)
def test_it_ends_when_it_is_told(storm: Storm, command: str) -> None:
    """What loops, or waits for ever, is killed, which its status says."""
    told, end = storm.told[command], storm.ends[command]
    assert (end["status"], end["stderr"], end["rest"]) == (0, "", "")
    assert told["at_ns"] < end["at_ns"]


@pytest.mark.parametrize("command", NAMES)
def test_no_sample_is_lost(storm: Storm, command: str) -> None:
    """Each begins where the one before has ended; there are some of the storm."""
    begun = max(seen[0] for seen in storm.seen.values())
    assert sum(at > begun for at in storm.seen[command]) >= SAMPLES
    before = None
    for sample in storm.samples(command):
        report = sample.report
        assert report["schema"] == f"msatools.{command}/1"
        assert report["target"]["kind"] == "kcore"
        assert report["target"]["types"] == "btf"
        assert before is None or abs(gap_ns(before, report)) <= clocks_ns(report)
        # Its clock goes on with a tick, which a busy host may hold back.
        assert report["interval_ns"] >= 0
        assert report["taken_at_ns"] <= sample.seen_ns
        before = report


@pytest.mark.parametrize("command", NAMES)
def test_notes_and_retries(storm: Storm, command: str) -> None:
    """They are told; of what cannot be lost nothing is."""
    notes: Counter[str] = Counter()
    coverage: Counter[str] = Counter()
    samples = 0
    for sample in storm.samples(command):
        samples += 1
        coverage.update(sample.report["coverage"])
        notes.update(
            f"{note['code']}: {re.sub(r'0x[0-9a-f]+|[0-9,.]+', 'N', note['text'])}"
            for note in sample.report["notes"]
        )
    seconds = storm.ends[command]["cpu_ns"] / SECOND
    print(f"msa-{command}: {samples} samples, {seconds:.1f} s CPU")
    for what in (coverage, notes):
        for name, count in what.most_common():
            print(f"  {count:9,} {name}")
    # No task is missed, and no memory is read as what it is no more.
    assert not [name for name in notes if "the list of processes" in name]
    assert not coverage["tasks_unreadable"]
    # Memory of who ends under the look is made another's: it may say anything.
    gone = coverage["tasks_gone"] + coverage["processes_gone"]
    assert coverage["counts_broken"] <= gone


# --- msa-memstat


def test_all_pages_are_told(storm: Storm) -> None:
    for sample in storm.samples("memstat"):
        report = sample.report
        assert sum(each["pages"] for each in report["classes"]) == report["pages"]
        assert sum(each["delta_pages"] for each in report["classes"]) == 0
        assert {report["managed_pages"] * PAGE_KB} == {*sample.numbers("MemTotal")}
        (managed,) = [each for each in report["checks"] if each["name"] == "managed"]
        assert managed["difference"] == 0
        for key in ("excluded_pages", "unreadable_pages", "offline_pages"):
            assert report["coverage"][key] == 0


# --- msa-prstat

PARTS = ("user_ns", "system_ns", "latency_ns", "off_cpu_ns", "zombie_ns")


def test_parts_add_up(storm: Storm) -> None:
    for sample in storm.samples("prstat"):
        interval = sample.report["interval_ns"]
        for row in sample.report["tasks"]:
            assert sum(row[part] for part in PARTS) == row["lifetime_ns"] <= interval
            assert min(row[part] for part in PARTS) >= 0


def test_threads_that_stay_are_told_as_they_are(storm: Storm) -> None:
    for sample in storm.samples("prstat"):
        rows = {row["pid"]: row for row in sample.report["tasks"]}
        assert len(rows) == len(sample.report["tasks"])
        for kind, crowd in storm.start["crowds"].items():
            for tid in crowd["tids"]:
                row = rows[tid]
                assert (row["tgid"], row["comm"]) == (crowd["pid"], "many"), kind
                assert row["class"] == crowd["class"], kind
                assert row["lifetime_ns"] == sample.report["interval_ns"], kind


def test_all_processes_are_there(storm: Storm) -> None:
    """Those that were there before the look and are after it, and not too many."""
    there = 0
    for sample in storm.samples("prstat"):
        pids = {row["pid"] for row in sample.report["tasks"]}
        before, after = listed(storm, sample)
        same = {pid for pid, begun in before.items() if after.get(pid) == begun}
        assert same <= pids
        there += len(same)
        first, *_, last = sample.numbers("tasks")
        forks = sample.grown("processes")
        assert last - forks <= len(pids) <= first + forks
    assert there > 0


def listed(storm: Storm, sample: Sample) -> tuple[dict[int, int], dict[int, int]]:
    """The processes in the last list before a look, and in the first after it."""
    lists = [reading for reading in storm.readings if reading.processes]
    before = [each.processes for each in lists if each.to_ns <= sample.began_ns]
    after = [each.processes for each in lists if each.from_ns >= sample.seen_ns]
    # The last reading of all need not have one.
    return before[-1], after[0] if after else {}


# --- msa-zombies


def test_zombies_that_stay_are_told_as_they_are(storm: Storm) -> None:
    for sample in storm.samples("zombies"):
        zombies = {each["pid"]: each for each in sample.report["zombies"]}
        groups = {each["ppid"]: each for each in sample.report["groups"]}
        for parent in storm.start["parents"]:
            told = [zombies[pid] for pid in parent["zombies"]]
            assert len(told) == ZOMBIES
            assert {(each["ppid"], each["verdict"]) for each in told} == {
                (parent["pid"], parent["verdict"])
            }
            group = groups[parent["pid"]]
            assert sorted(group["pids"]) == parent["zombies"]
            assert (group["verdict"], group["delta"]) == (parent["verdict"], 0)


# --- msa-locks


def test_waiters_that_stay_are_told_as_they_are(storm: Storm) -> None:
    crowds = storm.start["crowds"]
    for sample in storm.samples("locks"):
        report = sample.report
        locks = {lock["id"]: lock for lock in report["locks"]}
        waits = {wait["pid"]: wait for wait in report["waits"]}
        assert report["deadlocks"] == []
        for kind, type_ in LOCKS.items():
            crowd = crowds[kind]
            for tid in crowd["tids"]:
                lock = locks[waits[tid]["lock"]]
                assert (lock["type"], tid in lock["waiters"]) == (type_, True), kind
                if kind != "futex":
                    assert [own["pid"] for own in lock["owners"]] == [crowd["pid"]]
        for lock in report["locks"]:
            assert set(lock["waiters"]) <= waits.keys(), lock
            exact = {o["pid"] for o in lock["owners"] if o["confidence"] == "exact"}
            assert exact.isdisjoint(lock["waiters"]), lock


# --- msa-cpus


def test_cpus_that_are_there(storm: Storm) -> None:
    """What is told to be online was so at some time of the look."""
    certain = 0
    for sample in storm.samples("cpus"):
        online = tuple(row["cpu"] for row in sample.report["cpus"] if row["online"])
        was = {reading.online for reading in sample.readings}
        at = storm.start["storm"].index("cpu")
        changes = {reading.rounds[at] for reading in sample.readings}
        if len(was) == len(changes) == 1:
            certain += 1
            assert {online} == was
        else:
            assert online in ((0,), (0, CPU))
    print(f"msa-cpus: {certain} samples in which no CPU came or went")


def test_counters_never_fall(storm: Storm) -> None:
    columns = ("minf", "mjf", "xcal", "tlb", "intr", "soft", "csw")
    times = ("usr_ns", "sys_ns", "irq_ns", "st_ns", "idl_ns", "wt_ns")
    for sample in storm.samples("cpus"):
        for row in sample.report["cpus"]:
            for column in (*columns, *times):
                assert row[column] is None or row[column] >= 0, (row["cpu"], column)
        (one,) = [row for row in sample.report["cpus"] if row["cpu"] == 0]
        assert None not in [one[column] for column in ("csw", "intr", "usr_ns")]
