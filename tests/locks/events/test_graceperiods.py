# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for a grace period of RCU, by what the guests did."""

import json
import re
from functools import cache
from typing import Any

import pytest
from drgn.helpers.linux.pid import find_task
from drgn.helpers.linux.printk import get_printk_records

from fixtures import lab
from msatools.kernel.clocks import read_jiffies
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.locks.rcu import _holdouts, awaited_expedited
from msatools.locks.report import LockRow, LocksReport, Root
from msatools.report.log import read_log
from tests.cpus.test_fieldcpus import json_of
from tests.locks.io.test_inflight import context_of
from tests.locks.reports import logged_report
from tests.support.dumps import open_dump
from tests.support.overlay import overwrite

KERNELS = ("6.1", "6.12", "7.x")


@cache
def said(name: str) -> dict[str, Any]:
    """What the guest's module said of its threads, by the console."""
    console = lab.build(name).console
    found = re.search(r"LAB-SPINNING (\{.*\})", console)
    assert found is not None
    return dict(json.loads(found[1]))


def pids(name: str, kind: str) -> list[int]:
    return [each["pid"] for each in said(name)["stalls"] if each["name"] == kind]


@cache
def report_of(name: str) -> LocksReport:
    return logged_report(name).report


def owners_of(name: str, waiter: int) -> dict[int, str]:
    (lock,) = (each for each in report_of(name).locks if waiter in each.waiters)
    return {owner.pid: owner.confidence for owner in lock.owners}


def roots_of(name: str, waiter: int) -> list[Root]:
    return [root for root in report_of(name).roots if waiter in root.behind]


def held_up(name: str) -> tuple[set[int], int]:
    """The CPUs that RCU waits for, and a time before its grace period began."""
    prog = open_dump(name, "dwarf")
    state = prog["rcu_state"]
    # So few CPUs have one node.
    mask = state.node[0].qsmask.value_()
    jiffies = read_jiffies(prog)
    start_ns = jiffies.past_ns(state.gp_start.value_() - 1)
    assert start_ns is not None
    return {cpu for cpu in range(64) if mask >> cpu & 1}, start_ns


@pytest.mark.parametrize("kernel", KERNELS)
def test_reader_that_was_preempted(kernel: str) -> None:
    """RCU records it; a realtime task has its CPU."""
    name = f"stalls-rcu-{kernel}"
    (reader,) = pids(name, "read-rcu")
    (hog,) = (each["pid"] for each in said(name)["hogs"] if each["name"] == "rt-hog")
    waiters = pids(name, "wait-rcu")
    assert len(waiters) == 2
    for waiter in waiters:
        assert owners_of(name, waiter) == {reader: "exact"}
        (root,) = roots_of(name, waiter)
        assert root.pid == reader
        assert root.reason == f"waits for CPU 1, which real-time task {hog} rt-hog has"


@pytest.mark.parametrize("kernel", KERNELS)
def test_cpus_that_do_not_switch(kernel: str) -> None:
    """What they run is likely in the way: RCU records the CPUs alone."""
    name = f"stalls-locks-{kernel}"
    names = {"own-lock", "want-lock", "softirq-off", "syscall"}
    stalled = [each for each in said(name)["stalls"] if each["name"] in names]
    assert len(stalled) == len(names)
    cpus, start_ns = held_up(name)
    # One that began after the grace period may have passed it before.
    before = {each["cpu"] for each in stalled if each["start_ns"] < start_ns}
    assert before <= cpus <= {each["cpu"] for each in stalled}
    culprits = {each["pid"] for each in stalled if each["cpu"] in cpus}
    for waiter in pids(name, "wait-rcu"):
        assert owners_of(name, waiter) == dict.fromkeys(culprits, "likely")


@pytest.mark.parametrize("kernel", KERNELS)
def test_thread_of_rcu_without_a_turn(kernel: str) -> None:
    name = f"stalls-starve-{kernel}"
    (waiter,) = pids(name, "wait-rcu")
    (root,) = roots_of(name, waiter)
    assert root.comm is not None
    assert root.comm.startswith(("rcu_preempt", "rcu_sched"))
    assert list(owners_of(name, waiter).values()) == ["likely"]
    assert "rt-hog" in root.reason


def test_a_spinlock_has_the_owner_that_stalls_have() -> None:
    """Nothing records it: by code that refers to it, with interrupts off."""
    name = "stalls-locks-6.12"
    (waiter,), (owner,) = pids(name, "want-lock"), pids(name, "own-lock")
    assert owners_of(name, waiter) == {owner: "evidence"}


# --- grace periods of other kinds, and who holds them up


