# SPDX-License-Identifier: LGPL-2.1-or-later

"""Stalls that a module of the lab makes: each culprit right, and none made up."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from msatools.commands.cpus import COMMAND

from fixtures import lab
from msatools.program import open_target
from tests.support.calls import call
from tests.support.dumps import spinning

KERNELS = ("6.1", "6.12", "7.x")
SECOND = 1_000_000_000
TIMER_NS = SECOND // 2
"""The timer of a CPU without softirqs is due within this time from then on."""
SLOW_NS = 5 * SECOND
"""By how much a time may be off: a busy host gives a guest's CPU no time for so long,
and its last tick was before that."""


@dataclass(frozen=True)
class Guest:
    """A dump of the lab, what the command says, and what the guest said."""

    run: lab.Run
    stalls: dict[str, Any]
    said: dict[str, Any]
    taken_ns: int

    @property
    def found(self) -> list[dict[str, Any]]:
        """What stands still for longer than its limit."""
        return [each for each in self.stalls["found"] if each["over_limit"]]

    def one(self, kind: str, cpu: int | None = None) -> dict[str, Any]:
        """Return the stall of a kind, of the CPU that it is about."""
        (found,) = (
            each
            for each in self.found
            if each["kind"] == kind and (cpu is None or each["cpus"][0] == cpu)
        )
        return found

    def thread(self, name: str) -> dict[str, Any]:
        """Return what the guest says of the first thread that does something."""
        made: dict[str, Any] = next(
            each for each in self.said["stalls"] if each["name"] == name
        )
        return made

    def hog(self, name: str) -> dict[str, Any]:
        (made,) = (each for each in self.said.get("hogs", ()) if each["name"] == name)
        return dict(made)

    def cpu(self, number: int) -> dict[str, Any]:
        (row,) = (row for row in self.stalls["cpus"] if row["cpu"] == number)
        return dict(row)

    def lasted_ns(self, name: str) -> int:
        """Return the time since a thread was in place, by the guest's own clock."""
        return self.taken_ns - int(self.thread(name)["start_ns"])


def reported(dump: str) -> dict[str, Any]:
    words = (str(lab.build(dump).kept), "--types", "btf", "--stalls", "--json")
    found: dict[str, Any] = call(COMMAND, *words, opening=open_target).json
    return found


@cache
def guest(name: str, kernel: str) -> Guest:
    run = lab.build(f"{name}-{kernel}")
    report = reported(f"{name}-{kernel}")
    said = spinning(run)
    return Guest(run, report["stalls"], said, report["taken_at_ns"])


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def culprit(stall: dict[str, Any]) -> tuple[int | None, int | None]:
    return stall["culprit_cpu"], stall["culprit_pid"]


def test_locks(kernel: str) -> None:
    seen = guest("stalls-locks", kernel)
    owner = seen.thread("own-lock")
    root = owner["cpu"], owner["pid"]
    # The owner of the lock.
    stall = seen.one("no-tick")
    assert (stall["cpus"], culprit(stall)) == ([owner["cpu"]], root)
    assert abs(stall["for_ns"] - seen.lasted_ns("own-lock")) < SLOW_NS
    assert seen.cpu(owner["cpu"])["interrupts"] == "off"
    # Who spins for the lock, and who waits for its CPU.
    wants, calls = seen.thread("want-lock"), seen.thread("call-cpu")
    stall = seen.one("no-switch", wants["cpu"])
    assert (culprit(stall), stall["confidence"]) == (root, "evidence")
    wanted = seen.cpu(wants["cpu"])["wanted"]
    assert wanted["address"] == seen.said["spinlock"]
    assert wanted["name"] == "sm_spinlock"
    assert [each["pid"] for each in wanted["owners"]] == [owner["pid"]]
    if seen.cpu(calls["cpu"])["preempt_count"]:
        # Newer kernels wait with preemption on.
        stall = seen.one("no-switch", calls["cpu"])
        assert (culprit(stall), stall["confidence"]) == (root, "exact")
    stall = seen.one("cross-call")
    assert (stall["cpus"], culprit(stall)) == ([owner["cpu"], calls["cpu"]], root)
    assert {
        "cpu": owner["cpu"],
        "function": "sm_called",
        "caller": calls["cpu"],
        "kind": "call",
    } in seen.stalls["calls"]
    # Those that are their own cause.
    for name in ("softirq-off", "syscall"):
        thread = seen.thread(name)
        stall = seen.one("no-switch", thread["cpu"])
        assert culprit(stall) == (thread["cpu"], thread["pid"])
        assert abs(stall["for_ns"] - seen.lasted_ns(name)) < SLOW_NS
    assert seen.cpu(seen.thread("softirq-off")["cpu"])["softirq_count"] == 2
    assert seen.cpu(seen.thread("syscall")["cpu"])["call"] == "write"
    off = seen.thread("softirq-off")["cpu"]
    # The first of each list of its CPU's timers; one of the kernel's own may have been
    # due before that of the thread.
    since_ns = seen.lasted_ns("softirq-off") - TIMER_NS
    assert any(
        each["function"] == "sm_timer_late" or each["late_ns"] > since_ns
        for each in seen.stalls["timers"]
        if (each["cpu"], each["kind"]) == (off, "timer")
    )
    # They hold up RCU, but for those that passed before they were in place; the three
    # tasks that wait are known.
    stall = seen.one("grace-period")
    names = ("own-lock", "want-lock", "softirq-off", "syscall", "call-cpu")
    spinning = {seen.thread(name)["cpu"] for name in names}
    assert {owner["cpu"]} <= {*stall["cpus"]} <= spinning
    assert culprit(stall) == root
    waits = [each for each in seen.said["stalls"] if each["name"] == "wait-rcu"]
    found = {each["pid"] for each in seen.stalls["rcu"]["waiters"]}
    assert {each["pid"] for each in waits} <= found
    assert stall["waiting"] == len(found)


