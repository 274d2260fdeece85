# SPDX-License-Identifier: LGPL-2.1-or-later

"""Waits for a grace period of RCU, by what the guests did."""

import json
import re
from functools import cache
from typing import Any

import pytest

from fixtures import lab
from msatools.locks.report import LocksReport, Root
from tests.locks.reports import logged_report
from tests.support.dumps import open_dump

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
    ticks = prog["jiffies"].value_() - state.gp_start.value_() + 1
    start_ns = prog["last_jiffies_update"].value_() - ticks * prog["tick_nsec"].value_()
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
