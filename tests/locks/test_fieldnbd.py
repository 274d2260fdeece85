# SPDX-License-Identifier: LGPL-2.1-or-later

"""Network block devices by TCP: who serves them, here or elsewhere."""

import pytest

from msatools.locks.report import Root
from tests.locks.reports import LoggedReport, logged_report


@pytest.fixture(params=["fieldnbd-6.1", "fieldnbd-6.12"])
def dump(request: pytest.FixtureRequest) -> LoggedReport:
    return logged_report(request.param)


def root_of(dump: LoggedReport, disk: str) -> Root:
    """Return the root of the task that waits for a disk."""
    waiter = dump.run.workload["ends"][disk]
    (root,) = (root for root in dump.report.roots if waiter in root.behind)
    assert root.disks == (disk,)
    assert root.reason.startswith(f"I/O on {disk} ")
    return root


@pytest.mark.parametrize("disk", ["nbd0", "nbd1"])
def test_server_of_this_machine(dump: LoggedReport, disk: str) -> None:
    """By IPv4 and by IPv6, over the loopback: the guest says who has the other end."""
    server = dump.run.workload["servers"][disk]
    reason = root_of(dump, disk).reason
    assert f"served by ~{server} " in reason
    assert reason.endswith(", stopped by SIGSTOP")


def test_server_elsewhere(dump: LoggedReport) -> None:
    reason = root_of(dump, "nbd2").reason
    assert reason.endswith(f", served by {dump.run.workload['remote']}")


def test_nothing_is_lost(dump: LoggedReport) -> None:
    assert "servers_unreadable" not in dump.report.coverage
