# SPDX-License-Identifier: LGPL-2.1-or-later

"""Roots, reasons, herds and ages agree with the guests' records.

Facts of single locks are in ``tests/truth/locks.py``.
"""

from collections.abc import Sequence

import pytest
from drgn import FaultError
from drgn.helpers.linux.sched import cpu_curr
from msgspec.structs import replace

from msatools.errors import MissingError
from msatools.kernel.clocks import read_accounting
from msatools.kernel.report import LossLog
from msatools.locks.locks import collect_locks
from msatools.locks.report import LocksReport
from msatools.locks.report_builder import LocksOptions
from msatools.program.description import describe
from msatools.tasks.accounting import bound_of
from tests.locks.reports import LoggedReport, logged_report
from tests.locks.seen import MODULE, SPINNING, STOCK
from tests.support.dumps import open_dump

ALL = (*STOCK, *MODULE)


@pytest.fixture(params=ALL)
def dump(request: pytest.FixtureRequest) -> LoggedReport:
    return logged_report(request.param)


@pytest.fixture(params=STOCK)
def stock(request: pytest.FixtureRequest) -> LoggedReport:
    return logged_report(request.param)


@pytest.fixture(params=MODULE)
def module(request: pytest.FixtureRequest) -> LoggedReport:
    return logged_report(request.param)


def test_roots(stock: LoggedReport) -> None:
    """Each identifiable root has its kind and its number of blocked tasks."""
    known = {
        owner["pid"] for truth in stock.truths.values() for owner in truth["owners"]
    }
    found = stock.report.roots
    for truth in stock.run.workload["roots"]:
        blocked, kind = len(truth["blocks"]), truth["kind"]
        if kind == "task" and truth["pid"] not in known:
            continue  # readers of a user-space rwlock are not recorded anywhere
        if kind == "cycle":
            (root,) = [root for root in found if root.kind == "cycle"]
            assert sorted(root.waiters) == sorted(truth["pids"])
            continue
        pids = {truth["pid"], *truth["blocks"]} - {None}
        (root,) = [
            root
            for root in found
            # A thing with a single waiter is reported as that task, which is the root.
            if root.blocked_d + root.blocked_s == blocked - (root.kind != kind)
            and pids & {root.pid, *root.waiters}
        ]
        if truth["pid"] is not None:
            assert root.pid == truth["pid"] or str(truth["pid"]) in root.reason
        if blocked > 1:
            assert root.kind == kind, truth
            assert root.blocked_d + root.blocked_s == blocked


HOG_CPU = 1


@pytest.mark.parametrize(
    ("pid_of", "reason"),
    [
        ("stopped-posix", "stopped by SIGSTOP"),
        ("stopped-flock", "stopped by SIGSTOP"),
        ("stopped-pi", "stopped by SIGSTOP"),
        ("vfork-stopped", "stopped by SIGSTOP"),
        ("normal", "asleep in clock_nanosleep"),
        ("posix", "asleep in pause"),
        (
            "inversion",
            "waits for CPU 1 (nice 19), which real-time task {hog} inversion-hog has",
        ),
    ],
)
def test_reasons(stock: LoggedReport, pid_of: str, reason: str) -> None:
    (owner,) = stock.truths[pid_of]["owners"]
    (root,) = [root for root in stock.report.roots if root.pid == owner["pid"]]
    assert root.kind == "task"
    hog = stock.run.workload["tasks"]["inversion-hog"]["tid"]
    if pid_of == "inversion" and hog != runs_on(stock, HOG_CPU):
        # The fair server (6.12) lets another task run now and then.
        reason = reason.partition(",")[0]
    assert root.reason == reason.format(hog=hog)


def runs_on(dump: LoggedReport, cpu: int) -> int:
    """Return the PID of the task that a CPU runs."""
    return int(cpu_curr(open_dump(dump.run.name, "btf"), cpu).pid)


def test_reasons_of_external_roots(stock: LoggedReport) -> None:
    reasons = {root.reason for root in stock.report.roots if root.kind == "external"}
    for number in ("254:0", "254:1"):
        assert any(f"{number} (suspended)" in reason for reason in reasons)
    assert "frozen file system /mnt/frozen" in reasons
    server = stock.truths["fuse-folio"]["fuse_server"]
    (found,) = [reason for reason in reasons if f"FUSE server {server} " in reason]
    assert "(/mnt/fuse)" in found


def test_parked_by_the_c_library(stock: LoggedReport) -> None:
    truth = stock.truths["pi-abba-parked"]
    (waiter,) = truth["waiters"]
    (root,) = [root for root in stock.report.roots if root.pid == waiter["pid"]]
    assert "own stack" in root.reason


def test_priority_inversion(stock: LoggedReport) -> None:
    truth = stock.truths["inversion"]
    (found,) = stock.report.inversions
    assert found.owner == truth["owners"][0]["pid"]
    assert found.waiter == truth["waiters"][0]["pid"]
    assert found.lock == stock.of(truth).id
    assert found.waiter_pri < 0 < found.owner_pri


def test_chain_to_its_root(module: LoggedReport) -> None:
    owner = module.truths["chain-2"]["owners"][0]["pid"]
    (root,) = [root for root in module.report.roots if root.pid == owner]
    order = [
        module.truths[name]["waiters"][0]["pid"] for name in ("chain-1", "chain-2")
    ]
    assert list(root.chain) == [*order, owner]


