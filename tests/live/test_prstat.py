# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-prstat inside of a guest, on the kernel it runs on, and what /proc said.

Each interval lies between two readings of /proc: one that ended before it began, and
one that began after it ended. Within it lie two more. What a task has done in the
interval is not less than what it did between the inner two, nor more than between the
outer two.

/proc counts time on the CPU up to the task's last tick or switch. However late an
emulated CPU's tick is: once the count has grown again, all from before is in it.

A look reads a task before it reads the clocks. A task that runs or waits for a CPU
then is taken to have done so until the clocks were read, which is at most as long as
the look took.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest.cases import LOOKS
from fixtures.lab.guest.live import COUNT, INTERVAL
from fixtures.lab.inside import RESULTS

SECOND = 10**9
HOGS = ("hog-0", "hog-1", "hog-2")
STEADY = {"never": "SIG", "sleeper": "TMR", "stopped": "STP"}
"""Tasks that do not run at all, and their class."""

RUNNABLE = {"CPU", "LAT"}
UNTOLD = "classes_untold"
"""Of coverage: looks that a task has moved on under."""

SLEEPS = {
    "ponger": {"LCK"},
    "poller": {"POL"},
    "pipe-reader": {"PIP"},
    "pinger": {"TMR"},
    "pipe-writer": {"TMR"},
    "turns-fast": {"LCK", "TMR"},
    "turns-slow": {"LCK", "TMR"},
}
"""Tasks that run often, and the classes in which they sleep, by turns."""


@dataclass
class Watched:
    """One interval, and the readings around it."""

    report: dict[str, Any]
    tasks: dict[str, int]
    readings: list[dict[str, Any]]
    start_ns: int
    """When the command was started."""

    begin_look_ns: int = 0
    """How long the look took, at most, with which its interval began. A look ends with
    the clocks, so that each task was seen at some time before."""

    ran_before: frozenset[str] = frozenset()
    """Who may have run, or waited for a CPU, when it began."""

    @property
    def look_ns(self) -> int:
        """The same of the look with which it ended."""
        if "cost" not in self.report:
            return self.end_ns - self.start_ns
        return int(self.report["cost"]["elapsed_ns"])

    @property
    def end_ns(self) -> int:
        return int(self.report["taken_at_ns"])

    @property
    def bound_ns(self) -> int:
        """How far the clocks of this kernel may be apart, as the report says."""
        return int(self.report["bound_ns"])

    @property
    def begin_ns(self) -> int:
        return self.end_ns - int(self.report["interval_ns"] or 0)

    def row(self, name: str) -> dict[str, Any]:
        (row,) = [row for row in self.report["tasks"] if row["pid"] == self.tasks[name]]
        return dict(row)

    def before(self, at_ns: int) -> dict[str, Any]:
        return [r for r in self.readings if r["to_ns"] < at_ns][-1]

    def after(self, at_ns: int) -> dict[str, Any]:
        return next(r for r in self.readings if r["from_ns"] > at_ns)

    def counted_up_to(self, at_ns: int, name: str) -> int:
        """Read the time on the CPU when all from before a moment was counted.

        If the count does not grow any more, the task has left the CPU, or its CPU has
        had no tick up to the last reading.
        """
        counts = [
            counters(reading["tasks"][name])["cpu_ns"]
            for reading in self.readings
            if reading["from_ns"] > at_ns
        ]
        return next((count for count in counts if count > counts[0]), counts[0])

    def most(self, name: str, counter: str) -> int:
        """Read a counter when it was no less than at the end."""
        if counter == "cpu_ns":
            return self.counted_up_to(self.end_ns, name)
        return counters(self.after(self.end_ns)["tasks"][name])[counter]

    def between(self, name: str, counter: str) -> tuple[int, int]:
        """How much a counter has grown: at least, and at most."""

        def value(reading: dict[str, Any]) -> int:
            return counters(reading["tasks"][name])[counter]

        begin_ns, end_ns = self.begin_ns, self.end_ns
        begun_ns = begin_ns - self.begin_look_ns
        start = value(self.after(begin_ns))
        if counter == "cpu_ns":
            start = self.counted_up_to(begin_ns, name)
        least = value(self.before(end_ns - self.look_ns)) - start
        most = self.most(name, counter) - value(self.before(begun_ns))
        return least, most

    def slack_ns(self, name: str) -> int:
        """How far times on the CPU, and waiting for one, may be off."""
        slack = self.bound_ns
        if self.row(name)["class"] in RUNNABLE:
            slack += self.look_ns
        if name in self.ran_before:
            slack += self.begin_look_ns
        return slack


