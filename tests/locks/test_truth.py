# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waiters, owners, names, roots and deadlocks, against what was logged in guests."""

from itertools import pairwise

import pytest
from drgn import FaultError

from msatools.locks.locks import collect_locks
from msatools.locks.options import LocksOptions
from msatools.target.describe import describe
from tests.locks.reports import MODULE, STOCK, Told, told
from tests.support.dumps import open_dump

ALL = (*STOCK, *MODULE)


@pytest.fixture(scope="module", params=ALL)
def dump(request: pytest.FixtureRequest) -> Told:
    return told(request.param)


@pytest.fixture(scope="module", params=STOCK)
def stock(request: pytest.FixtureRequest) -> Told:
    return told(request.param)


@pytest.fixture(scope="module", params=MODULE)
def module(request: pytest.FixtureRequest) -> Told:
    return told(request.param)


def test_types_and_addresses(dump: Told) -> None:
    """Each is found by those who wait for it, where it says it is."""
    for name, truth in dump.truths.items():
        lock = dump.of(truth)
        assert lock.type == truth["type"], name
        if truth["address"] is not None and lock.address is not None:
            assert hex(lock.address) == truth["address"], name


def test_waiters_in_order(dump: Told) -> None:
    for name, truth in dump.truths.items():
        waiters = [waiter["pid"] for waiter in truth["waiters"]]
        assert list(dump.of(truth).waiters) == waiters, name


def test_modes(dump: Told) -> None:
    for name, truth in dump.truths.items():
        for waiter in truth["waiters"]:
            if waiter["mode"] is not None:
                assert dump.waits[waiter["pid"]].mode == waiter["mode"], name


def test_owners_and_how_sure_they_are(stock: Told) -> None:
    for name, truth in stock.truths.items():
        owners = {owner.pid: owner.confidence for owner in stock.of(truth).owners}
        expected = {owner["pid"]: owner["confidence"] for owner in truth["owners"]}
        if truth.get("word_holds_tid"):
            # The kernel knows, too: it clears the word when the thread ends.
            expected = dict.fromkeys(expected, "exact")
        if truth.get("fuse_server") in stock.waits and truth["type"] == "folio":
            # It is to end the wait, and is blocked itself.
            expected = {truth["fuse_server"]: "likely"}
        assert owners == expected, name


# Nothing says who has them.
UNTOLD = {"bit-lock", "completion", "wait-queue", "bit-wait"}


def test_owners_of_the_module(module: Told) -> None:
    """All who have a lock are told, but where nothing says who they are."""
    for name, truth in module.truths.items():
        lock = module.of(truth)
        owners = {owner.pid for owner in lock.owners}
        holders = {owner["pid"] for owner in truth["owners"]}
        assert owners <= holders, name
        exact = {owner.pid for owner in lock.owners if owner.confidence == "exact"}
        written = lock.type == "rwsem" and not truth["readers"]
        if written or lock.type in ("mutex", "ww_mutex", "rt_mutex"):
            assert exact == holders, name
        elif name not in UNTOLD:
            assert owners == holders, name


def test_readers_are_counted(module: Told) -> None:
    for name, truth in module.truths.items():
        lock = module.of(truth)
        if lock.type == "rwsem":
            assert lock.readers == truth["readers"], name


def test_symbols_and_caches(module: Told) -> None:
    for name, truth in module.truths.items():
        lock = module.of(truth)
        if truth["symbol"] is not None:
            assert lock.name == truth["symbol"], name
        if truth["cache"] is not None:
            offset = int(truth["address"], 16) - int(truth["object"], 16)
            assert lock.cache == truth["cache"], name
            assert lock.name == f"{truth['cache']}+{offset:#x}", name


def test_names(stock: Told) -> None:
    """What each lies in, as far as the guest could know."""
    for name, truth in stock.truths.items():
        lock = stock.of(truth)
        if "lock_name" in truth and not truth.get("frozen"):
            assert lock.name is not None, name
            assert truth["lock_name"] in lock.name, name
        if lock.type == "wait_queue":
            assert lock.name == f"FUSE request of {truth['mount']}", name
            continue
        if truth.get("path", "").startswith("/dev/"):
            assert lock.name == f"folio 0 of {truth['path'][5:]}", name
            continue
        if "path" in truth:
            assert lock.path == truth["path"], name
        if "inode" in truth:
            assert lock.inode == truth["inode"], name
        if "pid" in truth:
            assert lock.pid == truth["pid"], name


def test_deadlocks_are_those_that_were_made(dump: Told) -> None:
    """No other one is told, in any case that has none."""
    found = {
        (deadlock.confidence, frozenset(deadlock.pids))
        for deadlock in dump.report.deadlocks
    }
    assert found == made(dump)


