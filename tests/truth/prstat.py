# SPDX-License-Identifier: LGPL-2.1-or-later

"""Facts of msa-prstat: figures of threads and processes in /proc.

Only tasks at rest are compared: they wait for an event that does not happen.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fixtures.lab import Run
from msatools.tasks.accounting import UNSTABLE_BOUND_NS
from tests.memory.truth import page_kib
from tests.prstat.reports import TICK_NS, Task, said
from tests.truth.fact import Fact, Figures

Texts = Mapping[int, Any]
"""ID of a thread or process -> contents of a file."""

STAT = {"ppid": 4, "min_flt": 10, "maj_flt": 12, "pri": 18, "nice": 19}
STAT |= {"threads": 20, "size_bytes": 23, "cpu": 39}
"""Field numbers in /proc/PID/task/TID/stat, from 1."""

CHILDREN = {"user_ns": 16, "system_ns": 17, "min_flt": 11, "maj_flt": 13}
"""Field numbers in /proc/PID/stat of the sums over reaped children."""


@cache
def resting(name: str) -> dict[int, int]:
    """Map the threads at rest to their processes."""
    workload = said(name).run.workload
    rest = {t["tid"]: t["pid"] for t in workload["tasks"].values() if t["steady"]}
    for server in workload["servers"].values():
        rest |= dict.fromkeys(server["workers"], server["pid"])
    return rest


@cache
def directories(name: str, processes: bool) -> dict[int, str]:
    """Map threads at rest, or processes with no others, to their /proc directories."""
    rest = resting(name)
    if not processes:
        return {tid: f"proc/{pid}/task/{tid}" for tid, pid in rest.items()}
    listed = (file.split("/") for file in said(name).names if "/task/" in file)
    moving = {int(parts[1]) for parts in listed if int(parts[3]) not in rest}
    return {pid: f"proc/{pid}" for pid in set(rest.values()) - moving}


@cache
def texts(name: str, file: str, processes: bool) -> Texts:
    """Return a file of each thread or process at rest for which it was recorded."""
    truth = said(name)
    read: dict[str, Callable[[str], Any]] = {
        "stat": truth.stat,
        "status": truth.status,
        "schedstat": truth.schedstat,
    }
    return {
        pid: read[file](path) if file in read else truth.run.truth(f"{path}/{file}")
        for pid, path in directories(name, processes).items()
        if truth.has(f"{path}/{file}")
    }


def by_pid(value: Callable[[Task], Any]) -> Callable[[Any], Figures]:
    def reported(report: Any) -> Figures:
        return {task["pid"]: value(task) for task in report["tasks"]}

    return reported


def fact(
    name: str,
    value: Callable[[Task], Any],
    file: str,
    parse: Callable[[Any], Any],
    processes: bool = False,
    **tolerance: Any,
) -> Fact:
    """Return the fact that a value of each row equals a figure in a file.

    :param parse: Returns the figure from the file's contents; ``None`` to skip it.
    """

    def recorded(run: Run) -> Figures:
        found = texts(run.name, file, processes).items()
        figures = {pid: parse(text) for pid, text in found}
        return {pid: value for pid, value in figures.items() if value is not None}

    return Fact(name, by_pid(value), recorded, **tolerance)


def in_stat(key: str, field: int, processes: bool = False) -> Fact:
    """Return the fact that a number equals a field of the stat file."""
    where = "of processes" if processes else "of threads"
    return fact(
        f"{key} {where}",
        lambda task: task[key],
        "stat",
        lambda fields: int(fields[field]),
        processes,
    )


def of_children(key: str, field: int) -> Fact:
    unit = TICK_NS if key.endswith("_ns") else 1
    return fact(
        f"{key} of children",
        lambda task: task["children"][key] // unit,
        "stat",
        lambda fields: int(fields[field]),
        processes=True,
    )


def cpu_ns(task: Task) -> int:
    return int(task["user_ns"] + task["system_ns"])


def resident_bytes(status: dict[str, list[str]]) -> int | None:
    """Return VmRSS, of processes with at most two threads."""
    if "VmRSS" not in status or int(status["Threads"][0]) > 2:
        return None
    return int(status["VmRSS"][0]) << 10


def classes(run: Run) -> Figures:
    """Return the class of each named task at rest, as recorded by the workload."""
    named = run.workload["tasks"].values()
    return {task["tid"]: task["class"] for task in named if task["steady"]}


def ram(run: Run) -> Figures:
    (line,) = (
        line
        for line in run.truth("proc/meminfo").decode().splitlines()
        if line.startswith("MemTotal:")
    )
    return {"bytes": int(line.split()[1]) << 10}


SWITCHED = {"schedstats": "sched_schedstats", "delayacct": "task_delayacct"}


def switches(run: Run) -> Figures:
    return {
        key: run.truth(f"proc/sys/kernel/{file}").strip() == b"1"
        for key, file in SWITCHED.items()
    }


THREADS = (
    fact("state", lambda task: task["state"], "stat", lambda fields: fields[3]),
    *(in_stat(key, field) for key, field in STAT.items()),
    fact(
        "uid",
        lambda task: task["uid"],
        "status",
        lambda status: int(status["Uid"][0]),
    ),
    fact(
        "nvcsw",
        lambda task: task["nvcsw"],
        "status",
        lambda status: int(status["voluntary_ctxt_switches"][0]),
    ),
    fact(
        "nivcsw",
        lambda task: task["nivcsw"],
        "status",
        lambda status: int(status["nonvoluntary_ctxt_switches"][0]),
    ),
    fact(
        "rss_bytes",
        lambda task: task["rss_bytes"],
        "status",
        resident_bytes,
        tolerance=lambda run: 3 * 64 * (page_kib(run) << 10) * 2,
        cause="VmRSS lacks the per-thread (6.1) or per-CPU parts of three counters",
    ),
    fact("time on the CPU", cpu_ns, "schedstat", lambda times: times[0]),
    fact(
        "latency_ns",
        lambda task: task["latency_ns"],
        "schedstat",
        lambda times: times[1],
        tolerance=lambda run: UNSTABLE_BOUND_NS,
        cause="latency is cut to the lifetime, because the CPUs' clocks differ",
    ),
    fact(
        "cgroup",
        lambda task: task["cgroup"],
        "cgroup",
        # Those of version 1 come before.
        lambda text: text.decode().rpartition("0::")[2].removesuffix("\n"),
    ),
    fact(
        "comm",
        lambda task: task["comm"],
        "comm",
        lambda text: text[:-1].decode("utf-8", "backslashreplace"),
    ),
    Fact("class", by_pid(lambda task: task["class"]), classes),
    Fact("RAM", lambda report: {"bytes": report["totals"]["ram_bytes"]}, ram),
    Fact("accounting", lambda report: report["accounting"], switches),
)

PROCESSES = (
    in_stat("min_flt", 10, processes=True),
    in_stat("maj_flt", 12, processes=True),
    in_stat("threads", 20, processes=True),
    fact(
        "ticks on the CPU",
        lambda task: cpu_ns(task) // TICK_NS,
        "stat",
        lambda fields: int(fields[14]) + int(fields[15]),
        processes=True,
        tolerance=lambda run: 1,
        cause="the kernel rounds user and system time down to ticks separately",
    ),
    *(of_children(key, field) for key, field in CHILDREN.items()),
)
"""Figures of processes, which include threads that have exited."""
