# SPDX-License-Identifier: LGPL-2.1-or-later

"""StallEvidence of stalls that is made up."""

from collections.abc import Iterable
from typing import Any

from msatools.cpus.model import (
    GracePeriod,
    GracePeriodTask,
    HeldCpu,
    RunnableTask,
    RunQueue,
    SchedClass,
    SpinlockOwner,
    StallLimits,
    WantedLock,
)
from msatools.cpus.stall_chains import StallEvidence
from msatools.program.model import Address

SECOND = 1_000_000_000
LIMITS = StallLimits(
    no_tick_ns=10 * SECOND,
    no_switch_ns=20 * SECOND,
    rcu_ns=21 * SECOND,
    call_ns=5 * SECOND,
    soft_watchdog=True,
    hard_watchdog=False,
)


def task(
    pid: int, comm: str, wait_s: float, sched_class: SchedClass = "fair", **words: Any
) -> RunnableTask:
    made: dict[str, Any] = {
        "pid": pid,
        "comm": comm,
        "sched_class": sched_class,
        "policy": "FIFO" if sched_class == "realtime" else "OTHER",
        "priority": 20,
        "rt_priority": 50 if sched_class == "realtime" else None,
        "nice": 0,
        "deadline_ns": None,
        "wait_ns": int(wait_s * SECOND),
        "wait_bound": "exact",
        "cgroup": None,
        "throttled": False,
    }
    return RunnableTask(**made | words)


def queue(
    cpu: int, current: RunnableTask | None, waiting: Iterable[RunnableTask] = ()
) -> RunQueue:
    tasks = tuple(waiting)
    return RunQueue(
        cpu=cpu,
        running=len(tasks),
        current=current,
        waiting=tasks,
        clock_ns=0,
        lag_ns=0,
        ticked_ns=0,
        switched_ns=None if current is None else current.wait_ns,
        lag_why=None,
        panicked=False,
    )


def held(cpu: int, **words: Any) -> HeldCpu:
    made: dict[str, Any] = {
        "cpu": cpu,
        "pid": 100 + cpu,
        "comm": f"task{cpu}",
        "policy": None,
        "running_ns": 30 * SECOND,
        "tick_late_ns": 0,
        "ticked_ns": 0,
        "watchdog_ns": None,
        "interrupts": "on",
        "preempt_count": 1,
        "softirq_count": 0,
        "mode": "task",
        "function": "f",
        "call": None,
        "why": "kernel-thread",
        "wanted": None,
        "calls_cpus": (),
        "waiting": 0,
        "starved": (),
        "frames": (),
    }
    return HeldCpu(**made | words)


def lock(*owners: int, name: str | None = "the_lock") -> WantedLock:
    """A spinlock whose owners run on some CPUs."""
    return WantedLock(
        address=Address(0xFFFF_8880_0000_1000),
        name=name,
        owners=tuple(
            SpinlockOwner(
                pid=100 + cpu, comm=f"task{cpu}", cpu=cpu, confidence="evidence"
            )
            for cpu in owners
        ),
    )


def reader(pid: int, comm: str, **words: Any) -> GracePeriodTask:
    made: dict[str, Any] = {"pid": pid, "comm": comm, "wait_ns": 30 * SECOND}
    return GracePeriodTask(**made | words)


def grace_period(**words: Any) -> GracePeriod:
    made: dict[str, Any] = {
        "active": True,
        "age_ns": 30 * SECOND,
        "sequence": 5,
        "cpus": (),
        "tasks": (),
        "expedited_cpus": (),
        "expedited_tasks": (),
        "thread": reader(17, "rcu_preempt", wait_ns=SECOND // 100, state="I"),
        "callbacks": 3,
        "waiters": (),
    }
    return GracePeriod(**made | words)


def evidence(*cpus: HeldCpu, **words: Any) -> StallEvidence:
    made: dict[str, Any] = {
        "limits": LIMITS,
        "cpus": {each.cpu: each for each in cpus},
        "queues": (),
        "rcu": None,
        "calls": (),
        "stop_machine": None,
        "timers": (),
    }
    return StallEvidence(**made | words)