def made(dump: Told) -> set[tuple[str, frozenset[int]]]:
    deadlocks = dump.run.workload.get("deadlocks")
    if deadlocks is not None:
        return {
            ("exact" if each["exact"] else "possible", frozenset(each["pids"]))
            for each in deadlocks
        }
    pids = {
        waiter["pid"]
        for truth in dump.truths.values()
        if truth["deadlock"] == "possible"
        for waiter in truth["waiters"]
    }
    return {("possible", frozenset(pids))}


def test_deadlocks_name_what_each_waits_for(dump: Told) -> None:
    for deadlock in dump.report.deadlocks:
        assert len(deadlock.pids) == len(deadlock.locks)
        circle = [*zip(deadlock.pids, deadlock.locks, strict=True)]
        for (pid, lock), (owner, _) in pairwise([*circle, circle[0]]):
            assert dump.waits[pid].lock == lock
            assert owner in [own.pid for own in dump.locks[lock].owners]


def test_roots(stock: Told) -> None:
    """Each root that can be known, what kind it is, and how many it blocks."""
    known = {
        owner["pid"] for truth in stock.truths.values() for owner in truth["owners"]
    }
    found = stock.report.roots
    for truth in stock.run.workload["roots"]:
        blocked, kind = len(truth["blocks"]), truth["kind"]
        if kind == "task" and truth["pid"] not in known:
            continue  # readers of an rwlock in user space: nothing names them
        if kind == "cycle":
            (root,) = [root for root in found if root.kind == "cycle"]
            assert sorted(root.waiters) == sorted(truth["pids"])
            continue
        pids = {truth["pid"], *truth["blocks"]} - {None}
        (root,) = [
            root
            for root in found
            # What one alone waits for is told as that task, which is not behind itself.
            if root.blocked_d + root.blocked_s == blocked - (root.kind != kind)
            and pids & {root.pid, *root.waiters}
        ]
        if truth["pid"] is not None:
            assert root.pid == truth["pid"] or str(truth["pid"]) in root.reason
        if blocked > 1:
            assert root.kind == kind, truth
            assert root.blocked_d + root.blocked_s == blocked


@pytest.mark.parametrize(
    ("pid_of", "reason"),
    [
        ("stopped-posix", "stopped by SIGSTOP"),
        ("stopped-flock", "stopped by SIGSTOP"),
        ("stopped-pi", "stopped by SIGSTOP"),
        ("vfork-stopped", "stopped by SIGSTOP"),
        ("normal", "asleep in clock_nanosleep"),
        ("posix", "asleep in pause"),
        ("inversion", "waits for CPU 1"),
    ],
)
def test_reasons(stock: Told, pid_of: str, reason: str) -> None:
    (owner,) = stock.truths[pid_of]["owners"]
    (root,) = [root for root in stock.report.roots if root.pid == owner["pid"]]
    assert root.kind == "task"
    assert root.reason == reason


def test_reasons_outside_of_tasks(stock: Told) -> None:
    reasons = {root.reason for root in stock.report.roots if root.kind == "external"}
    for number in ("254:0", "254:1"):
        assert any(f"{number} (suspended)" in reason for reason in reasons)
    assert "frozen file system /mnt/frozen" in reasons
    server = stock.truths["fuse-folio"]["fuse_server"]
    (told_,) = [reason for reason in reasons if f"FUSE server {server} " in reason]
    assert "(/mnt/fuse)" in told_


def test_parked_by_the_c_library(stock: Told) -> None:
    truth = stock.truths["pi-abba-parked"]
    (waiter,) = truth["waiters"]
    (root,) = [root for root in stock.report.roots if root.pid == waiter["pid"]]
    assert "own stack" in root.reason


def test_priority_inversion(stock: Told) -> None:
    truth = stock.truths["inversion"]
    (found,) = stock.report.inversions
    assert found.owner == truth["owners"][0]["pid"]
    assert found.waiter == truth["waiters"][0]["pid"]
    assert found.lock == stock.of(truth).id
    assert found.waiter_pri < 0 < found.owner_pri


def test_crowd(stock: Told) -> None:
    (herd,) = stock.report.herds
    assert herd.waiters == 300
    assert herd.lock == stock.of(stock.truths["herd"]).id


def test_chain_to_its_root(module: Told) -> None:
    owner = module.truths["chain-2"]["owners"][0]["pid"]
    (root,) = [root for root in module.report.roots if root.pid == owner]
    order = [
        module.truths[name]["waiters"][0]["pid"] for name in ("chain-1", "chain-2")
    ]
    assert list(root.chain) == [*order, owner]