def counters(texts: dict[str, str]) -> dict[str, int]:
    run, wait, _ = map(int, texts["schedstat"].split())
    found = {"cpu_ns": run, "latency_ns": wait}
    for key, name in (("voluntary", "nvcsw"), ("nonvoluntary", "nivcsw")):
        match = re.search(rf"^{key}_ctxt_switches:\t(\d+)$", texts["status"], re.M)
        assert match
        found[name] = int(match[1])
    return found


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def session(request: pytest.FixtureRequest) -> dict[str, Any]:
    run = lab.build(f"kcore-{request.param}")
    live: dict[str, Any] = json.loads((run.directory / RESULTS).read_text())["live"]
    return live


def reports(session: dict[str, Any], name: str) -> list[Watched]:
    command = session["commands"][name]
    watched = [
        Watched(
            json.loads(line),
            session["tasks"],
            session["readings"],
            command["start_ns"],
        )
        for line in command["stdout"].splitlines()
    ]
    first = watched[0]
    if first.report["interval_ns"] is not None:
        # Nobody knows who ran when it began, but who did not.
        first.begin_look_ns = first.begin_ns - first.start_ns
        first.ran_before = frozenset(first.tasks) - set(STEADY)
    for one, other in pairwise(watched):
        other.begin_look_ns = one.look_ns
        runs = {name for name in one.tasks if one.row(name)["class"] in RUNNABLE}
        other.ran_before = frozenset(runs)
    return watched


@pytest.fixture(scope="module", params=range(COUNT))
def watched(request: pytest.FixtureRequest, session: dict[str, Any]) -> Watched:
    return reports(session, "interval")[request.param]


@pytest.fixture
def once(session: dict[str, Any]) -> Watched:
    """The report without an interval."""
    (report,) = reports(session, "once")
    return report


def off_cpu(row: dict[str, Any]) -> Iterator[tuple[str | None, int, int]]:
    for part in row["off_cpu"]:
        yield part["class"], part["ns"], part["error_ns"]


def test_totals_since_birth(session: dict[str, Any], once: Watched) -> None:
    """Each is no less than before the command began, and no more than afterwards."""
    command, report = session["commands"]["once"], once.report
    assert command["start_ns"] < report["taken_at_ns"] < command["end_ns"]
    assert report["interval_ns"] is None
    for name in once.tasks:
        row = once.row(name)
        least = counters(once.readings[0]["tasks"][name])
        for key in ("nvcsw", "nivcsw"):
            assert least[key] <= row[key] <= once.most(name, key), name
        cpu_ns = row["user_ns"] + row["system_ns"]
        # From v6.12 on the kernel may count sleep as latency: no more of it is
        # reported than there was time for.
        room_ns = row["lifetime_ns"] - cpu_ns
        assert cpu_ns >= least["cpu_ns"] - once.bound_ns, name
        latency_ns = min(least["latency_ns"], room_ns) - once.bound_ns
        assert row["latency_ns"] >= latency_ns, name
        # The file has a wait once that has ended.
        open_ns = row["class_age_ns"] if row["class"] == "LAT" else 0
        slack_ns = once.slack_ns(name)
        assert cpu_ns <= once.most(name, "cpu_ns") + slack_ns, name
        ended_ns = row["latency_ns"] - open_ns
        assert ended_ns <= once.most(name, "latency_ns") + slack_ns, name


def test_parts_of_a_lifetime_add_up(once: Watched) -> None:
    parts = ("user_ns", "system_ns", "latency_ns", "off_cpu_ns", "zombie_ns")
    for row in once.report["tasks"]:
        assert sum(row[part] for part in parts) == row["lifetime_ns"]
        assert row["lifetime_ns"] <= once.end_ns


def test_classes_now(once: Watched) -> None:
    """Of those that do not run at all."""
    for name, task_class in STEADY.items():
        row = once.row(name)
        assert row["class"] == task_class
        # The first may have been read on its way there.
        there = next(
            reading
            for reading in once.readings
            if counters(reading["tasks"][name])["nvcsw"] == row["nvcsw"]
        )
        assert there["to_ns"] < once.end_ns
        assert row["class_age_ns"] > once.end_ns - there["to_ns"]
    for name in HOGS:
        assert once.row(name)["class"] in RUNNABLE


