# SPDX-License-Identifier: LGPL-2.1-or-later

"""The wait target of every task of the workload."""

from typing import Any

import pytest
from msgspec.structs import replace

from msatools.locks.report import WaitTarget
from msatools.model import names as fields_of
from tests.locks.seen import TASKS, Seen, Truth, damaged, seen
from tests.support.overlay import lose, lose_page

DUMPS = (*TASKS, "tasks-on-6.1")

MAX_READS = 40
"""Maximum number of reads for one task's wait target."""

# Recorded facts that are not in the wait target, and the reason.
NOT_REPORTED = {
    # A rwsem records only its last reader.
    "readers": ("directory-make", "directory-rename", "directory-read", "unmap"),
    # A reader blocked by a waiting writer is in the wait graph.
    "behind": ("cmdline-read",),
    # Futexes before and after a requeue.
    "first": ("futex-requeue",),
    "target": ("futex-requeue-pi",),
    # A buffer has a device, but not the directory that it is read for.
    "inode": ("directory-lookup",),
    # It waits for the lock; the page fault before that is not reported.
    "address": ("frozen-fault",),
}
LOCKS = ("mutex", "rwsem", "percpu_rwsem")


@pytest.fixture(params=DUMPS)
def dump(request: pytest.FixtureRequest) -> Seen:
    return seen(request.param)


def expected(name: str, on: Truth) -> Truth:
    """Return a task's record in the form of a wait target."""
    target = {
        key: value for key, value in on.items() if name not in NOT_REPORTED.get(key, ())
    }
    kind = target["kind"]
    if kind in LOCKS:
        target |= {"kind": "lock", "type": kind}
    elif kind == "pi_futex":
        target |= {"kind": "futex", "type": kind}
    elif kind == "fds":
        target |= {"kind": "poll", "count": len(target["fds"])}
    elif kind == "disk":
        faults = "address" in target
        target |= {"kind": "page" if faults else "disk"}
        target["device"] = f"{target.pop('name')} {target['device']}"
    elif kind == "journal":
        target["pid"] = target.pop("thread")
    elif kind == "child" and target["pid"] == -1:
        target["pid"] = None
    elif kind == "cgroup":
        target["path"] = f"/{target['path']}"
    if "mm_of" in target:
        target["pid"] = target.pop("mm_of")
    if "until_s" in target:
        target["expires_ns"] = target.pop("until_s") * 10**9
    return target


def members(on: WaitTarget | None, names: Truth) -> Truth:
    """Return some members of a wait target."""

    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    return {name: plain(getattr(on, name, None)) for name in names}


def test_what_every_named_task_waits_on(dump: Seen) -> None:
    wrong, compared = {}, 0
    for name, task in dump.named.items():
        if task["on"] is None or task["on"]["kind"] == "cpu":
            continue
        if not dump.is_as_said(name):
            continue
        compared += 1
        wanted = expected(name, task["on"])
        found = members(dump.ons[dump.row(name)], wanted)
        if found != wanted:
            wrong[name] = found, wanted
    assert wrong == {}
    assert compared > 75


def test_times_that_end_waits(dump: Seen) -> None:
    """Each task sleeps for an hour from about its announcement."""
    hour, compared = 3600 * 10**9, 0
    now = dump.clocks.monotonic_ns
    assert now is not None
    timed = ("futex-timed", "nanosleep", "usleep", "sigtimedwait", "poll-timed")
    for name in (*timed, "fifo", "threads-07", "timerfd-read"):
        on, task = dump.on(name), dump.named[name]
        assert on.expires_ns is not None, name
        # A timerfd is armed before the announcement.
        first = task["start_ns"] - (10**9 if name == "timerfd-read" else 0)
        assert first <= on.expires_ns - hour <= task["in_place_ns"], name
        assert on.left_ns == on.expires_ns - now
        compared += 1
    assert compared == 8
    assert all(
        on.expires_ns is None
        for name in ("futex-wait", "poll", "uring-wait", "sigwaitinfo")
        if (on := dump.ons[dump.row(name)])
    )


def test_waiters_of_one_lock_are_counted(dump: Seen) -> None:
    for name in ("directory-make", "directory-rename", "directory-read"):
        assert dump.on(name).waiters == 3
    for server in dump.run.workload["servers"].values():
        first = server["condition"]
        ons = [dump.ons[dump.rows[tid]] for tid in server["workers"]]
        words = [on.address for on in ons if on and on.address]
        assert len(words) == len(ons) == 1000
        assert all(0 <= word - first < server["condition_bytes"] for word in words)
        for word in set(words):
            counts = {on.waiters for on in ons if on and on.address == word}
            assert counts == {words.count(word)}


