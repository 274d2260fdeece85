# SPDX-License-Identifier: LGPL-2.1-or-later

"""msa-locks on kernels that run: inside of a guest, and from outside over QMP.

Inside, tasks said what they wait for (``fixtures/lab/guest/livelocks.py``): some all
the time, some from one report to the next, and some so briefly that no look can tell.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest.livelocks import COUNT
from fixtures.lab.inside import RESULTS
from msatools.locks.locks import Locks
from msatools.locks.report_builder import LocksOptions
from msatools.program import TargetSpec, open_target
from tests.locks.reports import LoggedReport
from tests.support.usage import free_programs

Report = dict[str, Any]

MSA_LOCKS = Path(sys.executable).with_name("msa-locks")


@dataclass
class Session:
    """What tasks in one guest did, and what msa-locks said of them."""

    facts: dict[str, Any]

    def command(self, name: str) -> dict[str, Any]:
        command: dict[str, Any] = self.facts["commands"][name]
        return command

    def reports(self, name: str) -> list[Report]:
        return [json.loads(line) for line in self.command(name)["stdout"].splitlines()]

    @property
    def all_reports(self) -> list[Report]:
        return [
            each for name in ("all", "interval", "storm") for each in self.reports(name)
        ]

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """Those that never moved, in the order in which they began to wait."""
        tasks: dict[str, dict[str, Any]] = self.facts["tasks"]
        return sorted(tasks.values(), key=lambda task: int(task["start_ns"]))

    def tid(self, name: str) -> int:
        return int(self.facts["tasks"][name]["tid"])


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def session(request: pytest.FixtureRequest) -> Session:
    run = lab.build(f"kcore-{request.param}")
    return Session(json.loads((run.directory / RESULTS).read_text())["locks"])


def lock_of(report: Report, pid: int) -> Report:
    """The lock that a task is said to wait for."""
    (wait,) = [wait for wait in report["waits"] if wait["pid"] == pid]
    (lock,) = [lock for lock in report["locks"] if lock["id"] == wait["lock"]]
    return dict(lock)


def owners(lock: Report) -> dict[int, str]:
    return {owner["pid"]: owner["confidence"] for owner in lock["owners"]}


def test_commands_succeed(session: Session) -> None:
    for name in ("all", "one", "interval", "storm"):
        command = session.command(name)
        assert (command["status"], command["stderr"]) == (0, ""), name
    assert len(session.reports("interval")) == COUNT


def test_those_that_never_move(session: Session) -> None:
    """Types, owners and the order of queues, also while others do not rest at all."""
    waiters: dict[str, list[int]] = {}
    expected: dict[str, dict[int, str]] = {}
    for task in session.tasks:
        on = task["on"] or {}
        if name := on.get("lock"):
            waiters.setdefault(name, []).append(task["tid"])
            expected.setdefault(name, {}).update(
                {own["pid"]: own["confidence"] for own in on.get("owners", ())}
            )
    for task in session.tasks:
        if name := task.get("owns"):
            expected[name][task["tid"]] = "exact"
    assert sorted(map(len, waiters.values())) == [1, 1, 1, 1, 2, 3, 300]
    for report in session.all_reports:
        for name, pids in waiters.items():
            lock = lock_of(report, pids[0])
            assert (lock["waiters"], owners(lock)) == (pids, expected[name]), name


def test_frozen_file_system(session: Session) -> None:
    pid = session.tid("frozen-write")
    for report in session.all_reports:
        assert lock_of(report, pid)["path"] == "/mnt/frozen"
        (root,) = [root for root in report["roots"] if root["waiters"] == [pid]]
        assert (root["kind"], root["pid"]) == ("external", None)
        assert root["reason"] == "frozen file system /mnt/frozen"


def test_deadlock_is_the_one_that_was_made(session: Session) -> None:
    pids = {session.tid("abba-1"), session.tid("abba-2")}
    for report in session.all_reports:
        (deadlock,) = report["deadlocks"]
        assert (set(deadlock["pids"]), deadlock["confidence"]) == (pids, "possible")


def test_one_task(session: Session) -> None:
    """The same as of all, at the cost of a few."""
    (whole,), (one,) = session.reports("all"), session.reports("one")
    pid = session.tid("normal-2")
    assert [wait["pid"] for wait in one["waits"]] == [pid]
    same = ("id", "type", "name", "owners", "waiters")
    found, expected = lock_of(one, pid), lock_of(whole, pid)
    assert [found[key] for key in same] == [expected[key] for key in same]
    assert one["roots"][0]["pid"] == session.tid("normal-owner")
    # Some 40 of these tell in which C library it waits: its mapping, the file and the
    # table of symbols there. Some 30 to 50 are the pages of the ORC tables that its
    # functions need, instead of all 4 MB of them.
    assert one["coverage"]["reads"] < 250
    # Each task is read, then its counters and its stack, and once more: only so is it
    # of one moment. The pages of the ORC tables are read once, for all tasks: some 300
    # where they sleep in as many functions as in the scenario locks (330).
    assert whole["coverage"]["reads"] < 11 * whole["coverage"]["tasks"] + 300


def test_who_comes_and_goes(session: Session) -> None:
    pids = session.facts["actors"]
    for stage, report in zip(
        session.facts["stages"][1:], session.reports("interval"), strict=True
    ):
        assert stage["done_ns"] < report["taken_at_ns"]
        files: dict[str, list[int]] = {}
        for name, wait in stage["waits"].items():
            files.setdefault(wait["file"], []).append(pids[name])
            lock = lock_of(report, pids[name])
            assert (lock["type"], lock["path"]) == ("posix_lock", wait["file"])
            assert owners(lock) == {wait["owner"]: "exact"}
        for lock in report["locks"]:
            if lock.get("path") in files:
                assert lock["waiters"] == files.pop(lock["path"])
        assert not files
        blocked = {wait["pid"] for wait in report["waits"]} & set(pids.values())
        assert blocked == {pids[name] for name in (*stage["waits"], "again")}


CHANGES = (
    {"stuck": ["stays", "ends", "moves", "again"]},
    {
        "begun": ["late"],
        "ended": ["ends"],
        "moved": ["moves", "again"],
        "stuck": ["stays"],
    },
    {"begun": ["ends"], "ended": ["moves"], "stuck": ["stays", "late", "again"]},
)


def test_changes(session: Session) -> None:
    """Also of those that never move: all of them are stuck, and nobody else is told."""
    pids = session.facts["actors"]
    still = {task["tid"] for task in session.tasks if (task["on"] or {}).get("lock")}
    ours = still | set(pids.values())
    for report, names in zip(session.reports("interval"), CHANGES, strict=True):
        expected = {key: {pids[name] for name in each} for key, each in names.items()}
        expected["stuck"] |= still
        found = {
            key: set(each) & ours
            for key, each in report["changes"].items()
            if set(each) & ours
        }
        assert found == expected


def test_those_that_never_rest(session: Session) -> None:
    """Twenty lock and unlock; tasks come and go. What is told of them is so, too."""
    assert min(session.facts["storm"]) > 0
    reports = session.reports("storm")
    assert len(reports) == 4
    still = {wait["pid"] for wait in session.reports("interval")[-1]["waits"]}
    for report in reports:
        assert {wait["pid"] for wait in report["waits"]} >= still & {
            task["tid"] for task in session.tasks
        }
        assert report["coverage"]["locks_unknown"] == 0
        told = {wait["pid"] for wait in report["waits"]}
        for lock in report["locks"]:
            assert set(lock["waiters"]) <= told, lock
            assert set(lock["waiters"]).isdisjoint(owners(lock)), lock


# --- from outside


@pytest.fixture(scope="module")
def stuck() -> Iterator[lab.Live]:
    """Tasks that wait for ever, some of them for each other."""
    with lab.live("lockmodule-6.12") as guest:
        yield guest


def words_for(guest: lab.Live) -> list[str | Path]:
    free_programs()
    return [MSA_LOCKS, "--qemu", guest.qmp, "--types", "btf"]


def run(guest: lab.Live, *words: str) -> str:
    done = subprocess.run(
        [*words_for(guest), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def looking_at(guest: lab.Live) -> Locks:
    free_programs()
    opened = open_target(TargetSpec(qemu=str(guest.qmp), types="btf"))
    return Locks(opened.prog, opened.target, LocksOptions())


def test_all_is_as_it_was_made(stuck: lab.Live) -> None:
    """In each interval the same, though every look is at a kernel that runs."""
    session = looking_at(stuck)
    session.begin(lambda done, total: None)
    made = {
        ("exact" if each["exact"] else "possible", frozenset(each["pids"]))
        for each in stuck.workload["deadlocks"]
    }
    assert {confidence for confidence, _ in made} == {"exact", "possible"}
    for _ in range(2):
        report = session.advance(lambda done, total: None)
        logged = LoggedReport(stuck, report)
        for name, truth in logged.truths.items():
            waiters = [waiter["pid"] for waiter in truth["waiters"]]
            assert list(logged.of(truth).waiters) == waiters, name
            holders = {owner["pid"] for owner in truth["owners"]}
            assert {own.pid for own in logged.of(truth).owners} <= holders, name
        assert made == {
            (deadlock.confidence, frozenset(deadlock.pids))
            for deadlock in report.deadlocks
        }
        assert report.coverage.get("owners_unconfirmed", 0) == 0
        assert report.changes is not None
        assert set(report.changes.stuck) >= set(logged.waits)
        assert not report.changes.begun + report.changes.moved
