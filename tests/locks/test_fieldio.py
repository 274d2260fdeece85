# SPDX-License-Identifier: LGPL-2.1-or-later

"""File systems whose disks, or whose server, answer no more: the root of each wait."""

import re

import pytest
from drgn.helpers.linux.pid import find_task

from fixtures import lab
from msatools.kernel.clocks import read_accounting
from msatools.kernel.report import LossLog
from msatools.locks.externals import NbdServers
from msatools.locks.locks import collect_locks
from msatools.locks.report import Holder, Root
from msatools.tasks.accounting import bound_of
from tests.locks.reports import LoggedReport, logged_report
from tests.support.dumps import open_dump


@pytest.fixture(params=["fieldio-6.1", "fieldio-6.12", "fieldio-7.x"])
def dump(request: pytest.FixtureRequest) -> LoggedReport:
    return logged_report(request.param)


def root_of(dump: LoggedReport, end: str) -> Root:
    """Return the one root of all that wait for a disk or a server in the end."""
    tids = set(dump.run.workload["ends"][end])
    roots = [root for root in dump.report.roots if not tids.isdisjoint(root.behind)]
    assert [{*root.behind} & tids for root in roots] == [tids]
    return roots[0]


@pytest.mark.parametrize("disk", ["nbd0", "nbd1"])
def test_disk(dump: LoggedReport, disk: str) -> None:
    """XFS is on one, btrfs on the other; its super block has no device."""
    root = root_of(dump, disk)
    assert root.disks == (disk,)
    assert root.reason.startswith(f"I/O on {disk} ")
    (row,) = (row for row in dump.report.io or () if row.name == disk)
    reads, writes = map(int, dump.run.workload["inflight"][disk])
    assert (row.reads, row.writes) == (reads, writes)
    assert reads > 0


def test_server_of_a_disk(dump: LoggedReport) -> None:
    """The guest stops the servers of its network block devices, and nothing else."""
    stats = [
        dump.run.truth(name).decode()
        for name in dump.run.truth_names()
        if re.fullmatch(r"proc/\d+/stat", name)
    ]
    found = [re.match(r"(\d+) \((.*)\) T ", stat) for stat in stats]
    stopped = {int(each[1]): each[2] for each in found if each}
    assert len(stopped) == 2
    served = [root_of(dump, disk) for disk in ("nbd0", "nbd1")]
    assert {root.pid for root in served} == {*stopped}
    for root in served:
        name = f"served by ~{root.pid} {stopped[root.pid or 0]}, stopped by SIGSTOP"
        assert root.reason.endswith(name)


def test_server_that_waits_for_its_own_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may do I/O on the very device that it serves: that ends the chain."""
    run = lab.build("fieldio-6.12")
    waiter = run.workload["tasks"]["xfs-read"]["tid"]
    prog = open_dump("fieldio-6.12", "btf")
    task = find_task(prog, waiter).value_()
    holders = (Holder(task, "likely"),)
    monkeypatch.setattr(NbdServers, "of_disk", lambda self, disk: holders)
    reasons = [root.reason for root in collect_locks(prog).roots]
    assert sum(
        each.endswith("which waits for what it serves itself") for each in reasons
    )


def test_commit_of_a_file_system(dump: LoggedReport) -> None:
    """Who waits for a commit of btrfs waits for the task that commits."""
    tasks = dump.run.workload["tasks"]
    commits, waits = (tasks[name]["tid"] for name in ("btrfs-sync", "btrfs-sync-after"))
    (lock,) = (each for each in dump.report.locks if waits in each.waiters)
    assert [(own.pid, own.confidence) for own in lock.owners] == [(commits, "likely")]
    assert lock.what == "commit of btrfs"


def test_server(dump: LoggedReport) -> None:
    """Two mounts of NFS are one root, with the age of the oldest request."""
    tids = dump.run.workload["ends"]["nfs"]
    root = root_of(dump, "nfs")
    address = re.escape(dump.run.workload["address"])
    found = re.fullmatch(
        rf"NFS server {address} \(/mnt/nfs, /mnt/other\), connected, "
        r"oldest request ([\d.]+)s",
        root.reason,
    )
    assert found, root.reason
    # It was sent by who has waited longest, after its announcement.
    taken_at_ns, tasks = dump.report.taken_at_ns, dump.run.workload["tasks"].values()
    assert taken_at_ns is not None
    first_ns = min(task["start_ns"] for task in tasks if task["tid"] in tids)
    longest_ns = max(dump.waits[tid].age_ns for tid in tids)
    slack_ns = 10**8 + bound_of(
        read_accounting(open_dump(dump.run.name, "btf"), LossLog())
    )
    most_ns = taken_at_ns - first_ns + slack_ns
    assert longest_ns - slack_ns <= float(found[1]) * 1e9 <= most_ns