def test_ages_of_waits(module: LoggedReport) -> None:
    """Each wait began after the waiter logged the time, and before the next one did.

    The module starts the next waiter only when the previous one waits.
    """
    taken_at_ns = module.report.taken_at_ns
    assert taken_at_ns is not None
    waiters = [one for truth in module.truths.values() for one in truth["waiters"]]
    waiters.sort(key=lambda waiter: int(waiter["start_ns"]))
    starts = [waiter["start_ns"] for waiter in waiters]
    ends = [*starts[1:], module.run.workload["times"]["monotonic_ns"]]
    # The maximum difference of the CPUs' clocks.
    accounting = read_accounting(open_dump(module.run.name, "btf"), LossLog())
    slack_ns = bound_of(accounting)
    for waiter, start, end in zip(waiters, starts, ends, strict=True):
        if waiter["comm"] == "lm-pcpur-w1":
            continue  # it sleeps for a grace period of RCU before it waits
        began = taken_at_ns - module.waits[waiter["pid"]].age_ns
        assert start - slack_ns <= began <= end + slack_ns, waiter


def test_unreadable_purpose_of_a_lock(
    stock: LoggedReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is noted; the locks are still reported."""
    prog = open_dump(stock.run.name, "btf")
    for error in (MissingError("no such member"), FaultError("not there", 0)):

        def fails(*given: object, error: Exception = error) -> str | None:
            raise error

        monkeypatch.setattr("msatools.locks.lock_types.what_of", fails)
        report = collect_locks(prog)
        without = tuple(
            # What a futex is was read with its owner.
            lock if lock.type == "futex" else replace(lock, what=None)
            for lock in stock.report.locks
        )
        assert report.locks == without
        whole = [wait.why for wait in stock.report.waits]
        assert [wait.why for wait in report.waits] == whole
        (note,) = report.notes
        assert note.text.startswith("cannot determine what a lock stands for")


@pytest.mark.parametrize("name", [*ALL, *SPINNING])
def test_same_with_debug_info(name: str) -> None:
    """Types from BTF and from DWARF give one answer, and the same reads.

    But how long a function is, whose code is read to judge an owner by its stack, is
    not the same in the kernel's table of symbols. And what disks of the device mapper
    hold needs the types of its module: these dumps have no debug info of modules, and a
    note says so.
    """
    btf, dwarf = logged_report(name).report, logged_report(name, "dwarf").report
    unknown = [note for note in dwarf.notes if note.code == "bios-unknown"]
    assert len(unknown) == bool(btf.io)
    by_stack = any(
        own.confidence == "evidence" for lock in btf.locks for own in lock.owners
    )
    left_out = READS if btf.io or by_stack else ()
    assert comparable(btf, left_out) == comparable(dwarf, left_out)


READS = ("reads", "bytes_read")


def comparable(report: LocksReport, left_out: Sequence[str]) -> object:
    coverage = report.coverage.items()
    notes = [note for note in report.notes if note.code != "bios-unknown"]
    return (
        *(report.waits, report.locks, report.roots, report.deadlocks, report.herds),
        *(report.inversions, notes),
        {key: count for key, count in coverage if key not in left_out},
    )


@pytest.mark.parametrize("name", SPINNING)
def test_spinlocks_of_cpus(name: str) -> None:
    """Owners and waiters are found by the registers and stacks in the dump."""
    dump = logged_report(name)
    for truth in dump.truths.values():
        assert all(owner.seen for owner in dump.of(truth).owners)
        callers = [dump.waits[waiter["pid"]].caller for waiter in truth["waiters"]]
        assert all(caller and caller.startswith("lm_") for caller in callers)


def test_single_selected_task(dump: LoggedReport) -> None:
    """It has the same lock as in the full report, and no other owners."""
    prog = open_dump(dump.run.name, "btf")
    target = describe(prog)
    # The last waiter in the queue of each lock.
    for truth in dump.truths.values():
        pid = truth["waiters"][-1]["pid"]
        report = collect_locks(prog, target=target, options=LocksOptions(pids=(pid,)))
        alone = LoggedReport(dump.run, report)
        assert alone.ids(pid) == dump.ids(pid), truth["name"]
        for id_ in alone.ids(pid):
            ours, whole = alone.locks[id_], dump.locks[id_]
            assert ours.waiters == whole.waiters, truth["name"]
            owners = {owner.pid for owner in ours.owners}
            assert owners <= {owner.pid for owner in whole.owners}, truth["name"]
            exact = {own.pid for own in whole.owners if own.confidence == "exact"}
            assert owners >= exact, truth["name"]


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("locks-6.12", "futex", 300),
        pytest.param("manytasks-6.12", "rwsem", 800, marks=pytest.mark.long),
    ],
)
def test_single_task_of_a_crowd(name: str, kind: str, count: int) -> None:
    """The report takes a few reads per waiter; the lock records its owner."""
    dump = logged_report(name)
    (crowd,) = [herd for herd in dump.report.herds if kind in herd.lock]
    lock = dump.locks[crowd.lock]
    assert len(lock.waiters) >= count
    options = LocksOptions(pids=(lock.waiters[count // 2],))
    report = collect_locks(open_dump(name, "btf"), options=options)
    assert [(own.pid, own.confidence) for own in report.locks[0].owners] == [
        (own.pid, own.confidence) for own in lock.owners
    ]
    assert report.locks[0].waiters == lock.waiters
    assert report.coverage["stacks"] < 8
    assert report.coverage["reads"] < 4 * len(lock.waiters)