@pytest.fixture(params=["fieldgrace-6.1", "fieldgrace-6.12", "fieldgrace-7.x"])
def dump(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def lock_of(name: str, waiter: int) -> LockRow:
    (lock,) = (each for each in report_of(name).locks if waiter in each.waiters)
    return lock


@pytest.mark.parametrize("waiter", ["first", "third"])
def test_expedited_one_is_held_up_by_a_reader(dump: str, waiter: str) -> None:
    """Which was preempted, so that RCU records it."""
    known = said(dump)
    assert owners_of(dump, known[waiter]) == {known["reader"]: "exact"}
    text = "expedited RCU grace period, held up by a reader"
    assert lock_of(dump, known[waiter]).what == text


def test_expedited_ones_are_one_chain(dump: str) -> None:
    """The second waits for the first, and the worker that runs it for the reader."""
    known = said(dump)
    assert owners_of(dump, known["second"]) == {known["first"]: "exact"}
    (worker,) = (
        each.pid
        for each in report_of(dump).waits
        if each.caller == "synchronize_rcu_expedited_wait_once"
    )
    for waiter in (*(known[each] for each in ("first", "second", "third")), worker):
        (root,) = roots_of(dump, waiter)
        assert root.pid == known["reader"]


@pytest.mark.parametrize("kernel", ["6.1", "6.12"])
def test_queue_behind_the_nodes_is_none_of_rcu(kernel: str) -> None:
    """Queues of others lie where those of a larger array of nodes would."""
    prog = open_dump(f"memory-{kernel}", "dwarf")
    context = context_of(prog)
    nodes = prog["rcu_state"].node
    node = prog.type("struct rcu_node")
    queue = nodes.address_ + node.member("exp_wq").offset
    assert awaited_expedited(context, queue) is not None
    for number in (len(nodes), 4095):
        assert awaited_expedited(context, queue + number * node.size) is None


def test_tasks_that_do_not_switch_hold_up_rcu_tasks(dump: str) -> None:
    """Both spin in the kernel, one of them with a mutex."""
    known = said(dump)
    owners = {known["spinner"]: "exact", known["owner"]: "exact"}
    assert owners_of(dump, known["tasks"]) == owners
    text = "RCU Tasks grace period, held up by 2 tasks that have not switched"
    assert lock_of(dump, known["tasks"]).what == text


def test_task_in_user_mode_does_not_hold_up_rcu_tasks() -> None:
    """Where the kernel has noted that it is."""
    name = "fieldgrace-6.12"
    known = said(name)
    prog = open_dump(name, "btf")
    holdouts = set(_holdouts(context_of(prog)))
    task = find_task(prog, known["spinner"])
    assert task.value_() in holdouts
    overwrite(task.rcu_tasks_idle_cpu, 3)
    assert set(_holdouts(context_of(prog))) == holdouts - {task.value_()}


def test_waiters_for_each_kind_of_grace_period(dump: str) -> None:
    """As msa-cpus counts them; RCU's grace periods are none of RCU Tasks."""
    known = said(dump)
    rcu = json_of("cpus", dump, "--stalls")["stalls"]["rcu"]
    waiting = {each["pid"]: each["expedited"] for each in rcu["waiters"]}
    assert known["tasks"] not in waiting
    assert all(waiting[known[each]] for each in ("first", "second", "third"))
    assert len(waiting) == 3
    readers = {each["pid"] for each in rcu["expedited_tasks"]}
    assert readers == {known["reader"]}


def test_reader_and_not_who_takes_turns_with_it(dump: str) -> None:
    known = said(dump)
    found = json_of("cpus", dump, "--stalls")["stalls"]["found"]
    (stall,) = (each for each in found if each["code"] == "rcu-stalled")
    assert (stall["culprit_cpu"], stall["culprit_pid"]) == (2, known["reader"])
    assert re.search(
        rf"pid {known['reader']} gm-reader is still one, and (runs|gets turns) on cpu2"
        "; 3 (wait for an expedited one|tasks wait for the grace period)$",
        stall["text"],
    )


# --- a real-time task whose time is used up


def test_owner_is_a_throttled_realtime_task(dump: str) -> None:
    """By sched_rt_runtime_us, which limits them until v6.12."""
    known = said(dump)
    (root,) = roots_of(dump, known["waiter"])
    assert root.pid == known["owner"]
    is_throttled = root.reason == "throttled by sched_rt_runtime_us"
    found = json_of("report", dump)["verdicts"]
    texts = [each["text"] for each in found if each["code"] == "cpu-throttled"]
    # The guest asked a moment before, and it runs for 60 ms of each second.
    if known["throttled"] is None:
        assert not is_throttled
        assert not texts
        assert re.match(r"(runs on|waits for) CPU 1\b", root.reason)
    elif is_throttled:
        (text,) = texts
        assert text.startswith(f"pid {known['owner']} owner, for which 2 tasks wait")
        assert text.endswith("is throttled by sched_rt_runtime_us")
    else:
        assert root.reason.startswith("runs on CPU 1 ")


# --- a log that has lost what was before


def test_damaged_number_of_a_message() -> None:
    """Then it is not said how many were before it."""
    prog = open_dump("fieldgrace-6.12", "btf")
    ring = prog["prb"].desc_ring
    before = next(iter(read_log(Reader(prog), LossLog())))
    assert before.sequence > 1000
    place = before.sequence % (1 << ring.count_bits.value_())
    overwrite(ring.infos[place].seq, before.sequence + (1 << 40) + 1)
    assert next(iter(read_log(Reader(prog), LossLog()))).sequence == 0


def test_where_the_log_begins(dump: str) -> None:
    report = json_of("report", dump)
    (note,) = (each for each in report["notes"] if each["code"] == "log-begins")
    found = re.fullmatch(
        r"the kernel's log begins at [\dms.]+s: ([\d,]+) messages before that are "
        "overwritten",
        note["text"],
    )
    assert found is not None
    # The kernel may have said something since the guest asked.
    left = get_printk_records(open_dump(dump, "dwarf"))
    lost = int(found[1].replace(",", ""))
    assert lost == left[0].seq >= said(dump)["first_message"]


def test_a_taint_whose_cause_is_lost(dump: str) -> None:
    found = json_of("report", dump)["verdicts"]
    (warned,) = (each for each in found if each["code"] == "kernel-warnings")
    assert warned["text"] == "it warned (taint W), which the log no longer has"
