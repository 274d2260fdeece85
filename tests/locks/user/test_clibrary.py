# SPDX-License-Identifier: LGPL-2.1-or-later

"""Owners of locks of the C libraries, and of what only looks like one."""

from typing import Any

import pytest

from msatools.locks.c_library import UNRECORDED
from tests.locks.reports import LoggedReport, logged_report

DUMPS = ["field-6.1", "field-6.12", "field-7.x"]
CROSSED = ("cross-0", "cross-1")


@pytest.fixture(params=DUMPS)
def dump(request: pytest.FixtureRequest) -> LoggedReport:
    return logged_report(request.param)


@pytest.fixture(params=["glibc", "musl"])
def waits(dump: LoggedReport, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The threads that wait, by name, as the guest says: tid, owner."""
    found: dict[str, Any] = dump.run.workload["libraries"][request.param]["waits"]
    assert len(found) == 7
    return found


def test_owners(dump: LoggedReport, waits: dict[str, Any]) -> None:
    """Each that the library records, and no other: not of what is not its lock."""
    found = {}
    for name, thread in waits.items():
        wait = dump.waits.get(thread["tid"])
        lock = dump.locks[wait.lock] if wait and wait.lock else None
        found[name] = [owner.pid for owner in lock.owners] if lock else []
    truth = {name: thread["owner"] for name, thread in waits.items()}
    assert found == {name: [pid] if pid else [] for name, pid in truth.items()}


def test_threads_that_wait_for_each_other(
    dump: LoggedReport, waits: dict[str, Any]
) -> None:
    crossed = {waits[name]["tid"] for name in CROSSED}
    (found,) = (each for each in dump.report.deadlocks if crossed & {*each.pids})
    assert {*found.pids} == crossed
    assert found.confidence == "possible"


def test_readers(dump: LoggedReport, waits: dict[str, Any]) -> None:
    """Neither library records who they are."""
    wait = dump.waits[waits["rwlock"]["tid"]]
    assert wait.lock is not None
    lock = dump.locks[wait.lock]
    assert (lock.readers, wait.mode) == (1, "write")


def test_mutex_that_records_no_owner(dump: LoggedReport) -> None:
    waits = dump.run.workload["libraries"]["musl"]["waits"]
    tid = waits["normal"]["tid"]
    (root,) = (root for root in dump.report.roots if tid in root.behind)
    assert root.reason == UNRECORDED