def test_sockets_have_their_addresses(dump: Seen) -> None:
    """Addresses of sockets are those in /proc/net/tcp, by inode."""
    lines = dump.run.truth("proc/net/tcp").decode().splitlines()[1:]
    known = {}
    for line in lines:
        values = line.split()
        known[int(values[9])] = tuple(map(end, values[1:3]))
    compared = 0
    for name in ("tcp-accept", "tcp-receive", "tcp-send", "server-signal"):
        on = dump.on(name)
        assert on.type == "tcp"
        assert (on.local, on.peer) == known[on.inode or 0]
        compared += 1
    assert compared == 4
    unix = dump.on("unix-accept")
    assert (unix.type, unix.local) == ("unix stream", "/run/unix-accept")


def end(text: str) -> str | None:
    address, port = text.split(":")
    if not int(port, 16):
        return None
    octets = reversed(bytes.fromhex(address))
    return f"{'.'.join(map(str, octets))}:{int(port, 16)}"


def test_nothing_is_lost(dump: Seen) -> None:
    assert not dump.losses.lost
    assert not dump.losses.notes


def test_reads_per_task(dump: Seen) -> None:
    """A task takes reads of its stack, registers and waiter; some take more."""
    asleep = sum(on is not None for on in dump.ons)
    assert asleep > 2000
    assert dump.reads < 4 * asleep


def test_single_task_without_the_others(dump: Seen) -> None:
    different, most = {}, 0
    names = [name for name, task in dump.named.items() if task["on"]]
    for name in names:
        alone, on = dump.only(dump.tid(name)), dump.ons[dump.row(name)]
        if without_now(alone.ons[0]) != without_now(on):
            different[name] = alone.ons[0], on
        most = max(most, alone.reads)
    for one, of_all in different.values():
        # The kernel's hash table may have put it beside a thousand others.
        assert one is not None
        assert one.kind == "futex"
        assert one == replace(of_all, waiters=None)
    assert len(different) < 3
    assert most <= MAX_READS
    assert len(names) > 80


def test_one_of_a_thousand_waiters(dump: Seen) -> None:
    tid = dump.run.workload["servers"]["server-broadcast"]["workers"][500]
    alone, on = dump.only(tid), dump.ons[dump.rows[tid]]
    assert on is not None
    assert on.waiters == 1000
    (found,) = alone.ons
    assert found is not None
    assert (found.address, found.waiters) == (on.address, None)
    assert [code for code, _ in alone.losses.notes] == ["waiters-not-counted"]
    assert alone.reads <= MAX_READS


def without_now(on: WaitTarget | None) -> Truth:
    wanted = dict.fromkeys(name for name in fields_of(WaitTarget) if name != "left_ns")
    return members(on, wanted)


def test_unreadable_stacks_affect_no_other_task() -> None:
    whole, hurt = seen(TASKS[1]), damaged(TASKS[1])
    gone = {"pipe-read", "file-read", "directory-make", "wait4"}
    for name in gone:
        lose_page(hurt.prog, int(whole.table["sp"][whole.row(name)]))
    hurt = hurt.again()
    assert (hurt.table["pid"] == whole.table["pid"]).all()
    assert {name for name in gone if hurt.ons[hurt.row(name)] is None} == gone
    for name in set(whole.named) - gone - {"directory-rename", "directory-read"}:
        on, before = hurt.ons[hurt.row(name)], whole.ons[whole.row(name)]
        assert without_now(on) == without_now(before), name


def test_futex_without_its_hash_table() -> None:
    """The futex is known only from the system call's arguments."""
    whole, hurt = seen(TASKS[1]), damaged(TASKS[1])
    table = hurt.prog["__futex_data"]
    size = table.hashsize.value_() * table.queues[0].type_.size
    lose(hurt.prog, table.queues.value_(), size)
    known = whole.on("futex-wait")
    assert known.waiters
    asked_for = WaitTarget(kind="futex", address=known.address)
    assert hurt.ons[hurt.row("futex-wait")] == asked_for
    assert hurt.on("pipe-read") == whole.on("pipe-read")
    assert hurt.losses.coverage["futex_chains_broken"] > 0
    assert "futex_chains_broken" in hurt.losses.lost


def test_fault_in_the_memory_of_another(stock: Seen) -> None:
    """The target is in the other process's memory, not at the same address here."""
    on = stock.on("mmap-reader")
    assert on.path == "/mnt/fuse/mapped"
    (mmap,) = (lock for lock in stock.locks() if lock["name"] == "mmap")
    assert on.pid == mmap["pid"]
