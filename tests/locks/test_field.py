# SPDX-License-Identifier: LGPL-2.1-or-later

"""Situations out of public reports: who keeps whom waiting, by the guest's record."""

from typing import Any

import pytest
from msatools.commands.zombies import COMMAND as ZOMBIES

from msatools.locks.report import Root
from msatools.program import Opened, TargetSpec, open_target
from tests.locks.reports import LoggedReport, logged_report
from tests.support.calls import call


@pytest.fixture(params=["field-6.1", "field-6.12", "field-7.x"])
def dump(request: pytest.FixtureRequest) -> LoggedReport:
    return logged_report(request.param)


def tid(dump: LoggedReport, name: str) -> int:
    return int(dump.run.workload["tasks"][name]["tid"])


def root_of(dump: LoggedReport, name: str) -> Root:
    """Return the root behind which a task waits."""
    pid = tid(dump, name)
    (root,) = (root for root in dump.report.roots if pid in root.behind)
    return root


# --- an owner that left


@pytest.mark.parametrize("name", ["leaked", "reused-waiter"])
def test_owner_that_left(dump: LoggedReport, name: str) -> None:
    """The mutex's word names a task that has it no more, or has never had it."""
    named = tid(dump, {"leaked": "leaker", "reused-waiter": "reused-task"}[name])
    (lock,) = (lock for lock in dump.report.locks if tid(dump, name) in lock.waiters)
    assert lock.owners == ()
    (refuted,) = lock.refuted
    assert (refuted.pid, refuted.confidence) == (named, "evidence")
    assert "it sleeps in pause()" in refuted.evidence
    began_later = f"it is younger than the wait of pid {tid(dump, name)}"
    assert (began_later in refuted.evidence) == (name == "reused-waiter")
    root = root_of(dump, name)
    assert root.pid in (None, tid(dump, name))
    assert not [root for root in dump.report.roots if root.pid == named]
    assert ", left locked: its owner field names " in root.reason


# --- threads and namespaces


def test_exec_waits_for_a_thread_of_a_tracer(dump: LoggedReport) -> None:
    (found,) = (each for each in dump.report.deadlocks if each.confidence == "exact")
    assert {*found.pids} == {tid(dump, "exec"), tid(dump, "tracer")}


@pytest.mark.parametrize(
    ("waiter", "end"),
    [
        ("stuck-exec", "exec-asks"),
        ("namespace-init", "namespace-asks"),
        ("uring", "uring-worker"),
        ("dumper", "dump-asks"),
    ],
)
def test_who_waits_for_a_task_that_asks(
    dump: LoggedReport, waiter: str, end: str
) -> None:
    """It waits behind the server that the thread, or the other process, asks."""
    wait = dump.waits[tid(dump, waiter)]
    assert wait.lock is not None
    assert [own.pid for own in dump.locks[wait.lock].owners] == [tid(dump, end)]
    root = root_of(dump, waiter)
    assert "FUSE server" in root.reason
    assert tid(dump, end) in root.behind


def test_thread_that_waits_for_a_core_dump(dump: LoggedReport) -> None:
    """It waits for the one that dumps, and that for the thread that asks."""
    wait = dump.waits[tid(dump, "dumped")]
    assert wait.lock is not None
    owners = [own.pid for own in dump.locks[wait.lock].owners]
    assert owners == [tid(dump, "dumper")]
    assert tid(dump, "dumped") in root_of(dump, "dumper").behind


def test_thread_of_a_server_that_has_the_request(dump: LoggedReport) -> None:
    """It waits for who asks; the other thread of the server is idle in read()."""
    asker, server = tid(dump, "threaded-asker"), tid(dump, "threaded-server")
    (found,) = (each for each in dump.report.deadlocks if asker in each.pids)
    assert {*found.pids} == {asker, server}
    # Which thread has a request is not recorded.
    assert found.confidence == "possible"
    assert not [root for root in dump.report.roots if "/mnt/threaded" in root.reason]


@pytest.mark.parametrize("version", ["", "old-"])
def test_frozen_owner(dump: LoggedReport, version: str) -> None:
    root = root_of(dump, f"{version}frozen-waiter")
    assert root.pid == tid(dump, f"{version}frozen-owner")
    assert root.reason == "frozen by its control group"


# --- a page fault


def test_fault_has_the_lock(dump: LoggedReport) -> None:
    """No word on its stack says so, but where it is."""
    wait = dump.waits[tid(dump, "protect")]
    assert wait.lock is not None
    (owner,) = dump.locks[wait.lock].owners
    assert (owner.pid, owner.confidence) == (tid(dump, "fault"), "likely")
    for name in ("ps", "protect", "fault"):
        assert "frozen file system /mnt/frozen" in root_of(dump, name).reason


# --- the dead


def zombies(dump: LoggedReport) -> dict[int, dict[str, Any]]:
    """Return the groups of msa-zombies, by the PID of each zombie."""

    def opening(spec: TargetSpec) -> Opened:
        return open_target(TargetSpec(path=str(dump.run.kept), types="btf"))

    report = call(ZOMBIES, "--json", opening=opening).json
    return {pid: group for group in report["groups"] for pid in group["pids"]}


def test_verdicts(dump: LoggedReport) -> None:
    found = {pid: group["verdict"] for pid, group in zombies(dump).items()}
    truth = {each["pid"]: each["verdict"] for each in dump.run.workload["zombies"]}
    assert found.items() >= truth.items()


def test_dead_leader_whose_thread_cannot_be_killed(dump: LoggedReport) -> None:
    """It has been killed: to kill it again is no advice."""
    (truth,) = (each for each in dump.run.workload["zombies"] if "thread" in each)
    group = zombies(dump)[truth["pid"]]
    text = group["evidence"]["text"]
    assert f"thread {truth['thread']} is in uninterruptible sleep" in text
    assert "the process is to end" in text
    assert f"msa-locks -p {truth['thread']}" in group["advice"]
    assert "ends them" not in group["advice"]
    assert "FUSE server" in group["evidence"]["root"]


@pytest.mark.parametrize("verdict", ["traced", "never-waits"])
def test_zombies_that_keep_a_namespace(dump: LoggedReport, verdict: str) -> None:
    """The first process of it, a container's, waits until they are reaped."""
    (truth,) = (
        each
        for each in dump.run.workload["zombies"]
        if each["verdict"] == verdict and "holds" in each
    )
    group = zombies(dump)[truth["pid"]]
    assert [held["pid"] for held in group["holds"]] == [truth["holds"]]
    wait = dump.waits[truth["holds"]]
    assert wait.lock is not None
    (owner,) = dump.locks[wait.lock].owners
    assert owner.pid == tid(dump, f"reaps-no-{verdict}")