def test_time_is_that_of_the_kernel(watched: Watched) -> None:
    """CLOCK_MONOTONIC, which the readings have, too."""
    first, last = watched.readings[0], watched.readings[-1]
    assert first["to_ns"] < watched.begin_ns < watched.end_ns < last["from_ns"]


def test_no_report_is_early(session: dict[str, Any]) -> None:
    """Each is due at its time, however late the one before was."""
    found = reports(session, "interval")
    for number, watched in enumerate(found, 1):
        took_ns = watched.end_ns - found[0].begin_ns
        assert took_ns >= number * INTERVAL * SECOND - watched.bound_ns


def test_parts_add_up(watched: Watched) -> None:
    interval = watched.report["interval_ns"]
    assert len(watched.report["tasks"]) > 50
    for row in watched.report["tasks"]:
        parts = ("user_ns", "system_ns", "latency_ns", "off_cpu_ns", "zombie_ns")
        assert sum(row[part] for part in parts) == row["lifetime_ns"] <= interval
        assert sum(ns for _, ns, _ in off_cpu(row)) == row["off_cpu_ns"]
    for name in watched.tasks:
        assert watched.row(name)["lifetime_ns"] == interval


def test_time_on_the_cpu(watched: Watched) -> None:
    for name in watched.tasks:
        row, slack_ns = watched.row(name), watched.slack_ns(name)
        least, most = watched.between(name, "cpu_ns")
        found = row["user_ns"] + row["system_ns"]
        assert least - slack_ns <= found <= most + slack_ns, name


def test_latency(watched: Watched) -> None:
    for name in watched.tasks:
        row, slack_ns = watched.row(name), watched.slack_ns(name)
        least, most = watched.between(name, "latency_ns")
        assert row["latency_ns"] <= most + slack_ns, name
        if row["latency_bound"] == "exact":
            assert row["latency_ns"] >= least - slack_ns, name


@pytest.mark.parametrize("counter", ["nvcsw", "nivcsw"])
def test_switches(watched: Watched, counter: str) -> None:
    for name in watched.tasks:
        least, most = watched.between(name, counter)
        assert least <= watched.row(name)[counter] <= most, name


def test_class_is_where_the_kernel_says_it_waits(watched: Watched) -> None:
    """Of those that slept on from before the end until after it.

    Who sleeps when its second file is read, and has not gone to sleep anew when the
    third is, has been asleep since the first.
    """
    compared = set()
    before = watched.before(watched.end_ns - watched.look_ns)
    after = watched.after(watched.end_ns)
    later = watched.after(after["to_ns"])
    for name in watched.tasks:
        each = [reading["tasks"][name] for reading in (before, after, later)]
        wchans = {texts["wchan"] for texts in each[:2]}
        if len({counters(texts)["nvcsw"] for texts in each}) > 1 or "0" in wchans:
            continue
        row = watched.row(name)
        assert re.search(LOOKS[row["class"]][1], each[1]["wchan"]), name
        began = watched.end_ns - row["class_age_ns"]
        assert began < before["to_ns"], name
        compared.add(name)
    assert compared >= {"never", "sleeper"}


def test_who_does_not_run_is_known_exactly(watched: Watched) -> None:
    for name, task_class in STEADY.items():
        expected = [(task_class, watched.report["interval_ns"], 0)]
        assert list(off_cpu(watched.row(name))) == expected


def test_hogs_never_sleep(watched: Watched) -> None:
    """A look may see one amid a switch, after which it neither runs nor waits."""
    for name in HOGS:
        off_ns = watched.row(name)["off_cpu_ns"]
        assert off_ns <= watched.bound_ns + watched.slack_ns(name), name


def test_sleeps_of_known_kinds(watched: Watched) -> None:
    """Too many for looks to see them all, but no look sees anything else."""
    for name, classes in SLEEPS.items():
        row = watched.row(name)
        found = {key: ns for key, ns, _ in off_cpu(row)}
        assert set(found) <= {*classes, None}, name
        if row["class"] in classes and not watched.report["coverage"].get(UNTOLD):
            # It was seen in the sleep that lasts at the end.
            lasts_ns = min(row["class_age_ns"], row["lifetime_ns"])
            assert found[row["class"]] >= lasts_ns - watched.slack_ns(name), name
