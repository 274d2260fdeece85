# SPDX-License-Identifier: LGPL-2.1-or-later

"""What follows from evidence of stalls: culprits, chains, limits."""

import pytest
from msgspec.structs import replace

from msatools.cpus.model import CrossCall, OverdueTimer, Stall, StopMachine
from msatools.cpus.stall_findings import find_stalls, found_by_kernel
from tests.cpus.stalls.made import (
    SECOND,
    evidence,
    grace_period,
    held,
    lock,
    queue,
    reader,
    task,
)

OFF = {"tick_late_ns": 31 * SECOND, "interrupts": "off"}
SPINS = {"why": "spins-for-lock", "function": "g"}


def only(found: tuple[Stall, ...]) -> Stall:
    (stall,) = found
    return stall


def test_cpu_without_ticks() -> None:
    stall = only(find_stalls(evidence(held(5, **OFF, waiting=2))))
    assert stall.text == (
        "cpu5 has had no tick for 31.0s: pid 105 task5 is in f with interrupts off; "
        "2 tasks wait"
    )
    assert (stall.code, stall.kind, stall.culprit_cpu, stall.culprit_pid) == (
        *("cpu-stalled", "no-tick", 5, 105),
    )
    assert (stall.over_limit, stall.chain, stall.confidence) == (True, (), "exact")


def test_what_the_kernel_found_is_over_the_limit() -> None:
    """Its detectors count from their last sample."""
    late = held(1, tick_late_ns=7 * SECOND, interrupts="off")
    brief = held(2, tick_late_ns=2 * SECOND, interrupts="off")
    said = found_by_kernel("Kernel panic - not syncing: Hard LOCKUP")
    found = find_stalls(evidence(late, brief, found=said))
    assert [(stall.cpus, stall.over_limit) for stall in found] == [
        *(((1,), True), ((2,), False)),
    ]
    assert not only(find_stalls(evidence(late))).over_limit
    assert found_by_kernel("Kernel panic - not syncing: Out of memory") == frozenset()
    assert found_by_kernel(None) == frozenset()


def test_the_whole_chain() -> None:
    """The one that the guide explains."""
    waiters = tuple(reader(200 + n, "mount", wait_ns=SECOND) for n in range(14))
    found = find_stalls(
        evidence(
            held(5, **SPINS, wanted=lock(2), preempt_count=1),
            held(2, **OFF),
            rcu=grace_period(cpus=(5,), age_ns=31 * SECOND, waiters=waiters),
        )
    )
    stall = found[-1]
    assert stall.text == (
        "cpu5 holds up RCU for 31.0s: pid 105 task5 spins for spinlock the_lock in g "
        "with preemption off, which cpu2's pid 102 task2 has with interrupts off; "
        "14 tasks wait for the grace period"
    )
    assert stall.chain[1:] == ("cpu2: pid 102 task2 is in f with interrupts off",)
    assert (stall.culprit_cpu, stall.culprit_pid, stall.waiting) == (2, 102, 14)
    assert stall.confidence == "evidence"
    assert found[0].kind == "no-tick"
    assert found[0].text.endswith("; cpu5 waits for it")


def test_lock_without_a_known_owner_has_no_culprit() -> None:
    waits = [task(9, "other", 25)]
    for wanted in (lock(), lock(2, 3), None):
        spins = held(1, **SPINS, wanted=wanted)
        found = find_stalls(
            evidence(spins, queues=[queue(1, task(101, "task1", 25), waits)])
        )
        stall = only(found)
        assert (stall.culprit_cpu, stall.culprit_pid) == (None, None)
        assert stall.chain == ()


def test_owner_that_does_not_run() -> None:
    """Such as one that slept with the lock: the chain ends with the spinning CPU."""
    wanted = lock(7)
    found = find_stalls(
        evidence(
            held(1, **SPINS, wanted=wanted),
            queues=[queue(1, task(101, "task1", 25), [task(9, "other", 25)])],
        )
    )
    assert only(found).chain[-1] == "cpu7: what it does is not known"
    assert only(found).culprit_cpu is None


def test_cpus_that_wait_for_each_other() -> None:
    first = held(1, **SPINS, **OFF, wanted=lock(2))
    second = held(2, **SPINS, **OFF, wanted=lock(1))
    found = find_stalls(evidence(first, second))
    assert [stall.cpus for stall in found] == [(1,), (2,)]
    assert found[0].chain[-1] == "cpu1 and cpu2 wait for each other"