def test_readers_and_softirqs(kernel: str) -> None:
    seen = guest("stalls-rcu", kernel)
    softirq = seen.thread("in-softirq")
    stall = seen.one("no-switch")
    assert stall["cpus"] == [softirq["cpu"]]
    held = seen.cpu(softirq["cpu"])
    assert (held["why"], held["mode"]) == ("softirq", "softirq")
    assert held["comm"] == f"ksoftirqd/{softirq['cpu']}"
    reader, hog = seen.thread("read-rcu"), seen.hog("rt-hog")
    stall = seen.one("grace-period")
    tasks = [each["pid"] for each in seen.stalls["rcu"]["tasks"]]
    assert tasks == [reader["pid"]]
    # The CPU in a softirq, too, unless it passed before.
    assert {*stall["cpus"]} <= {softirq["cpu"]}
    assert any(
        f"pid {reader['pid']} " in step and f"pid {hog['pid']} rt-hog" in step
        for step in (stall["text"], *stall["chain"])
    )
    # A storm of interrupts takes time, but its CPU ticks and switches.
    assert not [
        each
        for each in seen.found
        if seen.thread("storm")["cpu"] in each["cpus"] and each["code"] == "cpu-stalled"
    ]


@pytest.mark.long
def test_thread_of_rcu_that_starves(kernel: str) -> None:
    seen = guest("stalls-starve", kernel)
    hog = seen.hog("rt-hog")
    stall = seen.one("starved")
    assert culprit(stall) == (hog["cpu"], hog["pid"])
    assert "rcu_" in stall["text"]
    stall = seen.one("grace-period")
    assert culprit(stall) == (hog["cpu"], hog["pid"])


def test_machine_that_does_not_stop(kernel: str) -> None:
    seen = guest("stalls-stop", kernel)
    missing = seen.thread("in-interrupt")
    stall = seen.one("stop-machine")
    assert stall["culprit_cpu"] == missing["cpu"]
    held = seen.cpu(missing["cpu"])
    assert (held["why"], held["mode"]) == ("interrupt", "interrupt")
    assert (held["interrupts"], held["function"]) == ("off", "sm_spin_on")
    stop = seen.stalls["stop_machine"]
    assert (stop["function"], stop["step"]) == ("sm_stopped", "prepare")
    assert (stop["stopped"], stop["missing"]) == ([0, 2, 3, 4], [missing["cpu"]])
    assert seen.one("no-tick")["culprit_cpu"] == missing["cpu"]
    # RCU may or may not have had something to do.
    for stall in seen.found:
        assert stall["culprit_cpu"] in (missing["cpu"], *stop["stopped"]), stall


# --- crashes by the kernel's own watchdogs


@pytest.mark.long
def test_soft_lockup(kernel: str) -> None:
    seen = guest("watchdogs-soft", kernel)
    thread = seen.thread("preempt-off")
    (stall,) = seen.found
    assert (stall["kind"], culprit(stall)) == (
        *("no-switch", (thread["cpu"], thread["pid"])),
    )


@pytest.mark.long
def test_hard_lockup() -> None:
    seen = guest("watchdogs-hard", "6.12")
    owner, wants = seen.thread("own-lock"), seen.thread("want-lock")
    stall = seen.one("no-tick")
    assert culprit(stall) == (owner["cpu"], owner["pid"])
    assert f"cpu{wants['cpu']} waits for it" in stall["text"]


@pytest.mark.long
def test_stall_of_rcu(kernel: str) -> None:
    seen = guest("watchdogs-rcu", kernel)
    owner = seen.thread("own-lock")
    stall = seen.one("grace-period")
    assert culprit(stall) == (owner["cpu"], owner["pid"])
    waits = {each["pid"] for each in seen.said["stalls"] if each["name"] == "wait-rcu"}
    assert waits <= {each["pid"] for each in seen.stalls["rcu"]["waiters"]}


@pytest.mark.long
def test_hung_task_stalls_no_cpu(kernel: str) -> None:
    assert guest("watchdogs-hung", kernel).found == []


QUIET = (
    *("memory-6.1", "memory-6.12", "tasks-6.12", "crash-6.12", "zombies-6.12"),
    *("lockmodule-6.12", "crashes-nested-6.12"),
)


@pytest.mark.parametrize("name", ["cpulock-6.1"])
def test_timers_that_need_not_wake_a_cpu(name: str) -> None:
    """On an nohz_full CPU that runs a task in user mode, they may be late."""
    report = reported(name)
    assert [each for each in report["stalls"]["found"] if each["over_limit"]] == []
    tickless = 7
    assert tickless not in [each["cpu"] for each in report["stalls"]["timers"]]


@pytest.mark.parametrize("name", QUIET)
def test_nothing_stalls_elsewhere(name: str) -> None:
    """Idle CPUs without ticks, hogs, and thousands of tasks are no stalls."""
    report = reported(name)
    # A panic takes the CPUs that it stops out of the online mask.
    assert all(cpu["online"] for cpu in report["cpus"])
    # A busy host lets a CPU stand for a moment.
    found = report["stalls"]["found"]
    assert not [
        each for each in found if each["over_limit"] or each["for_ns"] >= SLOW_NS
    ]
    assert [each for each in report["findings"] if "stalled" in each["code"]] == []
