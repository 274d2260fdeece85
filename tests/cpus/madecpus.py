# SPDX-License-Identifier: LGPL-2.1-or-later

"""Make reports of CPUs by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

from msatools.cpus.model import (
    BoundTask,
    Cpu,
    CpuSet,
    CpusReport,
    Diagnostic,
    Irq,
    Processor,
    RunnableTask,
    Running,
    RunQueue,
    SetTasks,
    Vector,
)
from msatools.program.model import Address
from tests.locks.madelocks import SECOND, TARGET

ROOT_DOMAIN = Address(0xFFFF888000001000)

_PARTS = ("usr", "sys", "irq", "wt", "st", "gst", "idl")

NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("minf", "mjf", "xcal", "tlb", "intr", "soft", "csw", "runq")),
    **dict.fromkeys(f"{part}_ns" for part in (*_PARTS, "nice", "softirq")),
    "current": None,
}
"""Values of a CPU about which nothing is known."""


def running(pid: int = 0, comm: str | None = None, sched_class: Any = None) -> Running:
    """Make the task that a CPU runs; 0 is the idle one."""
    return Running(
        pid=pid,
        comm=comm or (f"task-{pid}" if pid else "swapper/0"),
        sched_class=sched_class or ("fair" if pid else "idle"),
    )


def processor(cpu: int, **others: Any) -> Processor:
    """Make a CPU: two per core, two cores per package and node."""
    first = cpu - cpu % 2
    given: dict[str, Any] = {
        "active": True,
        "hotplug": "online",
        "hotplug_target": None,
        "package": cpu // 4,
        "die": 0,
        "core": cpu % 4 // 2,
        "thread": cpu % 2,
        "siblings": (first, first + 1),
        "node": cpu // 4,
        "capacity": 1024,
        "idle_state": None,
        "idle_depth": None,
        "tick_stopped": True,
    }
    return Processor(**(given | others))


def times(**seconds: float) -> dict[str, int]:
    """Make the times of a CPU in seconds, 0 by default: ``times(usr=2, idl=8)``."""
    given = dict.fromkeys((*_PARTS, "nice", "softirq"), 0.0)
    return {f"{k}_ns": round(v * SECOND) for k, v in (given | seconds).items()}


def cpu(number: int, **others: Any) -> Cpu:
    """Make a CPU that has been idle for 100 seconds."""
    given: dict[str, Any] = {
        "online": True,
        "set": "default",
        "state": ("on", "idle"),
        **dict.fromkeys(("minf", "mjf", "xcal", "tlb"), 0),
        "intr": 1234,
        "soft": 567,
        "csw": 4125,
        "runq": 0,
        **times(idl=100),
        "current": running(),
        "processor": processor(number),
    }
    return Cpu(cpu=number, **(given | others))


def offline(number: int, **others: Any) -> Cpu:
    return cpu(number, **({**NOTHING, "online": False, "state": ("off",)} | others))


def cpuset(name: str, cpus: Sequence[int], **others: Any) -> CpuSet:
    """Make a set, by default the default set or an isolated one."""
    is_default = name == "default"
    given: dict[str, Any] = {
        "kind": "root" if is_default else "isolated",
        "source": "/" if is_default else "cpuset partition",
        "asked": None,
        "exclusive": None,
        "nodes": (0,),
        "reason": None,
        "root_domain": ROOT_DOMAIN if is_default else None,
        "balanced": is_default,
        "irqs_routed": (24, 25, 26) if is_default else (),
        "irqs_allowed": (24, 25, 26, 27) if is_default else (),
        "irqs_managed": 0,
    }
    return CpuSet(name=name, cpus=tuple(cpus), **(given | others))


def bound(pid: int, cpus: Sequence[int], why: str = "", **others: Any) -> BoundTask:
    given: dict[str, Any] = {
        "comm": f"task-{pid}",
        "cpu": 0,
        "cgroup": "/",
        "kthread": False,
    }
    return BoundTask(pid=pid, cpus=tuple(cpus), why=why, **(given | others))


def tasks(
    members: int = 0,
    pinned: Sequence[BoundTask] = (),
    straying: Sequence[BoundTask] = (),
    percpu_threads: int = 0,
) -> SetTasks:
    return SetTasks(
        members=members,
        pinned=tuple(pinned),
        straying=tuple(straying),
        percpu_threads=percpu_threads,
    )


def irq(number: int, counts: Mapping[int, int], **others: Any) -> Irq:
    """Make a device interrupt that can go to the CPUs in *counts*."""
    given: dict[str, Any] = {
        "name": f"eth{number - 24}",
        "chip": "PCI-MSI",
        "affinity": tuple(sorted({*counts, *others.get("effective", ())})),
        "effective": tuple(counts)[:1],
        "managed": False,
        "total": sum(counts.values()),
        "share": None,
    }
    return Irq(irq=number, counts=counts, **(given | others))


def vector(name: str, counts: Mapping[int, int], **others: Any) -> Vector:
    given: dict[str, Any] = {"text": f"What {name} is", "total": sum(counts.values())}
    return Vector(name=name, counts=counts, **(given | others))


def queued(pid: int, **others: Any) -> RunnableTask:
    """Make a task that has waited for as many seconds as its PID."""
    given: dict[str, Any] = {
        "comm": f"task-{pid}" if pid else "swapper/0",
        "sched_class": "fair" if pid else "idle",
        "policy": "OTHER",
        "priority": 20,
        "rt_priority": None,
        "nice": 0,
        "deadline_ns": None,
        "wait_ns": pid * SECOND,
        "wait_bound": "exact",
        "cgroup": None,
        "throttled": False,
    }
    return RunnableTask(pid=pid, **(given | others))


def fifo(pid: int, priority: int, **others: Any) -> RunnableTask:
    given = {"sched_class": "realtime", "policy": "FIFO", "rt_priority": priority}
    return queued(pid, **(given | {"nice": None} | others))


def queue(cpu: int, **others: Any) -> RunQueue:
    """Make a run queue, by default of a CPU that has been idle for 2 seconds."""
    given: dict[str, Any] = {
        "running": 0,
        "current": queued(0),
        "waiting": (),
        "clock_ns": 35 * SECOND,
        "lag_ns": 0,
        "ticked_ns": 0,
        "switched_ns": 2 * SECOND,
        "lag_why": "idle",
        "panicked": False,
    }
    return RunQueue(cpu=cpu, **(given | others))


def finding(code: str, text: str, advice: str | None = None) -> Diagnostic:
    return Diagnostic(code=code, text=text, cpus=(), advice=advice)


def report(
    cpus: Sequence[Cpu], sets: Sequence[CpuSet] | None = None, **others: Any
) -> CpusReport:
    """Make a report of a dump, by default with all online CPUs in the default set."""
    if sets is None:
        sets = [cpuset("default", [row.cpu for row in cpus if row.online])]
    given: dict[str, Any] = {
        "target": TARGET,
        "taken_at_ns": None,
        "interval_ns": None,
        "coverage": {},
        "notes": (),
        "load": None,
        "run_queues": (),
        "findings": (),
    }
    return CpusReport(cpus=tuple(cpus), sets=tuple(sets), **(given | others))