def test_throttled_tasks_do_not_wait() -> None:
    waits = [task(9, "limited", 60, throttled=True)]
    stuck = queue(3, task(103, "task3", 60), waits)
    assert find_stalls(evidence(held(3), queues=[stuck])) == ()


def test_starved_tasks() -> None:
    hog = task(50, "hog", 3, "realtime")
    waits = [task(9, "ksoftirqd/2", 28), task(8, "worker", 2)]
    stall = only(find_stalls(evidence(queues=[queue(2, hog, waits)])))
    assert (stall.code, stall.over_limit) == ("cpu-starved", True)
    assert stall.text == (
        "cpu2 runs pid 50 hog (FIFO 50), and 2 tasks have not run for 28.0s: "
        "pid 9 ksoftirqd/2, 8 worker"
    )
    assert (stall.culprit_cpu, stall.culprit_pid, stall.waiting) == (2, 50, 2)


def test_time_after_a_crash_does_not_count() -> None:
    """A kernel that panics stops its other CPUs, and may tick on one for hours."""
    hour = 3600 * SECOND
    halted = held(1, tick_late_ns=hour, why="panic")
    rcu = grace_period(cpus=(1, 2), age_ns=hour + SECOND // 10)
    assert find_stalls(evidence(halted, rcu=rcu, halted_ns=hour)) == ()
    # What stood still before, still does.
    stuck = held(2, tick_late_ns=hour + 12 * SECOND, interrupts="off")
    stall = only(find_stalls(evidence(halted, stuck, rcu=rcu, halted_ns=hour)))
    assert (stall.kind, stall.cpus, stall.for_ns) == ("no-tick", (2,), 12 * SECOND)


def test_hypervisor_that_does_not_run_a_cpu() -> None:
    late = held(1, tick_late_ns=12 * SECOND, why="host", preempt_count=1)
    stall = only(find_stalls(evidence(late)))
    assert stall.text == (
        "cpu1 has had no tick for 12.0s: pid 101 task1 was in f with interrupts on, "
        "so the hypervisor has not run this CPU"
    )


# --- RCU


def test_idle_cpus_do_not_hold_up_rcu() -> None:
    """They pass a quiescent state as soon as RCU's thread looks."""
    idle = queue(1, task(0, "swapper/1", 60, "idle"))
    stall = only(find_stalls(evidence(queues=[idle], rcu=grace_period(cpus=(1,)))))
    assert stall.text.startswith("RCU has not ended a grace period for 30.0s")
    assert stall.culprit_cpu is None


@pytest.mark.parametrize(
    ("current", "wait_ns", "does"),
    [
        (77, 30 * SECOND, "runs on cpu1"),
        (50, SECOND // 100, "gets turns on cpu1"),
        (0, 30 * SECOND, "has had no turn on cpu1 for 30.0s"),  # it is throttled
    ],
)
def test_reader_that_runs_again(current: int, wait_ns: int, does: str) -> None:
    """Who takes turns with it is not in its way."""
    other = task(current, "other", 3, "idle" if not current else "fair")
    waits = [] if current == 77 else [task(77, "reader", wait_ns / SECOND)]
    found = find_stalls(
        evidence(
            queues=[queue(1, other, waits)],
            rcu=grace_period(
                tasks=(
                    replace(reader(77, "reader", state="R", cpu=1), wait_ns=wait_ns),
                )
            ),
        )
    )
    stall = next(each for each in found if each.code == "rcu-stalled")
    assert stall.text.endswith(f"as a reader: pid 77 reader is still one, and {does}")
    assert (stall.culprit_cpu, stall.culprit_pid) == (1, 77)


def test_thread_of_rcu_that_a_late_cpu_is_to_wake() -> None:
    thread = reader(17, "rcu_preempt", wait_ns=29 * SECOND, state="I")
    call = CrossCall(
        cpu=1, function=None, caller=None, kind="wake-up", pid=17, comm="rcu_preempt"
    )
    rcu = grace_period(active=False, thread=thread)
    found = find_stalls(evidence(held(1, **OFF), rcu=rcu, calls=[call]))
    stall = next(each for each in found if each.code == "rcu-stalled")
    assert stall.text == (
        "RCU makes no progress for 30.0s: its thread 17 rcu_preempt has not run, "
        "as cpu1 is to wake it: pid 101 task1 is in f with interrupts off"
    )
    assert (stall.culprit_cpu, stall.culprit_pid) == (1, 101)
    # A CPU that ticks wakes it at once.
    (stall,) = find_stalls(evidence(held(1), rcu=rcu, calls=[call]))
    assert stall.culprit_cpu is None


def test_expedited_grace_period_is_as_old_as_who_waits_longest() -> None:
    rcu = grace_period(
        active=False,
        age_ns=None,
        expedited_cpus=(4,),
        waiters=(
            reader(9, "sync", wait_ns=25 * SECOND, expedited=True),
            reader(8, "sync", wait_ns=40 * SECOND),
        ),
    )
    stall = next(
        each
        for each in find_stalls(evidence(held(4, **OFF), rcu=rcu))
        if each.code == "rcu-stalled"
    )
    assert (stall.for_ns, stall.culprit_cpu) == (25 * SECOND, 4)


# --- what CPUs do together


def test_cross_calls() -> None:
    call = CrossCall(cpu=1, function="drain", caller=3, kind="call")
    caller = queue(3, task(103, "task3", 8))
    found = find_stalls(
        evidence(
            held(1, **OFF),
            held(3, why="waits-for-call", calls_cpus=(1,)),
            queues=[caller],
            calls=[call],
        )
    )
    stall = next(each for each in found if each.kind == "cross-call")
    assert stall.text == (
        "cpu3 waits for cpu1 to run drain, for at most 8.0s: cpu1: pid 101 task1 is in "
        "f with interrupts off"
    )
    assert (stall.over_limit, stall.culprit_cpu) == (True, 1)
    # Who is preempted meanwhile may have waited for longer than it has run.
    preempted = held(3, why="waits-for-call", calls_cpus=(1,), preempt_count=0)
    found = find_stalls(
        evidence(held(1, **OFF), preempted, queues=[caller], calls=[call])
    )
    assert next(s for s in found if s.kind == "cross-call").for_ns == 31 * SECOND
    unknown = replace(call, caller=None)
    found = find_stalls(evidence(held(1, **OFF), calls=[unknown]))
    assert found[1].text.startswith("a task that does not run waits for cpu1 to run")
    # A CPU that takes interrupts is going to run it.
    assert not find_stalls(evidence(held(1), queues=[caller], calls=[call]))


def test_stop_machine() -> None:
    stop = StopMachine(
        function="text_poke",
        step="prepare",
        stopped=(0, 2),
        missing=(1,),
        since_ns=12 * SECOND,
    )
    cpus = [held(cpu, why="stopped", tick_late_ns=12 * SECOND) for cpu in (0, 2)]
    found = find_stalls(evidence(*cpus, held(1, **OFF), stop_machine=stop))
    assert [stall.kind for stall in found] == ["no-tick", "stop-machine"]
    assert found[1].text == (
        "cpu0,2 stopped to run text_poke (stop_machine) 12.0s ago, and cpu1 is "
        "awaited: cpu1: pid 101 task1 is in f with interrupts off"
    )
    assert found[1].culprit_cpu == 1


def test_timers_that_are_not_run() -> None:
    late = OverdueTimer(cpu=4, kind="timer", function="expire", late_ns=15 * SECOND)
    off = held(4, softirq_count=2, preempt_count=0)
    stall = only(find_stalls(evidence(off, timers=[late])))
    assert stall.text == (
        "cpu4 has not run its timers for 15.0s (the first is expire): pid 104 task4 is "
        "in f with softirqs off"
    )
    assert stall.code == "cpu-stalled"
    hog = held(4, policy="FIFO 50", why="user-mode", mode="user")
    assert only(find_stalls(evidence(hog, timers=[late]))).code == "cpu-starved"
    # A CPU that does not tick at all is reported for that alone.
    (stall,) = find_stalls(evidence(held(4, **OFF), timers=[late]))
    assert stall.kind == "no-tick"


def test_order_is_by_limit_then_kind() -> None:
    found = find_stalls(
        evidence(
            held(1, tick_late_ns=2 * SECOND, interrupts="off"),
            rcu=grace_period(cpus=(1,)),
        )
    )
    assert [(stall.kind, stall.over_limit) for stall in found] == [
        ("grace-period", True),
        ("no-tick", False),
    ]