def test_waits_are_as_old_as_was_logged(module: Told) -> None:
    """Each begins to wait after it logged the time, and before the next one did.

    The module lets that one go once the one before it waits.
    """
    taken_at_ns = module.report.taken_at_ns
    assert taken_at_ns is not None
    waiters = [one for truth in module.truths.values() for one in truth["waiters"]]
    waiters.sort(key=lambda waiter: int(waiter["start_ns"]))
    starts = [waiter["start_ns"] for waiter in waiters]
    ends = [*starts[1:], module.run.workload["times"]["monotonic_ns"]]
    tick_ns = 10_000_000  # by which clocks of CPUs may be apart
    for waiter, start, end in zip(waiters, starts, ends, strict=True):
        if waiter["comm"] == "lm-pcpur-w1":
            continue  # it sleeps for a grace period of RCU before it waits
        began = taken_at_ns - module.waits[waiter["pid"]].age_ns
        assert start - tick_ns < began < end + tick_ns, waiter


@pytest.mark.parametrize(
    "error", [LookupError("no such member"), FaultError("not there", 0)], ids=str
)
def test_what_a_lock_stands_for_may_be_lost(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs a note, but neither the lock nor the report."""

    def fails(*given: object) -> str | None:
        raise error

    whole = told("locks-6.12").report
    monkeypatch.setattr("msatools.locks.blocked.what_of", fails)
    report = collect_locks(open_dump("locks-6.12", "btf"))
    assert report.locks == whole.locks
    assert [wait.why for wait in report.waits] == [wait.why for wait in whole.waits]
    (note,) = report.notes
    assert note.text.startswith("what a lock stands for is lost")


@pytest.mark.parametrize("name", ALL)
def test_same_with_debug_info(name: str) -> None:
    """Types from BTF and from DWARF give one answer, and the same reads."""
    assert same(told(name)) == same(told(name, "dwarf"))


def same(dump: Told) -> object:
    report = dump.report
    return (
        *(report.waits, report.locks, report.roots, report.deadlocks, report.herds),
        *(report.inversions, report.notes, dict(report.coverage)),
    )


@pytest.mark.parametrize("name", ["lockspin-6.1", "lockspin-6.12"])
def test_spinlocks_of_cpus(name: str) -> None:
    """By the registers and stacks in the dump; the owner is evidence."""
    dump = told(name)
    for truth in dump.truths.values():
        lock = dump.of(truth)
        assert lock.type == "spinlock"
        assert lock.name == truth["symbol"]
        (owner,) = lock.owners
        assert [owner.pid] == [each["pid"] for each in truth["owners"]]
        assert owner.confidence == "evidence"
        assert owner.seen
        waiters = {waiter["pid"] for waiter in truth["waiters"]}
        assert set(lock.waiters) == waiters
        callers = {dump.waits[pid].caller for pid in waiters}
        assert all(caller and caller.startswith("lm_") for caller in callers)
    assert dump.report.deadlocks == ()


@pytest.mark.parametrize("name", ALL)
def test_one_task_that_was_asked_for(name: str) -> None:
    """It has the lock that it has among all, and no owner that it has not."""
    dump = told(name)
    prog = open_dump(name, "btf")
    target = describe(prog)
    # One waiter of each lock: the last of its queue, behind all others.
    for truth in dump.truths.values():
        pid = truth["waiters"][-1]["pid"]
        report = collect_locks(prog, target=target, options=LocksOptions(pids=(pid,)))
        alone = Told(dump.run, report)
        assert alone.ids(pid) == dump.ids(pid), truth["name"]
        for id_ in alone.ids(pid):
            ours, whole = alone.locks[id_], dump.locks[id_]
            assert ours.waiters == whole.waiters, truth["name"]
            owners = {owner.pid for owner in ours.owners}
            assert owners <= {owner.pid for owner in whole.owners}, truth["name"]
            exact = {own.pid for own in whole.owners if own.confidence == "exact"}
            assert owners >= exact, truth["name"]


def test_one_task_of_a_crowd() -> None:
    """It is found with some reads for each that waits; the lock names its owner."""
    dump = told("manytasks-6.12")
    (crowd,) = [herd for herd in dump.report.herds if "rwsem" in herd.lock]
    lock = dump.locks[crowd.lock]
    assert len(lock.waiters) > 800
    options = LocksOptions(pids=(lock.waiters[400],))
    report = collect_locks(open_dump("manytasks-6.12", "btf"), options=options)
    assert [(own.pid, own.confidence) for own in report.locks[0].owners] == [
        (own.pid, own.confidence) for own in lock.owners
    ]
    assert report.locks[0].waiters == lock.waiters
    assert report.coverage["stacks"] < 8
    assert report.coverage["reads"] < 4 * len(lock.waiters)
